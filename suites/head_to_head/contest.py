"""One run of one method on one workload: asked, resumed or replayed. No table is made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

# Not with the others: they lie in the folder above.
from judged_roots import taking_known_root
from searches import NAIVE, recorded_so_far, task_of

from pytest_klineage import KernelCase, KlineageSession, UnknownName, paper_case
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.retrieval import CardIndex
from pytest_klineage.lab.optimizers.adaexplore.method import START_TOPIC
from pytest_klineage.lab.optimizers.instructions import cpu_features
from pytest_klineage.lab.optimizers.klineage import CARDS_TOPIC
from pytest_klineage.lab.optimizers.methods import COMPARED, METHOD_NAMES, MethodSettings, make_method, needs_cards
from pytest_klineage.lab.optimizers.replaying import read_recorded, replayed
from pytest_klineage.lab.optimizers.session import Judge, OptimizationResult, Screen, optimize
from pytest_klineage.lab.optimizers.task import StepProgress, Task
from pytest_klineage.lab.plugin import Models
from pytest_klineage.surfaces import SURFACES

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
RUNS, STEPS = 3, 256
"""How many there are unless --runs and --steps say otherwise. More steps than any method's own search has, 248: dollars
end a run, since one generation of a method is not its result."""
OWN_CARDS = "-own-cards"
VERDICTS_SUFFIX = ".verdicts.jsonl"
COMMAND = (
    "pytest suites/head_to_head --platform {platform} --klineage-llm=exchange --klineage-exchange=DIR "
    "--klineage-model=NAME --methods={method} -k {operator}"
)


def methods_asked(config: pytest.Config) -> list[str]:
    """Names given with --methods, or the four that are compared. The run ends for a name that is not known."""
    given = [name for text in config.getoption("--methods") or COMPARED for name in text.split(",")]
    for name in given:
        if name not in METHOD_NAMES:
            pytest.fail(f"klineage: {UnknownName('method', name, METHOD_NAMES)}", pytrace=False)
    return list(dict.fromkeys(given))


def run_numbers(config: pytest.Config) -> range:
    """Runs of each method, from 1."""
    asked: int | None = config.getoption("--runs")
    return range(1, (RUNS if asked is None else asked) + 1)


def expert_of(session: KlineageSession, operator: str, language: str = "") -> Expert:
    """The folder with the naive kernel in a language, or in the one that is asked for; skips the test without one."""
    language = language or session.config.getoption("--language") or ("cpp" if session.platform == "cpu" else "cuda")
    if language not in SURFACES:
        pytest.fail(f"klineage: {UnknownName('surface', language, SURFACES)}", pytrace=False)
    for expert in find_experts(ROOT / "experts", session.platform):
        if (expert.operator, expert.surface.value) == (operator, language) and NAIVE in expert.variants:
            return expert
    pytest.skip(f"experts/{operator} has no naive kernel in {language} for {session.platform}")


def case_of(platform: str, operator: str) -> KernelCase:
    """The paper's case for this platform, to be as fast as its reference."""
    return paper_case(operator, "cpu" if platform == "cpu" else "gpu")


def ask(
    name: str, method: str, operator: str, session: KlineageSession, models: Models, judge: Judge,
    write_line: Callable[[str], None], kept: Path, screen: Screen | None = None,
) -> OptimizationResult:  # fmt: skip
    """Run or resume one optimization. The test is skipped when it is recorded and not to be resumed.

    `kept` is the file of verdicts, in which the root's may stand already. `screen` screens kernels before `judge`
    where --klineage-screen asks for it, or the run was begun so.
    """
    if models.is_done(name):
        pytest.skip(f"{models.path(name)} is recorded; --klineage-resume={name} goes on with it")
    config, expert = session.config, expert_of(session, operator)
    before = recorded_so_far(models, name)
    begun = before.settings
    steps = int(begun.get("steps", config.getoption("--steps") or STEPS))
    features = cpu_features() if session.platform == "cpu" else ()
    case, seed = case_of(session.platform, operator), int(name.rpartition("-")[2])
    task = task_of(session, expert, case, features, seed=seed)
    # A run may wait for the root's verdict before it comes to its cards or rules: only notes say that it did.
    chooses = needs_cards(method) and before.first(CARDS_TOPIC) is None
    index = library(config, session.platform) if chooses else CardIndex(())
    rules = Path("recorded") if before.first(START_TOPIC) is not None else None
    settings = MethodSettings(
        index=index, k=config.getoption("--cards"), capabilities=features, max_steps=steps,
        contaminated=config.getoption("--own-cards"),
        rules_path=config.getoption("--rules") or rules,
    )  # fmt: skip
    screens = begun.get("screen") == "yes" if begun else models.screens
    recorded = _settings(name, method, task, steps, config) | ({"screen": "yes"} if screens else {})
    opened = models.session(name, settings=recorded)
    if task.root is not None:
        judge = taking_known_root(judge, task.root, [kept], session.gate.machine())

    def on_step(step: StepProgress) -> None:
        write_line(f"{name}: {step.line}")

    return optimize(
        task, make_method(method, settings), opened, judge, max_steps=steps, on_step=on_step,
        screen=screen if screens else None,
    )  # fmt: skip


def replay(
    name: str, operator: str, session: KlineageSession, models: Models, judge: Judge, scratch: Path
) -> OptimizationResult:
    """Replay one recorded optimization; every kernel is judged again. The test is skipped when none is recorded."""
    if not models.is_recorded(name):
        _, method, _ = name.split("/")
        command = COMMAND.format(platform=session.platform, method=method, operator=operator)
        pytest.skip(f"{models.path(name)} is not recorded; this records it: {command}")
    recorded = read_recorded(models.path(name))
    expert = expert_of(session, operator, recorded.begun.settings.get("surface", ""))
    return replayed(recorded, expert.source(NAIVE), scratch, judge)


def folder_of(method: str, config: pytest.Config) -> str:
    """Where a method's runs lie; those with cards of the workload's own operator and shape are apart."""
    return f"{method}{OWN_CARDS}" if needs_cards(method) and config.getoption("--own-cards") else method


def library(config: pytest.Config, platform: str) -> CardIndex:
    """The cards of --skills. The test is skipped when none is admitted that was verified on the platform."""
    folder = Path(config.getoption("--skills") or ROOT / "skills")
    cards = find_cards(folder) if folder.is_dir() else []
    if not any(card.status == "admitted" and platform in {at.platform for at in card.verified} for card in cards):
        pytest.skip(f"{folder} has no card that is admitted on {platform}: see suites/lineage and suites/admission")
    return CardIndex(cards)


def _settings(name: str, method: str, task: Task, steps: int, config: pytest.Config) -> dict[str, str]:
    return {
        "method": method, "case": task.case.id, "platform": task.platform, "surface": task.surface.value,
        "reference": task.case.reference, "run": name.rpartition("-")[2], "seed": str(task.seed), "steps": str(steps),
        "cards": str(config.getoption("--cards")),
    }  # fmt: skip
