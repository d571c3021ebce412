"""One trial of an ablation: from the naive kernel, against the expert, and back from its trajectory to a row."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

# Not with the others: it lies in the folder above.
from judged_roots import judging_once, taking_known_root

from pytest_klineage import Gate, KernelCase, KernelSource, KlineageSession, Verdict, paper_case
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.retrieval import CardIndex
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.instructions import cpu_features, instructions_for, machine_text
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage
from pytest_klineage.lab.optimizers.session import Judge, OptimizationResult, Screen, optimize
from pytest_klineage.lab.optimizers.task import StepProgress, Task
from pytest_klineage.lab.plugin import Models, model_settings
from pytest_klineage.records import (
    Begun,
    Event,
    Interval,
    Judged,
    Machine,
    Noted,
    Stopped,
    charged_usd,
    from_json,
    to_json,
)
from pytest_klineage.results.packed import line_files
from pytest_klineage.results.runs import Record

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
TRIALS, STEPS = 5, 8
"""How many there are unless --trials and --steps say otherwise."""
RECOVERED = 0.9
"""Share of the expert's speed that counts as recovered, as in the paper's Table 3."""
REFERENCES = {"cpu": "torch"}
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
    """Expert's time over the best kernel's; None when none was right."""
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
        if expert.operator == operator and {"naive", "expert"} <= set(expert.variants):
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
    begun = _recorded(models, name)
    steps = int(begun.get("steps", config.getoption("--steps") or STEPS))
    screens = begun.get("screen") == "yes" if begun else models.screens
    features = cpu_features() if session.platform == "cpu" else ()
    chosen = CardMethod(
        method, index, k=config.getoption("--cards"), capabilities=features, goal=GOAL.format(share=RECOVERED),
        max_steps=steps, contaminated=contaminated,
    )  # fmt: skip
    task = _task(expert, case, session, features)
    settings = _settings(name, chosen, task, steps) | ({"screen": "yes"} if screens else {})
    opened = models.session(name, settings=settings)
    judge = _judge(name, session, models, expert, task, request)
    try:
        return optimize(
            task, chosen, opened, judge, max_steps=steps, target_speedup=RECOVERED, on_step=telling(session, name),
            screen=screening(session.gate, expert.source("expert")) if screens and not models.is_replay else None,
        )  # fmt: skip
    finally:
        models.close()


def telling(session: KlineageSession, name: str) -> Callable[[StepProgress], None] | None:
    """Writes a line to the terminal after every step, past pytest's capture; None where no progress is wanted."""
    plugins = session.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    if session.settings.progress == "off" or reporter is None:
        return None

    def tell(step: StepProgress) -> None:
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"{name}: {step.line}")

    return tell


def judging(
    session: KlineageSession, gate: Gate | ExecutorGate, expert: KernelSource, nodeid: str, *, keep: str | None
) -> Judge:
    """A judge that times against the expert, and keeps every verdict: in the run store, and with `keep` in results/."""

    def judge(case: KernelCase, source: KernelSource) -> Verdict:
        if session.progress is not None:
            session.progress.begin(f"{case.id} {source.label}")
        try:
            verdict = gate.judge(case, source, reference_source=expert)
        finally:
            if session.progress is not None:
                session.progress.end()
        session.remember(nodeid, verdict)
        if keep is not None:
            path = verdicts_path(session, keep)
            path.parent.mkdir(parents=True, exist_ok=True)
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            with path.open("ab") as file:
                file.write(to_json(Record(nodeid=nodeid, verdict=verdict, recorded_at=at)) + b"\n")
        return verdict

    return judge


def screening(gate: Gate | ExecutorGate, expert: KernelSource) -> Screen:
    """A judge that screens against the expert. What it says is in the trajectory only."""

    def screen(case: KernelCase, source: KernelSource, best: float) -> Verdict:
        return gate.judge(case, source, reference_source=expert, screen_against=best)

    return screen


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
    against, nodeid = expert.source("expert"), request.node.nodeid
    if models.is_replay:
        quick = judging(session, request.getfixturevalue("quick_gate"), against, nodeid, keep=None)
        return judging_once(quick, request.getfixturevalue("judged_before"))
    judge = judging(session, session.gate, against, nodeid, keep=name)
    if task.root is None:
        return judge
    files = sorted(verdicts_path(session, name).parent.glob("*.jsonl"))
    return taking_known_root(judge, task.root, files, session.gate.machine())


def _task(expert: Expert, case: KernelCase, session: KlineageSession, features: tuple[str, ...]) -> Task:
    root = expert.source("naive")
    described = machine_text(session.gate.machine(), threads=session.gate_settings.threads, features=features)
    text = instructions_for(
        case, expert.surface, session.platform, root.entry, root.flags, machine=described,
        reference="an expert's kernel",
    )  # fmt: skip
    return Task(case=case, platform=session.platform, surface=expert.surface, root=root, instructions=text)


def _settings(name: str, method: CardMethod, task: Task, steps: int) -> dict[str, str]:
    return {
        "method": method.name, "case": task.case.id, "platform": task.platform, "surface": task.surface.value,
        "trial": name.rpartition("-")[2], "steps": str(steps), "cards": str(method.k), "target": f"{RECOVERED:g}",
    }  # fmt: skip


def _recorded(models: Models, name: str) -> dict[str, str]:
    """The settings that a trial was begun with, for a replay and a resumed run; empty for a new one."""
    if not models.is_recorded(name):
        return {}
    return next((dict(event.settings) for event in _events(models.path(name)) if isinstance(event, Begun)), {})


def _events(path: Path) -> list[Event]:
    return [line.event for line in read_trajectory(path)[0]]


def _trial(path: Path) -> Trial:
    events = _events(path)
    begun = next(event for event in events if isinstance(event, Begun))
    verdicts = [from_json(event.text, VerdictMessage).verdict for event in events
            if isinstance(event, Noted) and event.topic == VERDICT_TOPIC]  # fmt: skip
    scored = [verdict for verdict in verdicts if verdict.scored and verdict.timing is not None]
    # By the lower end of the interval: of many estimates the highest would be the luckiest.
    best = max(scored, key=lambda verdict: verdict.timing.speedup.low if verdict.timing else 0.0, default=None)
    timing = best.timing if best is not None else None
    notes = [event.text for event in events if isinstance(event, Noted) and event.topic == "cards"]
    steps = [event for event in events if isinstance(event, Judged) and event.call]
    malformed = [event for event in events if isinstance(event, Noted) and event.topic == "malformed"]
    return Trial(
        method=begun.settings["method"],
        operator=begun.settings["case"].partition("-")[0],
        number=int(begun.settings["trial"]),
        best=timing.speedup if timing is not None else None,
        best_ms=timing.candidate_ms if timing is not None else None,
        expert_ms=timing.reference_ms if timing is not None else None,
        steps=len(steps) + len(malformed),
        right=sum(event.speedup is not None or event.screened for event in steps),
        cost_usd=charged_usd(events),
        stopped=next((event.reason for event in reversed(events) if isinstance(event, Stopped)), "not ended"),
        model=begun.model,
        cards=notes[0] if notes else "none",
        machine=best.machine if best is not None else None,
    )
