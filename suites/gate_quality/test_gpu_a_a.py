"""A/A on a GPU: the same kernel on both sides of the gate, operator by operator; the CPU's table and claims.

pytest suites/gate_quality/test_gpu_a_a.py --platform sm90 -k gemm      one operator; the others' rows are kept
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from on_gpu import OPERATORS, first_right, gpu_platform, kept_rows, results_file, with_library
from test_a_a import MARGIN, Trial, intervals, table_of, trial_of

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.gate.statistics import Standing, median, standing
from pytest_klineage.operators import paper_case

TRIALS = 30
TIME_LIMIT_S = 0.3
"""Of the pairs of one trial: 150 trials have two and a half minutes of a GPU."""
BUDGET_S = 30.0
"""Of one operator; what has been measured by then is what is published."""
CLAIM = 0.95
FEW = 0.9
"""Share of one operator's intervals that must hold 1: of 30, two or three may miss it by chance."""


class GpuTrial(Trial, frozen=True, kw_only=True):
    """One trial, and whose kernel stood on both sides."""

    kernel: str = ""


def report_of(trials: list[GpuTrial], platform: str) -> str:
    """The page with its table."""
    machine = trials[-1].machine
    where = f"{machine.device}, {trials[-1].judged_at}" if machine else trials[-1].judged_at
    kernels = ", ".join(dict.fromkeys(trial.kernel for trial in trials))
    return (
        f"# A/A on {platform}: the same kernel as candidate and as reference\n\n{where}. Kernels: {kernels}. Policy "
        f"`paired` (stops at +-1 % or {TIME_LIMIT_S:g} s; a sample is a block of calls). Beside it, one side after the "
        f"other: `paper` (25 + 100 calls).\n\n{table_of(list(trials))}\n\nRaw samples: `a_a-{platform}.jsonl`."
    )


@pytest.fixture(scope="module")
def gate(klineage_session: KlineageSession) -> Iterator[Gate]:
    """One gate for all operators: its processes take ten seconds to start."""
    settings = msgspec.structs.replace(
        klineage_session.gate_settings, also_policies=("paper",), time_limit_s=TIME_LIMIT_S, margin=MARGIN, seeds=1
    )
    with Gate(gpu_platform(klineage_session), settings) as opened:
        yield opened


def measured(gate: Gate, operator: str, count: int) -> list[GpuTrial]:
    """The trials of one operator at the paper's shape."""
    case, trials = with_library(paper_case(operator, "gpu", "torch")), []
    source, _first = first_right(gate, case, against_itself=True)
    started = time.monotonic()
    for number in range(count):
        if time.monotonic() - started > BUDGET_S:
            break
        verdict = gate.judge(case, source, reference_source=source)
        assert verdict.timing is not None, f"{operator}: {verdict.code}: {verdict.reasons[0].message}"
        fields = msgspec.structs.asdict(trial_of(verdict, number))
        trials.append(GpuTrial(**fields, kernel=f"{operator}: {source.label}"))
    return trials


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpu_a_a(
    operator: str,
    gate: Gate,
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[GpuTrial]], None],
) -> None:
    """Nine of ten intervals hold 1.0, no trial is called slower, the median half-width is 2 % at most."""
    platform = gate.platform
    name = f"a_a-{platform}"
    count = min(TRIALS, max(1, request.config.getoption("--trials") // len(OPERATORS)))
    trials = measured(gate, operator, count)
    others = kept_rows(results_file(request.config, name), GpuTrial, without=lambda trial: trial.operator == operator)
    publish(name, report_of([*others, *trials], platform), [*others, *trials])
    found = intervals(list(trials), 0.95)
    assert sum(interval.low <= 1 <= interval.high for interval in found) >= FEW * len(trials)
    assert not any(standing(interval, at_least=1.0, margin=MARGIN) is Standing.SLOWER for interval in found)
    assert median([interval.half_width for interval in found]) <= 0.02


def test_gpu_a_a_of_all_operators(request: pytest.FixtureRequest, klineage_session: KlineageSession) -> None:
    """Over the trials of all operators together, 95 % of the intervals hold 1.0."""
    platform = gpu_platform(klineage_session)
    trials = kept_rows(results_file(request.config, f"a_a-{platform}"), GpuTrial, without=lambda trial: False)
    missing = set(OPERATORS) - {trial.operator for trial in trials}
    if missing:
        pytest.skip(f"not measured yet: {', '.join(sorted(missing))}")
    found = intervals(list(trials), 0.95)
    assert sum(interval.low <= 1 <= interval.high for interval in found) >= CLAIM * len(trials)
