"""One trial of an ablation: from the naive kernel, against the expert, and back from its trajectory to a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

# Not with the others: they lie in the folder above.
from judged_roots import judging_once, taking_known_root
from searches import NAIVE, judging, recorded_so_far, screening, task_of

from pytest_klineage import KernelCase, KlineageSession, paper_case
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.retrieval import CardIndex
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.instructions import cpu_features
from pytest_klineage.lab.optimizers.klineage import CARDS_TOPIC, CardMethod
from pytest_klineage.lab.optimizers.recording import Recording
from pytest_klineage.lab.optimizers.replaying import has_root, steps_of
from pytest_klineage.lab.optimizers.session import Judge, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.lab.plugin import Models, model_settings
from pytest_klineage.records import Interval, Judged, Machine, Stopped, begun_of, charged_usd
from pytest_klineage.results.packed import line_files

ROOT = Path(__file__).resolve().parents[2]
EXPERT = "expert"
OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
TRIALS, STEPS = 5, 8
"""How many there are unless --trials and --steps say otherwise."""
RECOVERED = 0.9
"""Share of the expert's speed that counts as recovered, as in the paper's Table 3."""
REFERENCES = {"cpu": "torch"}
REFERENCE = "an expert's kernel"
"""Whom prompts say that kernels are timed against."""
GOAL = "Reach {share:.0%} of the reference's speed: the reference is an expert's kernel for this very case."
NEEDS = (
    "needs a language model (--klineage-llm=exchange, anthropic or command); --klineage-llm=replay goes through "
    "recorded trajectories"
)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial, read from its trajectory."""

    method: str
    operator: str
    number: int
    best: Interval | None
    """Expert's time over the best kernel's that a model made; None when none was right."""
    best_ms: float | None
    expert_ms: float | None
    steps: int
    right: int
    """Steps whose kernel was right."""
    cost_usd: float
    stopped: str
    model: str
    cards: str
    machine: Machine | None

    @property
    def is_recovered(self) -> bool:
        """Whether the best kernel has at least RECOVERED of the expert's speed."""
        return self.best is not None and self.best.estimate >= RECOVERED


def expert_of(platform: str, operator: str) -> Expert:
    """The platform's expert folder of an operator; the test is skipped without one."""
    for expert in find_experts(ROOT / "experts", platform):
        if expert.operator == operator and {NAIVE, EXPERT} <= set(expert.variants):
            return expert
    pytest.skip(f"experts/{operator} has no naive and expert kernel for {platform}")


def case_of(platform: str, operator: str) -> KernelCase:
    """The paper's case, to be as fast as the expert up to RECOVERED."""
    chosen = paper_case(operator, "cpu" if platform == "cpu" else "gpu", REFERENCES.get(platform, "torch"))
    return msgspec.structs.replace(chosen, at_least=RECOVERED)


def trials_asked(config: pytest.Config) -> int:
    """Trials of each kernel."""
    asked: int | None = config.getoption("--trials")
    return TRIALS if asked is None else asked


def library(config: pytest.Config, models: Models) -> CardIndex:
    """The cards of --skills; none for a replay, which shows what was recorded. Skips the test when none is admitted."""
    if models.backend == "none" or models.is_replay:
        return CardIndex(())
    folder = Path(config.getoption("--skills") or ROOT / "skills")
    cards = find_cards(folder)
    if not any(card.status == "admitted" for card in cards):
        pytest.skip(f"{folder} has no admitted card: induce and admit cards first (suites/lineage, suites/admission)")
    return CardIndex(cards)


def was_run(session: KlineageSession) -> bool:
    """Whether a model was asked, so that tables are to be made again."""
    return model_settings(session.config).get("llm", "none") not in ("none", "replay")


def recorded_in(session: KlineageSession, name: str) -> list[Trial]:
    """All recorded trials of an ablation on this platform."""
    base = model_settings(session.config).get("trajectories") or session.settings.results / "trajectories"
    return trials_in(base / f"{name}-{session.platform}")


def run_trial(
    name: str, method: str, operator: str, session: KlineageSession, models: Models, index: CardIndex,
    request: pytest.FixtureRequest, *, contaminated: bool = True,
) -> OptimizationResult:  # fmt: skip
    """Run, resume or replay the trial of that name. The test is skipped without a model, or without a recording."""
    if models.backend == "none":
        pytest.skip(f"{NEEDS}; {name} {'is recorded' if models.is_recorded(name) else 'is not recorded'}")
    if models.is_replay and not models.is_recorded(name):
        pytest.skip(f"no trajectory {models.path(name)} is recorded")
    if models.is_done(name):
        pytest.skip(f"{models.path(name)} is recorded; --klineage-resume={name} goes on with it")
    expert, case = expert_of(session.platform, operator), case_of(session.platform, operator)
    config = request.config
    begun = recorded_so_far(models, name).settings
    steps = int(begun.get("steps", config.getoption("--steps") or STEPS))
    screens = begun.get("screen") == "yes" if begun else models.screens
    features = cpu_features() if session.platform == "cpu" else ()
    chosen = CardMethod(
        method, index, k=config.getoption("--cards"), capabilities=features, goal=GOAL.format(share=RECOVERED),
        max_steps=steps, contaminated=contaminated,
    )  # fmt: skip
    task = task_of(session, expert, case, features, reference=REFERENCE)
    settings = _settings(name, chosen, task, steps) | ({"screen": "yes"} if screens else {})
    opened = models.session(name, settings=settings)
    judge = _judge(name, session, models, expert, task, request)
    write_line: Callable[[str], None] = request.getfixturevalue("write_line")
    screen = screening(session.gate, against=expert.source(EXPERT)) if screens and not models.is_replay else None
    try:
        return optimize(
            task, chosen, opened, judge, max_steps=steps, target_speedup=RECOVERED, screen=screen,
            on_step=lambda step: write_line(f"{name}: {step.line}"),
        )  # fmt: skip
    finally:
        models.close()


