"""A/A where several judges share a GPU: whether intervals hold 1.0 when timing goes in turns, and verdicts a minute.

suite="suites/gate_quality/test_gpu_shared.py --platform sm90 --klineage-precision 0.02"
pytest $suite --klineage-executor batch:build/shared         asks for the trials; needs no GPU
pytest-klineage judge build/shared --share 3 --for 8m        where the GPUs are
pytest $suite --klineage-executor batch:build/shared         once replies are back: makes the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import msgspec
import pytest
from on_gpu import OPERATORS, ROOT, at_once, gpu_platform, machine_of, span_s, with_library
from test_a_a import share, spread

from pytest_klineage import KlineageSession
from pytest_klineage.errors import WaitsForVerdict
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.gate.timing.statistics import Standing, paired_interval, standing
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Interval, KernelSource, Surface, Verdict

MARGIN = 0.02
TRIALS = 40
"""Of all operators together, unless --trials says otherwise."""
CLAIM = 0.95


class SharedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One A/A judgement."""

    operator: str
    code: str
    seconds: float
    """From its begin to its end."""
    judged_at: str
    """When it ended, to the second."""
    device_uuid: str
    machine: str
    reference_samples_ms: tuple[float, ...]
    candidate_samples_ms: tuple[float, ...]
    starts: tuple[int, ...]

    @property
    def interval(self) -> Interval:
        """The speedup of the kernel over itself, at 95 %."""
        return paired_interval(
            self.reference_samples_ms, self.candidate_samples_ms, confidence=0.95, starts=self.starts
        )


def experts(platform: str) -> Iterator[tuple[str, KernelSource]]:
    """The CUDA expert of each operator."""
    found = {one.operator: one for one in find_experts(ROOT / "experts", platform) if one.surface == Surface.CUDA}
    yield from ((operator, found[operator].source("expert")) for operator in OPERATORS)


def trial_of(verdict: Verdict) -> SharedTrial:
    """What the table needs of a verdict. Fails the test for a kernel that was not timed."""
    timing = verdict.timing
    assert timing is not None, f"{verdict.case.id}: {verdict.code}: {verdict.reasons[0].message}"
    return SharedTrial(
        operator=verdict.case.operator, code=verdict.code.value, seconds=timing.seconds + verdict.overhead_s,
        judged_at=verdict.judged_at, device_uuid=verdict.machine.device_uuid if verdict.machine else "",
        machine=machine_of(verdict), reference_samples_ms=timing.reference_samples_ms,
        candidate_samples_ms=timing.candidate_samples_ms, starts=timing.starts,
    )  # fmt: skip


def report_of(trials: list[SharedTrial], platform: str) -> str:
    """The page with its table."""
    machines = "; ".join(dict.fromkeys(trial.machine for trial in trials))
    gpus = len({trial.device_uuid for trial in trials})
    span = span_s(trials)
    lines = [
        f"# A/A on {platform} where judges share a GPU\n",
        f"{machines}, {min(trial.judged_at for trial in trials)}. Experts against themselves on {gpus} GPUs of one "
        f"host, up to {at_once(trials)} judgements of a GPU at once, each timed alone. {len(trials)} verdicts, "
        f"{sum(trial.code.startswith('inconclusive') for trial in trials)} of them inconclusive, in "
        f"{span:.0f} s, {60 * len(trials) / span:.1f} a minute, builds and checks included.\n",
        "| operator | trials | 95 % interval holds 1.0 | false slower | median half-width | 90 % of estimates within | "
        "median seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (*OPERATORS, "all"):
        if own := [trial for trial in trials if name in ("all", trial.operator)]:
            found = [trial.interval for trial in own]
            cells = (
                name, len(own), share(sum(holds_one(one) for one in found), found), sum(map(false_slower, found)),
                f"{100 * median(one.half_width for one in found):.2f} %",
                f"+-{100 * spread([one.estimate for one in found]):.2f} %",
                f"{median(trial.seconds for trial in own):.1f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", f"Raw samples: `shared-{platform}.jsonl`."])


def holds_one(interval: Interval) -> bool:
    """Whether it says of a kernel and itself what is true."""
    return interval.low <= 1 <= interval.high


def false_slower(interval: Interval) -> bool:
    """Whether a kernel would be called slower than itself."""
    return standing(interval, at_least=1.0, margin=MARGIN) is Standing.SLOWER


def test_gpu_shared(
    klineage_session: KlineageSession, publish: Callable[[str, str, list[SharedTrial]], None],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Of all trials 95 % hold 1.0, and none is called slower."""
    platform = gpu_platform(klineage_session)
    if not klineage_session.elsewhere:
        pytest.skip("judges share a GPU through a folder: pass --klineage-executor batch:DIR")
    each = (request.config.getoption("--trials") or TRIALS) // len(OPERATORS)
    trials, waits = [], None
    with klineage_session.gate_with(klineage_session.gate_settings) as gate:
        assert isinstance(gate, ExecutorGate)
        for operator, source in experts(platform):
            case = with_library(paper_case(operator, "gpu", "torch"))
            for number in range(each):
                try:
                    trials.append(trial_of(gate.again(number).judge(case, source, reference_source=source)))
                except WaitsForVerdict as error:
                    waits = error
    if waits is not None:
        raise waits
    publish(f"shared-{platform}", report_of(trials, platform), trials)
    found = [trial.interval for trial in trials]
    assert sum(map(holds_one, found)) >= CLAIM * len(found)
    assert not any(map(false_slower, found))
