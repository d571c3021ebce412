"""Generated-only, the paper's Table 4: the same model, budget and words without any card; and what lies between.

pytest suites/ablations/test_generated_only.py --platform cpu --klineage-llm exchange --klineage-exchange DIR \
    --klineage-model NAME [--ablation labels-only] [--trials 5] [--steps 8] [-k gemm]
pytest suites/ablations/test_generated_only.py --platform cpu --klineage-llm replay

--ablation: generated-only (no card), labels-only (names and categories of the cards), klineage-without-case,
-language, -platform or -done (one dimension of retrieval switched off). The table compares with the trials of
test_roundtrip_recovery.py, which have the cards. A replay fails where a verdict is of another class than recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from trials import (
    OPERATORS,
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

from pytest_klineage import KlineageSession, UnknownName
from pytest_klineage.lab.library.retrieval import CardIndex
from pytest_klineage.lab.optimizers.klineage import CARD_METHODS
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.plugin import Models

NAME, WITH_CARDS = "generated_only", "roundtrip_recovery"
DEFAULT = "generated-only"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each method, kernel and trial."""
    if "trial" not in metafunc.fixturenames:
        return
    methods = metafunc.config.getoption("--ablation") or [DEFAULT]
    for method in methods:
        if method not in CARD_METHODS:
            pytest.fail(f"klineage: {UnknownName('ablation', method, CARD_METHODS)}", pytrace=False)
    numbers = range(1, trials_asked(metafunc.config) + 1)
    triples = [(method, operator, number) for method in methods for operator in OPERATORS for number in numbers]
    metafunc.parametrize(
        ("method", "operator", "trial"), triples, ids=[f"{m}-{operator}-{number}" for m, operator, number in triples]
    )


@pytest.fixture(scope="module", autouse=True)
def table(klineage_session: KlineageSession) -> Iterator[None]:
    """Makes the table again from all trajectories, when a model was asked."""
    yield
    if was_run(klineage_session) and (trials := recorded_in(klineage_session, NAME)):
        write_table(klineage_session, NAME, table_of(trials, recorded_in(klineage_session, WITH_CARDS)))


def test_generated_only(
    method: str,
    operator: str,
    trial: int,
    klineage_session: KlineageSession,
    klineage_models: Models,
    request: pytest.FixtureRequest,
    agree: Callable[[Sequence[Rejudged]], None],
) -> None:
    """The model gets as far as it gets: only a replay can fail. A case that cannot be judged here is skipped."""
    name = f"{NAME}-{klineage_session.platform}/{method}/{operator}-{trial}"
    index = CardIndex(()) if method == DEFAULT else library(request.config, klineage_models)
    outcome = run_trial(name, method, operator, klineage_session, klineage_models, index, request)
    if outcome.stopped == "not_judged":
        pytest.skip(f"klineage: {outcome.message}")
    agree(outcome.rejudged)


def test_table_is_that_of_the_trajectories(klineage_session: KlineageSession) -> None:
    """The committed table follows from the committed trajectories; --publish makes it again."""
    if was_run(klineage_session):
        pytest.skip("the table is being made")
    if not (trials := recorded_in(klineage_session, NAME)):
        pytest.skip(f"no trajectory of {NAME} is recorded")
    hold_table(klineage_session, NAME, table_of(trials, recorded_in(klineage_session, WITH_CARDS)))


def table_of(trials: list[Trial], with_cards: list[Trial]) -> Iterator[str]:
    """By method and kernel: the best of all trials, beside the best with cards and the expert."""
    yield "# Without cards"
    yield ""
    yield (
        "Best kernel of all trials, timed in turns with the expert's. Slower than with cards: the share of the best "
        f"one with cards over this one's. {conditions(trials)}"
    )
    yield ""
    yield "| method | kernel | trials | right | best ms | share of the expert's speed | slower than with cards | USD |"
    yield "|---|---|---|---|---|---|---|---|"
    for method, operator in sorted({(trial.method, trial.operator) for trial in trials}):
        own = [trial for trial in trials if (trial.method, trial.operator) == (method, operator)]
        best, other = _best(own), _best([trial for trial in with_cards if trial.operator == operator])
        share, time, slowdown = "no right kernel", "-", "-"
        if best is not None and best.best is not None:
            share = f"{best.best.estimate:.2f} [{best.best.low:.2f}, {best.best.high:.2f}]"
            time = f"{best.best_ms:.3f}"
            if other is not None and other.best is not None:
                slowdown = f"{other.best.estimate / best.best.estimate:.2f}x"
        cost = sum(trial.cost_usd for trial in own)
        right = sum(trial.best is not None for trial in own)
        yield f"| {method} | {operator} | {len(own)} | {right} | {time} | {share} | {slowdown} | {cost:.3f} |"


def _best(trials: list[Trial]) -> Trial | None:
    """The trial with the highest lower bound of the speedup; None when none was right."""
    right = [trial for trial in trials if trial.best is not None]
    return max(right, key=lambda trial: trial.best.low if trial.best is not None else 0.0, default=None)
