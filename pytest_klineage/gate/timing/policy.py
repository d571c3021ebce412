"""Timing policies: how many calls of whom in which order, and which statistic. Pure; the sampler is passed in."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import median
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from pytest_klineage.gate.timing import statistics
from pytest_klineage.records import Interval, speedup
from pytest_klineage.records.bootstrap import FEW_PAIRS, FINAL_RESAMPLES, log_ratios

PAIRED_WARMUP = 3
"""Calls of each side, on a GPU blocks of many, before the first pair of every start: page faults, thread pools and lazy
initialisation belong here."""
MIN_PAIRS = 20
"""Pairs before sampling may stop because it is precise."""
LEAST_PAIRS = 6
"""Pairs that are taken even when time is up: the range of six pairs still covers the median with 97 %."""
MAX_PAIRS = 2000
ENOUGH_NOVEL = FEW_PAIRS
"""Pairs on new problems, and pairs on known ones, that are taken although time is up: fewer would not show a kernel
that answers from memory, and one that is slow on purpose would leave no more."""
MOST_TIME = 5.0
"""How many times the time limit a timing may take for the sake of these pairs."""
SCREEN_LIMIT_S = 1.0
"""Longest timing of a screening. There is no room in it for new processes."""
SIDES = ("reference", "candidate")
PAPER_WARMUP, PAPER_REPS = 25, 100
DO_BENCH_ESTIMATE = 5
"""Calls from which the do_bench policy estimates how many fit into its time."""
DO_BENCH_WARMUP_MS, DO_BENCH_REP_MS = 25.0, 100.0
DO_BENCH_MOST = 1500
"""Calls at most: about what Triton makes of the shortest kernel, with 60 us of cache flush in its estimate."""


LEAST_NOVEL = 8
"""Pairs on new inputs, and on known ones, from which memory is read. Sampling does not stop as precise with fewer."""


PAIRED_STATISTIC = (
    "exp(median(log(reference/candidate))), expanded percentile bootstrap of starts and pairs, widened for few starts"
)


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
    return math.exp(median(old) - median(new)) if new and old else 1.0


def shows_memory(samples: Samples) -> bool:
    """Whether there are pairs enough of both kinds that an answer from memory would show."""
    new = sum(samples.novel)
    return min(new, len(samples.novel) - new) >= ENOUGH_NOVEL


def may_be_precise(samples: Samples) -> bool:
    """Whether there are pairs enough on new and on known inputs to detect memory, where there are both kinds."""
    new = sum(samples.novel)
    return new == 0 or new == len(samples.novel) or min(new, len(samples.novel) - new) >= LEAST_NOVEL


class TimeLimit(msgspec.Struct, frozen=True, kw_only=True):
    """When a paired timing ends although it is not precise."""

    spent: Callable[[], float]
    """Time so far as a share of the time limit."""
    mixed: bool = False
    """Whether some pairs are on new problems and some on known ones."""
    line: float = 0.0
    """Speedup below which a kernel is slower than required: such a kernel gains nothing from its memory."""

    def is_up(self) -> bool:
        """Whether the time limit has passed."""
        return self.spent() > 1

    def reached(self, samples: Samples) -> bool:
        """Whether these samples, as they were taken, are the last."""
        if len(samples.candidate) < LEAST_PAIRS or not self.is_up():
            return False
        return not self.mixed or shows_memory(samples) or self.spent() > MOST_TIME or self._is_slower(samples)

    def _is_slower(self, samples: Samples) -> bool:
        ratios = log_ratios(samples.reference, samples.candidate)
        return self.line > 0 and max(ratios) < math.log(self.line)


class Sampler(Protocol):
    """Runs every role in `order`, `reps` times over, and returns the samples; without `flush` from warm caches."""

    def __call__(self, order: tuple[str, ...], reps: int, flush: bool = True) -> Samples: ...


class RestartPolicy(Protocol):
    """Starts both sides in new processes between pairs."""

    def restart(self, samples: Samples) -> bool:
        """Start both sides again when it is time, and say whether that was done."""

    def warmed(self) -> None:
        """Both sides have warmed up: their pairs begin."""

    def full(self, samples: Samples) -> bool:
        """Whether the last start has all its pairs, so that it is time to look at the interval."""

    def enough(self, samples: Samples) -> bool:
        """Whether there were starts enough for sampling to stop because it is precise."""

    def exhausted(self, samples: Samples) -> bool:
        """Whether there are no more starts, so that more pairs would all come from the last one."""


class Measurement(msgspec.Struct, kw_only=True):
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
        limit: TimeLimit, report: Report, process_restart: RestartPolicy | None = None,
    ) -> Measurement:  # fmt: skip
        """Sample until the policy is satisfied or out of time."""

    def estimate(self, samples: Samples) -> float:
        """The speedup of samples without its interval: here the ratio of both sides' medians."""
        return speedup(median(samples.reference), median(samples.candidate))


