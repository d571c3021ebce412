"""Roundtrip recovery, the paper's Table 3: from the naive kernel back to the expert's speed with retrieved cards only.

pytest suites/ablations/test_roundtrip_recovery.py --platform cpu --klineage-llm exchange --klineage-exchange DIR \
    --klineage-model NAME [--trials 5] [--steps 8] [-k gemm]          asks a model
pytest suites/ablations/test_roundtrip_recovery.py --held-out-cards ...           without cards of the very target
pytest suites/ablations/test_roundtrip_recovery.py --platform cpu --klineage-llm replay      reproduces every class

A trial has recovered when the best kernel has 90 % of the expert's speed, both timed in turns. A replay judges every
kernel again, and fails where a verdict is of another class than the recorded one: wrong stays wrong, right stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from trials import (
    OPERATORS,
    RECOVERED,
    Trial,
    conditions,
    hold_table,
    library,
    recorded_in,
    run_trial,
    trials_asked,
    was_run,
    write_table,
)

from pytest_klineage import KlineageSession
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.plugin import Models

NAME, HELD_OUT = "roundtrip_recovery", "roundtrip_recovery_held_out"
"""Of the ablation, and of the same without cards that were lifted from the target's own operator and shape."""


def name_of(config: pytest.Config) -> str:
    """The ablation that is asked for."""
    return HELD_OUT if config.getoption("--held-out-cards") else NAME


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each kernel and trial."""
    if "trial" in metafunc.fixturenames:
        numbers = range(1, trials_asked(metafunc.config) + 1)
        pairs = [(operator, number) for operator in OPERATORS for number in numbers]
        metafunc.parametrize(("operator", "trial"), pairs, ids=[f"{operator}-{number}" for operator, number in pairs])


@pytest.fixture(scope="module", autouse=True)
def table(klineage_session: KlineageSession) -> Iterator[None]:
    """Makes the table again from all trajectories, when a model was asked."""
    yield
    name = name_of(klineage_session.config)
    if was_run(klineage_session) and (trials := recorded_in(klineage_session, name)):
        write_table(klineage_session, name, table_of(trials))


def test_roundtrip_recovery(
    operator: str,
    trial: int,
    klineage_session: KlineageSession,
    klineage_models: Models,
    request: pytest.FixtureRequest,
    agree: Callable[[Sequence[Rejudged]], None],
) -> None:
    """The model gets as far as it gets: only a replay can fail. A case that cannot be judged here is skipped."""
    ablation = name_of(request.config)
    name = f"{ablation}-{klineage_session.platform}/klineage/{operator}-{trial}"
    index = library(request.config, klineage_models)
    outcome = run_trial(
        name, "klineage", operator, klineage_session, klineage_models, index, request, contaminated=ablation == NAME
    )
    if outcome.stopped == "not_judged":
        pytest.skip(f"klineage: {outcome.message}")
    agree(outcome.rejudged)


def test_table_is_that_of_the_trajectories(klineage_session: KlineageSession) -> None:
    """The committed table follows from the committed trajectories; --publish makes it again."""
    if was_run(klineage_session):
        pytest.skip("the table is being made")
    if not (trials := recorded_in(klineage_session, name := name_of(klineage_session.config))):
        pytest.skip(f"no trajectory of {name} is recorded")
    hold_table(klineage_session, name, table_of(trials))


def table_of(trials: list[Trial]) -> Iterator[str]:
    """Recovered of all by kernel, and every trial."""
    yield "# Roundtrip recovery"
    yield ""
    goal = f"From naive, with retrieved cards only, to at least {RECOVERED:.0%} of the expert's speed."
    yield f"{goal} {conditions(trials)}"
    yield ""
    yield "| kernel | recovered |"
    yield "|---|---|"
    for operator in sorted({trial.operator for trial in trials}):
        own = [trial for trial in trials if trial.operator == operator]
        yield f"| {operator} | {sum(trial.is_recovered for trial in own)}/{len(own)} |"
    yield f"| total | {sum(trial.is_recovered for trial in trials)}/{len(trials)} |"
    yield ""
    yield "| kernel | trial | share of the expert's speed | best ms | expert ms | steps | right | cost USD | ended by |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for trial in trials:
        share = "none was right"
        if trial.best is not None:
            share = f"{trial.best.estimate:.2f} [{trial.best.low:.2f}, {trial.best.high:.2f}]"
        times = " | ".join("-" if ms is None else f"{ms:.3f}" for ms in (trial.best_ms, trial.expert_ms))
        yield (
            f"| {trial.operator} | {trial.number} | {share} | {times} | {trial.steps} | {trial.right} | "
            f"{trial.cost_usd:.3f} | {trial.stopped} |"
        )
