"""Timing policies: how many calls of whom in which order, and which statistic. Pure; the sampler is passed in."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from pytest_klineage.gate.timing import statistics
from pytest_klineage.records import Interval

PAIRED_WARMUP = 3
"""Calls of each side before the first pair: page faults, thread pools and lazy initialisation belong here."""
MIN_PAIRS = 20
"""Pairs before sampling may stop because it is precise."""
LEAST_PAIRS = 6
"""Pairs that are taken even when time is up: the range of six pairs still covers the median with 97 %."""
MAX_PAIRS = 2000
SUSPECT_GAIN, ENOUGH_NOVEL = 1.2, statistics.FEW_PAIRS
"""How much faster on known inputs looks like memory, and how many pairs of each kind decide that: until then sampling
goes on although time is up, or a kernel that is slow on purpose would leave too few pairs to be found out."""
SIDES = ("reference", "candidate")
PAPER_WARMUP, PAPER_REPS = 25, 100
DO_BENCH_ESTIMATE = 5
"""Calls from which the do_bench policy estimates how many fit into its time."""
DO_BENCH_WARMUP_MS, DO_BENCH_REP_MS = 25.0, 100.0
DO_BENCH_MOST = 1500
"""Calls at most: about what Triton makes of the shortest kernel, with 60 us of cache flush in its estimate."""


class Samples(msgspec.Struct, kw_only=True):
    """Milliseconds by role, with the trusted clock beside the worker's own."""

    reference: list[float] = []
    candidate: list[float] = []
    reference_wall: list[float] = []
    candidate_wall: list[float] = []
    candidate_waited: list[float] = []
    """For how long oracle and worker had no processor meanwhile, by the system's account; empty stands for never."""
    novel: list[bool] = []
    """For every candidate sample, whether its inputs were made for it alone."""
    starts: list[int] = msgspec.field(default_factory=lambda: [0])
    """Pairs at which both processes were new."""
    calls_per_sample: int = 1
    """On a GPU a sample may be the median of a block of calls."""
    one_block: bool = False
    """Whether all calls of a side were one block, whose clocks were compared once."""

    def extend(self, other: Samples) -> None:
        """Append another batch."""
        self.reference += other.reference
        self.candidate += other.candidate
        self.reference_wall += other.reference_wall
        self.candidate_wall += other.candidate_wall
        self.candidate_waited += other.candidate_waited
        self.novel += other.novel
        self.calls_per_sample, self.one_block = other.calls_per_sample, other.one_block

    def without_first(self, count: int) -> Samples:
        """These samples of one side without its first `count`, which were calls to warm up."""
        return Samples(
            reference=self.reference[count:], candidate=self.candidate[count:],
            reference_wall=self.reference_wall[count:], candidate_wall=self.candidate_wall[count:],
            candidate_waited=self.candidate_waited[count:], novel=self.novel[count:],
            calls_per_sample=self.calls_per_sample, one_block=self.one_block,
        )  # fmt: skip


def known_gain(reference: list[float], candidate: list[float], novel: list[bool]) -> float:
    """How many times as fast the candidate is on known inputs as on new ones, by medians; 1 without either."""
    sides = list(zip(reference, candidate, novel, strict=False))
    new = [math.log(first / second) for first, second, is_new in sides if is_new]
    old = [math.log(first / second) for first, second, is_new in sides if not is_new]
    return math.exp(statistics.median(old) - statistics.median(new)) if new and old else 1.0


def looks_like_memory(samples: Samples) -> bool:
    """Whether the candidate seems faster on inputs that it has met, by too few pairs to say so."""
    new = sum(samples.novel)
    if min(new, len(samples.novel) - new) >= ENOUGH_NOVEL:
        return False
    alone = [1.0] * len(samples.candidate)
    return any(known_gain(side, samples.candidate, samples.novel) > SUSPECT_GAIN for side in (samples.reference, alone))


class Sampler(Protocol):
    """Runs every role in `order`, `reps` times over, and returns the samples; without `flush` from warm caches."""

    def __call__(self, order: tuple[str, ...], reps: int, flush: bool = True) -> Samples: ...


class Renewal(Protocol):
    """Starts both sides in new processes between pairs."""

    warmup: int
    """What each side repeats, untimed, after a start."""

    def renew(self, samples: Samples) -> bool:
        """Start both sides anew when it is time, and say whether that was done."""

    def full(self, samples: Samples) -> bool:
        """Whether the last start has all its pairs, so that it is time to look at the interval."""

    def enough(self, samples: Samples) -> bool:
        """Whether there were starts enough for sampling to stop because it is precise."""

    def exhausted(self, samples: Samples) -> bool:
        """Whether there are no more starts, so that more pairs would all come from the last one."""


class Outcome(msgspec.Struct, kw_only=True):
    """What a policy measured."""

    samples: Samples
    interval: Interval
    warmup: int
    statistic: str
    stopped: str


Correct: TypeAlias = Callable[[Samples], Samples]
"""What to do to raw samples before statistics see them."""

Report: TypeAlias = Callable[[int, int, Interval | None], None]
"""Progress: samples so far, samples expected, the interval so far."""


