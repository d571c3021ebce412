"""Pairs that were recorded on a GPU, handed out again to the gate's own timing policies. Nothing is measured here.

A bootstrap of recorded starts: a start of both sides is drawn, with replacement, from those of an operator, and gives
its pairs in the order in which they were recorded. So what lies between processes stays, and what lies within one.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
from test_gpu_a_a import GpuTrial
from test_gpu_verdict_time import VerdictTime

from pytest_klineage.gate.timing.policy import Measurement, Paired, Policy, Samples, TimeLimit
from pytest_klineage.gate.timing.restarts import CountedRestarts, RestartPlan
from pytest_klineage.records import Timing
from pytest_klineage.results.packed import read_packed
from pytest_klineage.results.runs import Record, read_run

RESULTS = Path(__file__).resolve().parents[2] / "results"
CONFIDENCE = 0.95
LONG = ("gemm", "fmha", "gdn")
"""Operators whose faster side takes more than 0.1 ms in the A/A records."""

Start = Sequence[tuple[float, float]]
"""Milliseconds of reference and candidate, pair by pair, of one pair of processes."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What timing takes, in seconds."""

    pair_s: float
    renewal_s: float = 0.0
    beside_s: float = 0.0
    """Of a warm judgement, beside the timed blocks."""

    def timing_s(self, pairs: float, starts: float) -> float:
        """The timed part: pairs, warm-up of each start, and all starts but the first."""
        return pairs * self.pair_s + (starts - 1) * self.renewal_s


def starts_of(reference: Sequence[float], candidate: Sequence[float], starts: Sequence[int]) -> list[Start]:
    """Recorded pairs by the start that they are of."""
    pairs = list(zip(reference, candidate, strict=True))
    return [pairs[begin:end] for begin, end in zip(starts, [*starts[1:], len(pairs)], strict=True)]


def a_a_trials() -> dict[str, list[list[Start]]]:
    """The starts of every A/A trial on H200s, by operator."""
    trials: dict[str, list[list[Start]]] = {}
    for line in read_packed(RESULTS / "gate_quality" / "a_a-sm90.jsonl").splitlines():
        row = msgspec.json.decode(line, type=GpuTrial)
        found = starts_of(row.reference_samples_ms, row.candidate_samples_ms, row.starts)
        trials.setdefault(row.operator, []).append(found)
    return trials


def pool_of(trials: Sequence[Sequence[Start]], pairs: int) -> list[Start]:
    """The first so many pairs of all starts of these trials that have them."""
    return [start[:pairs] for trial in trials for start in trial if len(start) >= pairs]


def gemm_costs() -> Costs:
    """Of GEMM: a pair as in its last stage, which has one start; the rest of the main tier's timing are restarts."""
    stage, (tier,) = stage_records("gemm")[-1].verdict.timing, [
        record.verdict.timing
        for record in read_run(RESULTS / "main_tier-sm90").records
        if record.verdict.case.operator == "gemm"
    ]  # fmt: skip
    assert stage is not None
    assert tier is not None
    path = RESULTS / "gate_quality" / "verdict-time-sm90.jsonl"
    verdict = msgspec.json.decode(path.read_bytes().splitlines()[0], type=VerdictTime)
    pair_s = stage.seconds / len(stage.candidate_samples_ms)
    renewal_s = (tier.seconds - len(tier.candidate_samples_ms) * pair_s) / (len(tier.starts) - 1)
    return Costs(pair_s=pair_s, renewal_s=renewal_s, beside_s=median(verdict.overhead_s))


def stage_records(name: str) -> list[Record]:
    """Recorded stages of an operator, or of conv2d-nhwc, in the order of the lineage."""
    found = {}
    for record in read_run(RESULTS / "stages-sm90").records:
        stage = re.search(rf"\[{name}-(\d+)-", record.nodeid)
        if stage and record.verdict.timing is not None:
            found[int(stage[1])] = record
    return [found[number] for number in sorted(found)]


def pairs_of(timing: Timing) -> Start:
    """All pairs of a timing."""
    return list(zip(timing.reference_samples_ms, timing.candidate_samples_ms, strict=True))


class Replayed:
    """Recorded pairs as a sampler, and the start of processes that goes with it."""

    def __init__(self, starts: Sequence[Start], draw: random.Random, *, in_order: bool = False) -> None:
        """`in_order`: the recorded starts one after the other, each pair once, until there are no more."""
        self._starts, self._draw, self._in_order = starts, draw, in_order
        self._left: list[tuple[float, float]] = []
        self.begun = 0
        self.start()

    def start(self) -> None:
        """Both sides in new processes: another recorded start."""
        if self._in_order:
            self._left = list(self._starts[self.begun])
        else:
            self._left = list(self._draw.choice(self._starts))
        self.begun += 1

    def is_over(self) -> bool:
        """Whether all recorded pairs have been handed out, in order."""
        return self._in_order and not self._left and self.begun >= len(self._starts)

    def __call__(self, order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
        """Two pairs; none of calls that warm up, which no policy looks at."""
        drawn = [self._pair() for _ in range(order.count("candidate") * reps)] if flush else []
        return Samples(reference=[pair[0] for pair in drawn], candidate=[pair[1] for pair in drawn])

    def _pair(self) -> tuple[float, float]:
        return self._left.pop(0)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of starts, and the half-width at which sampling stops."""

    plan: RestartPlan
    precision: float


def measured(
    policy: Policy, sampler: Replayed, *, precision: float, plan: RestartPlan | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Measurement:  # fmt: skip
    """What a policy of the gate makes of replayed pairs; with a plan, from so many starts."""
    restarts = None if plan is None else CountedRestarts(sampler.start, long=plan, short=plan)
    return policy.measure(
        sampler, lambda samples: samples, precision=precision, confidence=CONFIDENCE,
        limit=TimeLimit(spent=lambda: 2.0 * (sampler.is_over() or out_of_time())),
        report=lambda done, total, interval: None, process_restart=restarts,
    )  # fmt: skip


def under(design: Design, starts: Sequence[Start], draw: random.Random, *, in_order: bool = False) -> Measurement:
    """What `paired` makes of these starts under a design."""
    return measured(Paired(), Replayed(starts, draw, in_order=in_order), precision=design.precision, plan=design.plan)


def log_ratios(start: Start) -> list[float]:
    """Logarithms of the speedups of a start's pairs."""
    return [math.log(reference / candidate) for reference, candidate in start]
