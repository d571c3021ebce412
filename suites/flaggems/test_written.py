"""A model writes a kernel for each row: with cards, with their names, with neither. A chain is three shots.

pytest suites/flaggems/test_written.py --platform sm90 --klineage-stage compile -k root          # naive kernels build
pytest suites/flaggems/test_written.py --platform sm90 --klineage-executor batch:JUDGE --klineage-llm exchange \\
    --klineage-exchange REPLIES --klineage-model exchange --klineage-prices suites/exchange-prices.toml \\
    --klineage-trajectories DIR [-k "row_01 or row_02"]
pytest-klineage judge JUDGE --for 8m                                    # on a machine with the GPU, after each turn

Chains go forward together, a shot each; recorded ones replay with --klineage-llm replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from design import NONE
from running import Runner, method_of, prompt_digest, task_of
from written import digest_of, written_design

from pytest_klineage import KlineageSession
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.plugin import Models
from pytest_klineage.lab.studies.chains import chains_below, root_speeds
from pytest_klineage.lab.studies.effect import report

DESIGN = written_design()
FOLDER = "flaggems"


@pytest.fixture
def runner(
    klineage_session: KlineageSession, klineage_models: Models, write_line: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> Runner:  # fmt: skip
    """Runs chains; skips the test on another platform."""
    if klineage_session.platform != DESIGN.platform:
        pytest.skip(f"kernels are written for {DESIGN.platform}")
    return Runner(klineage_session, klineage_models, request, write_line)


@pytest.fixture(scope="session")
def asked() -> str:
    """Digest of every first prompt: chains of other prompts are in no comparison."""
    return digest_of({name: {arm: prompt_digest(DESIGN, name, arm) for arm in DESIGN.arms} for name in DESIGN.targets})


@pytest.mark.parametrize("target", DESIGN.targets)
def test_root(target: str, runner: Runner) -> None:
    """The naive kernel that a chain begins with is right; its speed stands in for chains without a right kernel."""
    settings = runner.session.settings
    if settings.gate.get("stage") != "compile" and settings.batch is None:
        pytest.skip("with --klineage-stage compile or --klineage-executor batch:DIR")
    if DESIGN.case(target).id in root_speeds(runner.verdicts):
        pytest.skip(f"{runner.verdicts} has it")
    verdict = runner.judging(DESIGN.gate)(DESIGN.case(target, of_root=True), DESIGN.root(target))
    assert verdict.ok, f"{verdict.code.value}: {verdict.reasons[0].message}"


@pytest.mark.parametrize("repeat", range(1, DESIGN.repeats + 1))
@pytest.mark.parametrize("arm", DESIGN.arms)
@pytest.mark.parametrize("target", DESIGN.targets)
def test_chain(
    target: str, arm: str, repeat: int, runner: Runner, request: pytest.FixtureRequest,
    agree: Callable[[Sequence[Rejudged]], None],
) -> None:  # fmt: skip
    """A model gets as far as it gets in its shots: only a replay can fail."""
    if runner.models.backend == NONE:
        pytest.skip("asks a language model: --klineage-llm=exchange; or replays what is recorded")
    task = task_of(DESIGN, target)
    method = method_of(DESIGN, arm, task.case, DESIGN.cards(target, arm), DESIGN.shots)
    settings = {
        "method": method.name, "arm": arm, "target": target, "repeat": str(repeat), "case": task.case.id,
        "platform": DESIGN.platform, "surface": DESIGN.surface.value, "steps": str(DESIGN.shots),
        "design": request.getfixturevalue("asked"),
    }  # fmt: skip
    outcome = runner.run(
        f"{FOLDER}/{arm}/{target}-{repeat}", task, method, settings, steps=DESIGN.shots, budget_usd=DESIGN.budget_usd,
        gate=DESIGN.gate,
    )  # fmt: skip
    agree(outcome.rejudged)


def test_report(runner: Runner, asked: str, write_line: Callable[[str], None]) -> None:
    """Says what the chains of today's prompts come to."""
    chains = [chain for chain in chains_below(runner.folder / FOLDER) if chain.design == asked]
    if not chains:
        pytest.skip("no chain of these prompts is there yet")
    write_line(report(DESIGN.study, chains, root_speeds(runner.verdicts)))