def verdicts_path(session: KlineageSession, name: str) -> Path:
    """Where the verdicts of a trial's ablation are kept, with their samples."""
    return session.settings.results / "ablations" / f"{name.partition('/')[0]}.jsonl"


def trials_in(folder: Path) -> list[Trial]:
    """All trials whose trajectories lie below a folder, by method, operator and number."""
    found = [_trial(path) for path in line_files(folder)]
    return sorted(found, key=lambda trial: (trial.method, trial.operator, trial.number))


def hold_table(session: KlineageSession, name: str, lines: Iterable[str]) -> None:
    """Fails unless the table in results/ablations/ is this one, to the letter; with --publish it is made so."""
    if session.config.getoption("--publish"):
        write_table(session, name, lines)
        return
    path = table_path(session, name)
    assert path.is_file(), f"{path} is not there; --publish makes it from the trajectories"
    assert path.read_text() == "\n".join(lines) + "\n", "--publish makes the table again from the trajectories"


def table_path(session: KlineageSession, name: str) -> Path:
    """Where an ablation's table lies."""
    return session.settings.results / "ablations" / f"{name}-{session.platform}.md"


def write_table(session: KlineageSession, name: str, lines: Iterable[str]) -> None:
    """Write a table to results/ablations/ and show it."""
    path = table_path(session, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("")
        reporter.write_line(text)


def conditions(trials: list[Trial]) -> str:
    """One line on what the trials were run with and on."""
    models = ", ".join(sorted({trial.model for trial in trials}))
    devices = ", ".join(
        sorted(
            {f"{trial.machine.device}, {trial.machine.cores} cores" for trial in trials if trial.machine is not None}
        )
    )
    own = any("lifted from this operator and shape" in trial.cards for trial in trials)
    note = " Cards of the target's own operator and shape were in the library." if own else ""
    return f"Model: {models}. Machine: {devices or 'unknown'}. Reference: the expert's kernel, in the same run.{note}"


def _judge(
    name: str, session: KlineageSession, models: Models, expert: Expert, task: Task, request: pytest.FixtureRequest
) -> Judge:
    """The session's gate, which takes a known root's verdict; in a replay a quick one, and every source once."""
    against, nodeid = expert.source(EXPERT), request.node.nodeid
    if models.is_replay:
        quick = judging(session, request.getfixturevalue("quick_gate"), nodeid, against=against)
        return judging_once(quick, request.getfixturevalue("judged_before"))
    kept = verdicts_path(session, name)
    judge = judging(session, session.gate, nodeid, against=against, keep=kept)
    if task.root is None:
        return judge
    files = list(line_files(kept.parent, "*"))
    return taking_known_root(judge, task.root, files, session.gate.machine())


def _settings(name: str, method: CardMethod, task: Task, steps: int) -> dict[str, str]:
    return {
        "method": method.name, "case": task.case.id, "platform": task.platform, "surface": task.surface.value,
        "trial": name.rpartition("-")[2], "steps": str(steps), "cards": str(method.k), "target": f"{RECOVERED:g}",
    }  # fmt: skip


def _trial(path: Path) -> Trial:
    events = [line.event for line in read_trajectory(path)[0]]
    begun = begun_of(events)
    if begun is None:
        pytest.fail(f"klineage: {path} does not begin as a trajectory does", pytrace=False)
    made = [event for event in events if isinstance(event, Judged)][has_root(events) :]
    before = Recording(events)
    verdicts = [before.messages[event.source_digest].verdict for event in made]
    scored = [verdict for verdict in verdicts if verdict.scored and verdict.timing is not None]
    # By the lower end of the interval: of many estimates the highest would be the luckiest.
    best = max(scored, key=lambda verdict: verdict.timing.speedup.low if verdict.timing else 0.0, default=None)
    timing = best.timing if best is not None else None
    return Trial(
        method=begun.settings["method"],
        operator=begun.settings["case"].partition("-")[0],
        number=int(begun.settings["trial"]),
        best=timing.speedup if timing is not None else None,
        best_ms=timing.candidate_ms if timing is not None else None,
        expert_ms=timing.reference_ms if timing is not None else None,
        steps=steps_of(events),
        right=sum(verdict.ranked for verdict in verdicts),
        cost_usd=charged_usd(events),
        stopped=next((event.reason for event in reversed(events) if isinstance(event, Stopped)), "not ended"),
        model=begun.model,
        cards=before.first(CARDS_TOPIC) or "none",
        machine=best.machine if best is not None else None,
    )
