"""A/A on a GPU: the same kernel on both sides of the gate, operator by operator; the CPU's table and claims.

pytest suites/gate_quality/test_gpu_a_a.py --platform sm90 -k gemm      one operator; the others' rows are kept
pytest suites/gate_quality/test_gpu_a_a.py --platform sm90 --reuse FILE      the table again from trials of several GPUs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest
from on_gpu import OPERATORS, first_right, gpu_platform, kept_rows, results_file, with_library
from test_a_a import MARGIN, Trial, intervals, table_of, trial_of

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.gate.timing.statistics import Standing, standing
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelCase, KernelSource

TRIALS = 30
TIME_LIMIT_S = 10.0
"""Of the pairs of one trial and of starting both sides again; most are precise enough before."""
BUDGET_S = 420.0
"""Of one operator; what has been measured by then is what is published."""
LONG_MS = 0.1
HALF_WIDTH_LONG, HALF_WIDTH_SHORT = 0.005, 0.02
"""What sampling stops at, and what the median trial must keep, for kernels over LONG_MS and for others."""
CLAIM = 0.95
FEW = 0.9
"""Share of one operator's intervals that must hold 1: of 30, two or three may miss it by chance."""


class GpuTrial(Trial, frozen=True, kw_only=True):
    """One trial, and whose kernel stood on both sides."""

    kernel: str = ""


def report_of(trials: list[GpuTrial], platform: str) -> str:
    """The page with its table."""
    devices = dict.fromkeys(trial.machine.device for trial in trials if trial.machine)
    days = sorted({trial.judged_at[: len("2026-11-22")] for trial in trials})
    where = ", ".join([*devices, " and ".join(days)])
    kernels = ", ".join(dict.fromkeys(trial.kernel for trial in trials))
    return (
        f"# A/A on {platform}: the same kernel as candidate and as reference\n\n{where}. Kernels: {kernels}. Policy "
        f"`paired` (stops at +-{100 * HALF_WIDTH_LONG:g} % for kernels over {LONG_MS:g} ms, at "
        f"+-{100 * HALF_WIDTH_SHORT:g} % for others, or after {TIME_LIMIT_S:g} s; a sample is a block of calls). "
        f"Beside it, one side after the other: `do_bench` (25 + 100 ms).\n\n{table_of(list(trials))}\n\n"
        f"Raw samples: `a_a-{platform}.jsonl`."
    )


def narrow_enough(reference_ms: float) -> float:
    """The half-width that is asked of a kernel of this length."""
    return HALF_WIDTH_LONG if reference_ms > LONG_MS else HALF_WIDTH_SHORT


@pytest.fixture(scope="module")
def gate(klineage_session: KlineageSession) -> Iterator[Gate]:
    """One gate for all operators: its processes take ten seconds to start."""
    settings = msgspec.structs.replace(
        klineage_session.gate_settings, also_policies=("do_bench",), time_limit_s=TIME_LIMIT_S, margin=MARGIN, seeds=1,
        precision=HALF_WIDTH_SHORT,
    )  # fmt: skip
    with Gate(gpu_platform(klineage_session), settings) as opened:
        yield opened


def measured(gate: Gate, operator: str, count: int, keep: Callable[[GpuTrial], None]) -> list[GpuTrial]:
    """The trials of one operator at the paper's shape, each kept at once, in case the run is interrupted."""
    case = with_library(paper_case(operator, "gpu", "torch"))
    trials: list[GpuTrial] = []
    source, first = first_right(gate, case, against_itself=True)
    assert first.timing is not None
    settings = msgspec.structs.replace(gate.settings, precision=narrow_enough(first.timing.reference_ms))
    started = time.monotonic()
    with Gate(gate.platform, settings) as precise:
        while len(trials) < count and time.monotonic() - started < BUDGET_S:
            trials.append(one_trial(precise, case, source, len(trials)))
            keep(trials[-1])
    return trials


def line_of(trial: GpuTrial) -> bytes:
    """One line of the file of raw samples."""
    return msgspec.json.encode(trial) + b"\n"


def one_trial(gate: Gate, case: KernelCase, source: KernelSource, number: int) -> GpuTrial:
    """One A/A judgement."""
    verdict = gate.judge(case, source, reference_source=source)
    assert verdict.timing is not None, f"{case.id}: {verdict.code}: {verdict.reasons[0].message}"
    fields = msgspec.structs.asdict(trial_of(verdict, number))
    return GpuTrial(**fields, kernel=f"{case.operator}: {source.label}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpu_a_a(
    operator: str,
    gate: Gate,
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[GpuTrial]], None],
) -> None:
    """Nine of ten intervals hold 1.0, no trial is called slower, half-widths are what was asked for."""
    platform = gate.platform
    name = f"a_a-{platform}"
    asked = request.config.getoption("--trials")
    count = TRIALS if asked is None else min(TRIALS, max(1, asked // len(OPERATORS)))
    path = results_file(request.config, name)
    others = kept_rows(path, GpuTrial, without=lambda trial: trial.operator == operator)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line_of(trial) for trial in others))

    def keep(trial: GpuTrial) -> None:
        with path.open("ab") as file:
            file.write(line_of(trial))

    trials = measured(gate, operator, count, keep)
    publish(name, report_of([*others, *trials], platform), [*others, *trials])
    found = intervals(list(trials), 0.95)
    assert sum(interval.low <= 1 <= interval.high for interval in found) >= FEW * len(trials)
    assert not any(standing(interval, at_least=1.0, margin=MARGIN) is Standing.SLOWER for interval in found)
    asked = narrow_enough(median([median(list(trial.reference_samples_ms)) for trial in trials]))
    assert median([interval.half_width for interval in found]) <= asked


def test_gpu_a_a_of_all_operators(
    request: pytest.FixtureRequest,
    klineage_session: KlineageSession,
    publish: Callable[[str, str, list[GpuTrial]], None],
) -> None:
    """Over the trials of all operators together, 95 % of the intervals hold 1.0."""
    reuse = request.config.getoption("--reuse")
    platform = klineage_session.settings.platform if reuse else gpu_platform(klineage_session)
    path = Path(reuse) if reuse else results_file(request.config, f"a_a-{platform}")
    trials = kept_rows(path, GpuTrial, without=lambda trial: False)
    if reuse:
        publish(f"a_a-{platform}", report_of(trials, platform), trials)
    missing = set(OPERATORS) - {trial.operator for trial in trials}
    if missing:
        pytest.skip(f"not measured yet: {', '.join(sorted(missing))}")
    found = intervals(list(trials), 0.95)
    assert sum(interval.low <= 1 <= interval.high for interval in found) >= CLAIM * len(trials)