class Policy(ABC):
    """One way to time."""

    name: ClassVar[str]
    mode: ClassVar[str] = "block"
    """What one sample is on a GPU: see records.messages.TimeRequest."""

    @abstractmethod
    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        out_of_time: Callable[[], bool], report: Report, renewal: Renewal | None = None,
    ) -> Outcome:  # fmt: skip
        """Sample until the policy is satisfied or out of time."""


class Paired(Policy):
    """Both sides alternate on the same inputs, pairs in random order; stops when precise or out of time.

    Both are started anew from time to time: where a program lies in memory makes it faster or slower for its lifetime.
    """

    name: ClassVar[str] = "paired"

    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        out_of_time: Callable[[], bool], report: Report, renewal: Renewal | None = None,
    ) -> Outcome:  # fmt: skip
        order = random.SystemRandom()
        sample(SIDES, PAIRED_WARMUP, flush=False)
        samples, interval, look, stopped = Samples(), None, max(MIN_PAIRS, statistics.FIRST_LOOK), "time limit"
        while len(samples.candidate) < MAX_PAIRS:
            pair = list(SIDES)
            order.shuffle(pair)
            # ABBA: what drifts linearly over two pairs hits both sides alike.
            samples.extend(sample((*pair, *reversed(pair)), 1))
            pairs = len(samples.candidate)
            if pairs >= look or (renewal is not None and renewal.full(samples)):
                interval = self._interval(correct(samples), confidence, statistics.LOOK_RESAMPLES)
                look = statistics.next_look(pairs)
                if statistics.precise_enough(interval, precision) and (renewal is None or renewal.enough(samples)):
                    stopped = "precise"
                    break
            report(pairs, look, interval)
            if pairs >= LEAST_PAIRS and out_of_time() and not looks_like_memory(correct(samples)):
                break
            if renewal is not None and renewal.exhausted(samples):
                stopped = "start limit"
                break
            if renewal is not None and renewal.renew(samples):
                samples.starts.append(pairs)
                sample(SIDES, renewal.warmup, flush=False)
        else:
            stopped = "pair limit"
        return Outcome(
            samples=samples,
            interval=self._interval(correct(samples), confidence, statistics.FINAL_RESAMPLES),
            warmup=PAIRED_WARMUP,
            statistic="exp(median(log(reference/candidate))), expanded percentile bootstrap of starts and pairs",
            stopped=stopped,
        )

    def _interval(self, samples: Samples, confidence: float, resamples: int) -> Interval:
        return statistics.paired_interval(
            samples.reference, samples.candidate, confidence=confidence, resamples=resamples, starts=samples.starts
        )


class CudaGraph(Paired):
    """As `paired`, but a sample is the mean call of a replayed CUDA graph: no launch by the host, no cache flush."""

    name: ClassVar[str] = "cudagraph"
    mode: ClassVar[str] = "graph"


class Paper(Policy):
    """What the paper says it does: 25 warm-up calls, 100 calls, median; the reference first, then the candidate."""

    name: ClassVar[str] = "paper"
    mode: ClassVar[str] = "queued"

    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        out_of_time: Callable[[], bool], report: Report, renewal: Renewal | None = None,
    ) -> Outcome:  # fmt: skip
        samples = Samples()
        for index, role in enumerate(SIDES):
            samples.extend(sample((role,), PAPER_WARMUP + PAPER_REPS).without_first(PAPER_WARMUP))
            report((index + 1) * PAPER_REPS, 2 * PAPER_REPS, None)
        corrected = correct(samples)
        return Outcome(
            samples=samples,
            interval=statistics.unpaired_interval(corrected.reference, corrected.candidate, confidence=confidence),
            warmup=PAPER_WARMUP,
            statistic="ratio of medians, expanded percentile bootstrap of both sides",
            stopped="fixed count",
        )


class DoBench(Policy):
    """Counts from milliseconds, as triton.testing.do_bench takes them: 25 ms of warm-up, 100 ms of calls, the median.

    One side after the other, so whatever drifts between them counts as a difference. Warm-up and calls are one queue: a
    card at its power limit slows down within tens of milliseconds and recovers in any pause. Unlike Triton's, the
    estimate leaves the time of the cache flush out.
    """

    name: ClassVar[str] = "do_bench"
    mode: ClassVar[str] = "queued"

    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        out_of_time: Callable[[], bool], report: Report, renewal: Renewal | None = None,
    ) -> Outcome:  # fmt: skip
        samples, warmups = Samples(), []
        for index, role in enumerate(SIDES):
            first = sample((role,), DO_BENCH_ESTIMATE)
            calls = first.reference or first.candidate
            estimate_ms = max(sum(calls) / len(calls), 1e-3)
            warmup = min(DO_BENCH_MOST, max(1, int(DO_BENCH_WARMUP_MS / estimate_ms)))
            reps = min(DO_BENCH_MOST, max(1, int(DO_BENCH_REP_MS / estimate_ms)))
            samples.extend(sample((role,), warmup + reps).without_first(warmup))
            warmups.append(DO_BENCH_ESTIMATE + warmup)
            report(index + 1, 2, None)
        corrected = correct(samples)
        return Outcome(
            samples=samples,
            interval=statistics.unpaired_interval(corrected.reference, corrected.candidate, confidence=confidence),
            warmup=min(warmups),
            statistic="ratio of medians, expanded percentile bootstrap of both sides",
            stopped="fixed time",
        )


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Paired(), Paper(), DoBench(), CudaGraph())}