class Paired(Policy):
    """Both sides alternate on the same inputs, pairs in random order; stops when precise or out of time.

    Both are restarted from time to time: where a program lies in memory makes it faster or slower for its lifetime.
    """

    name: ClassVar[str] = "paired"
    first_look: int = max(MIN_PAIRS, statistics.FIRST_LOOK)
    """Pairs before the interval is looked at."""

    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        limit: TimeLimit, report: Report, process_restart: RestartPolicy | None = None,
    ) -> Measurement:  # fmt: skip
        order = random.SystemRandom()
        sample(SIDES, PAIRED_WARMUP, flush=False)
        samples, interval, look, stopped = Samples(), None, self.first_look, "time limit"
        while len(samples.candidate) < MAX_PAIRS:
            pair = list(SIDES)
            order.shuffle(pair)
            # ABBA: what drifts linearly over two pairs hits both sides alike.
            samples.extend(sample((*pair, *reversed(pair)), 1))
            pairs = len(samples.candidate)
            if pairs >= look or (process_restart is not None and process_restart.full(samples)):
                interval = self._interval(correct(samples), confidence, statistics.LOOK_RESAMPLES)
                look = statistics.next_look(pairs)
                enough = self._may_stop(samples, process_restart)
                if found := self._reason_to_stop(interval, precision, enough):
                    stopped = found
                    break
            report(pairs, look, interval)
            if limit.reached(samples):
                break
            if process_restart is not None and process_restart.exhausted(samples):
                stopped = "start limit"
                break
            if process_restart is not None and process_restart.restart(samples):
                samples.starts.append(pairs)
                sample(SIDES, PAIRED_WARMUP, flush=False)
                process_restart.warmed()
        else:
            stopped = "pair limit"
        return Measurement(
            samples=samples,
            interval=self._interval(correct(samples), confidence, FINAL_RESAMPLES),
            warmup=PAIRED_WARMUP,
            statistic=PAIRED_STATISTIC,
            stopped=stopped,
        )

    def estimate(self, samples: Samples) -> float:
        return math.exp(median(log_ratios(samples.reference, samples.candidate)))

    def _may_stop(self, samples: Samples, process_restart: RestartPolicy | None) -> bool:
        """Whether there are pairs and starts enough for sampling to stop because it is precise."""
        return may_be_precise(samples) and (process_restart is None or process_restart.enough(samples))

    def _reason_to_stop(self, interval: Interval, precision: float, enough: bool) -> str:
        """Why sampling ends at this interval; empty where it goes on."""
        return "precise" if enough and statistics.precise_enough(interval, precision) else ""

    def _interval(self, samples: Samples, confidence: float, resamples: int) -> Interval:
        return statistics.paired_interval(
            samples.reference, samples.candidate, confidence=confidence, resamples=resamples, starts=samples.starts
        )


class CudaGraph(Paired):
    """As `paired`, but a sample is the mean call of a replayed CUDA graph: no launch by the host, no cache flush."""

    name: ClassVar[str] = "cudagraph"
    mode: ClassVar[str] = "graph"


class Screening(Paired):
    """As `paired`, until the interval excludes the best speedup so far: on either side, for who is above is judged
    in full. It looks from LEAST_PAIRS on, where the range of all pairs is the interval."""

    first_look = LEAST_PAIRS

    def __init__(self, mode: str, best: float) -> None:
        self.mode, self._best = mode, best  # type: ignore[misc]  # the one policy whose mode depends on another's

    def _may_stop(self, samples: Samples, process_restart: RestartPolicy | None) -> bool:
        # Whether a kernel answers from memory is for the full judgement.
        return process_restart is None or super()._may_stop(samples, process_restart)

    def _reason_to_stop(self, interval: Interval, precision: float, enough: bool) -> str:
        if not interval.low <= self._best <= interval.high:
            return "excluded"
        return super()._reason_to_stop(interval, precision, enough)


def screening(policy: Policy, best: float | None) -> Policy:
    """The policy itself; with the speedup of the best kernel so far, its short form."""
    return policy if best is None else Screening(policy.mode, best)


class Paper(Policy):
    """What the paper says it does: 25 warm-up calls, 100 calls, median; the reference first, then the candidate."""

    name: ClassVar[str] = "paper"
    mode: ClassVar[str] = "queued"

    def measure(
        self, sample: Sampler, correct: Correct, *, precision: float, confidence: float,
        limit: TimeLimit, report: Report, process_restart: RestartPolicy | None = None,
    ) -> Measurement:  # fmt: skip
        samples = Samples()
        for index, role in enumerate(SIDES):
            samples.extend(sample((role,), PAPER_WARMUP + PAPER_REPS).without_first(PAPER_WARMUP))
            report((index + 1) * PAPER_REPS, 2 * PAPER_REPS, None)
        corrected = correct(samples)
        return Measurement(
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
        limit: TimeLimit, report: Report, process_restart: RestartPolicy | None = None,
    ) -> Measurement:  # fmt: skip
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
        return Measurement(
            samples=samples,
            interval=statistics.unpaired_interval(corrected.reference, corrected.candidate, confidence=confidence),
            warmup=min(warmups),
            statistic="ratio of medians, expanded percentile bootstrap of both sides",
            stopped="fixed time",
        )


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Paired(), Paper(), DoBench(), CudaGraph())}
