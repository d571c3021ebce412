"""Timing policies against a scripted sampler: synthetic noise and drift, no clock and no process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from pytest_klineage.gate.timing.policy import (
    ENOUGH_NOVEL,
    LEAST_NOVEL,
    LEAST_PAIRS,
    MAX_PAIRS,
    MIN_PAIRS,
    MOST_TIME,
    PAIRED_WARMUP,
    POLICIES,
    Measurement,
    Samples,
    TimeLimit,
    may_be_precise,
)
from pytest_klineage.gate.timing.restarts import CountedRestarts
from pytest_klineage.records import Interval


class ScriptedSampler:
    """Times from a formula: `cost(role, number of the call)` in ms, for every call in order."""

    def __init__(self, cost: Callable[[str, int], float]) -> None:
        self.cost = cost
        self.requests: list[tuple[tuple[str, ...], int]] = []
        self.calls: list[str] = []
        self.unflushed = 0
        """Requests whose calls may start from warm caches."""

    def __call__(self, order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
        self.unflushed += not flush
        self.requests.append((order, reps))
        samples = Samples()
        for role in order * reps:
            time_ms = self.cost(role, len(self.calls))
            self.calls.append(role)
            own, wall = (
                (samples.candidate, samples.candidate_wall)
                if role == "candidate"
                else (samples.reference, samples.reference_wall)
            )
            own.append(time_ms)
            wall.append(time_ms + 0.05)
        return samples


def unchanged(samples: Samples) -> Samples:
    return samples


NEVER, AT_ONCE = TimeLimit(spent=lambda: 0.0), TimeLimit(spent=lambda: 1.1)


def measure(
    policy: str,
    cost: Callable[[str, int], float],
    *,
    precision: float = 0.01,
    limit: TimeLimit = NEVER,
    correct: Callable[[Samples], Samples] = unchanged,
) -> tuple[Measurement, ScriptedSampler, list[tuple[int, int, Interval | None]]]:
    sampler, reports = ScriptedSampler(cost), []
    outcome = POLICIES[policy].measure(
        sampler,
        correct,
        precision=precision,
        confidence=0.95,
        limit=limit,
        report=lambda done, total, interval: reports.append((done, total, interval)),
    )
    return outcome, sampler, reports


def noisy(reference_ms: float, candidate_ms: float, noise: float, seed: int = 1) -> Callable[[str, int], float]:
    draw = random.Random(seed)
    centre = {"reference": reference_ms, "candidate": candidate_ms}
    return lambda role, _call: centre[role] * math.exp(draw.gauss(0, noise))


def drifting(per_call: float) -> Callable[[str, int], float]:
    """A kernel against itself on a machine that gets slower with every call."""
    return lambda _role, call: 1.0 + per_call * call


def after(pairs: int) -> TimeLimit:
    """Out of time once it has been asked for so many pairs: it is asked once after every two, from LEAST_PAIRS on."""
    asked = iter(range(10**6))
    return TimeLimit(spent=lambda: 2.0 * (next(asked) * 2 + LEAST_PAIRS >= pairs))


def test_the_policies_are_known_by_their_names() -> None:
    assert {name: policy.name for name, policy in POLICIES.items()} == {
        "paired": "paired",
        "paper": "paper",
        "do_bench": "do_bench",
        "cudagraph": "cudagraph",
    }


def test_paired_cancels_a_linear_drift_where_sequential_does_not() -> None:
    paired, _, _ = measure("paired", drifting(0.001))
    paper, _, _ = measure("paper", drifting(0.001))
    assert paired.interval.estimate == pytest.approx(1.0, abs=2e-3)
    assert paired.interval.low <= 1.0 <= paired.interval.high
    assert paper.interval.estimate < 0.95
    assert paper.interval.high < 1.0


def test_only_calls_that_warm_up_start_from_warm_caches() -> None:
    _, paired, _ = measure("paired", noisy(2, 1, 0.05))
    _, paper, _ = measure("paper", noisy(2, 1, 0.05))
    assert (paired.unflushed, paper.unflushed) == (1, 0)


def test_paired_calls_are_palindromes_of_one_pair() -> None:
    _, sampler, _ = measure("paired", noisy(2, 1, 0.05))
    warmup, *blocks = sampler.requests
    assert warmup == (("reference", "candidate"), PAIRED_WARMUP)
    assert all(reps == 1 for _order, reps in blocks)
    assert {order for order, _reps in blocks} <= {
        ("reference", "candidate", "candidate", "reference"),
        ("candidate", "reference", "reference", "candidate"),
    }


def test_the_order_within_a_pair_is_unpredictable() -> None:
    _, sampler, _ = measure("paired", noisy(2, 1, 0.5), precision=1e-5, limit=after(200))
    first = [order[0] for order, _reps in sampler.requests[1:]]
    # 100 tosses of a fair coin: less than 15 of one side has a probability below 1e-12.
    assert 15 <= first.count("candidate") <= len(first) - 15


def test_paired_warms_both_sides_up_before_it_counts() -> None:
    def slow_start(role: str, call: int) -> float:
        return 1000.0 if call < 2 * PAIRED_WARMUP else 1.0

    outcome, sampler, _ = measure("paired", slow_start)
    assert outcome.warmup == PAIRED_WARMUP
    assert max(outcome.samples.candidate + outcome.samples.reference) == 1.0
    assert len(sampler.calls) == 2 * PAIRED_WARMUP + 2 * len(outcome.samples.candidate)


def test_paired_stops_as_soon_as_it_may_when_there_is_no_noise() -> None:
    outcome, _, _ = measure("paired", noisy(3, 2, 0.0))
    assert outcome.stopped == "precise"
    assert len(outcome.samples.candidate) == MIN_PAIRS
    assert outcome.interval.estimate == pytest.approx(1.5)


def test_paired_goes_on_until_it_is_precise() -> None:
    rough, _, _ = measure("paired", noisy(3, 2, 0.05), precision=0.05)
    fine, _, _ = measure("paired", noisy(3, 2, 0.05), precision=0.015)
    assert rough.stopped == fine.stopped == "precise"
    assert len(fine.samples.candidate) > 2 * len(rough.samples.candidate)
    assert fine.interval.low <= 1.5 * 1.01
    assert fine.interval.high >= 1.5 * 0.99


def test_paired_stops_when_time_is_up() -> None:
    outcome, _, _ = measure("paired", noisy(1, 1, 0.5), precision=1e-5, limit=after(40))
    assert outcome.stopped == "time limit"
    assert len(outcome.samples.candidate) == 40


def test_paired_takes_the_least_pairs_even_without_any_time() -> None:
    outcome, _, _ = measure("paired", noisy(1, 1, 0.5), limit=AT_ONCE)
    assert outcome.stopped == "time limit"
    assert len(outcome.samples.candidate) == LEAST_PAIRS
    assert len(outcome.samples.reference) == LEAST_PAIRS


def pairs_of(new: int, known: int, candidate_ms: float = 1.0) -> Samples:
    """So many pairs on new and on known problems, the reference at 1 ms."""
    count = new + known
    return Samples(
        reference=[1.0] * count, candidate=[candidate_ms] * count, novel=[True] * new + [False] * known
    )  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "spent", "mixed", "last"),
    [
        (pairs_of(0, LEAST_PAIRS), 1.01, False, True),
        (pairs_of(0, LEAST_PAIRS - 1), 1.01, False, False),
        (pairs_of(0, LEAST_PAIRS), 1.0, False, False),
        (pairs_of(ENOUGH_NOVEL, ENOUGH_NOVEL), 1.01, True, True),
        (pairs_of(ENOUGH_NOVEL - 1, 100), 1.01, True, False),
        (pairs_of(100, ENOUGH_NOVEL - 1), 1.01, True, False),
        (pairs_of(0, 100), MOST_TIME, True, False),
        (pairs_of(0, 100), MOST_TIME + 0.01, True, True),
        (pairs_of(0, LEAST_PAIRS, candidate_ms=2.1), 1.01, True, True),
        (pairs_of(0, LEAST_PAIRS, candidate_ms=1.9), 1.01, True, False),
    ],
)
def test_when_time_ends_a_timing(samples: Samples, spent: float, mixed: bool, last: bool) -> None:
    """A kernel of less than half the reference's speed is slower than required, whatever it remembers."""
    limit = TimeLimit(spent=lambda: spent, mixed=mixed, line=0.5)
    assert limit.reached(samples) == last


@pytest.mark.parametrize("pairs", [LEAST_PAIRS, 14, 2 * MIN_PAIRS])
def test_every_sample_has_its_partner(pairs: int) -> None:
    samples = measure("paired", noisy(1, 1, 0.5), precision=1e-5, limit=after(pairs))[0].samples
    assert len(samples.reference) == len(samples.candidate) == pairs
    assert len(samples.reference_wall) == len(samples.candidate_wall) == pairs


def test_the_samples_of_a_pair_were_taken_next_to_one_another() -> None:
    outcome, _, _ = measure("paired", lambda _role, call: 1.0 + call)
    gaps = {abs(r - c) for r, c in zip(outcome.samples.reference, outcome.samples.candidate, strict=True)}
    assert gaps == {1.0}


def test_paired_gives_up_at_the_pair_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.gate.timing.policy.MAX_PAIRS", 60)
    outcome, _, _ = measure("paired", noisy(1, 1, 1.0), precision=1e-5)
    assert outcome.stopped == "pair limit"
    assert len(outcome.samples.candidate) == 60 < MAX_PAIRS


def test_paired_reports_the_interval_once_there_is_one() -> None:
    _, _, reports = measure("paired", noisy(3, 2, 0.1), precision=0.02)
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert reports[0][2] is None
    assert isinstance(reports[-1][2], Interval)


def test_paper_policy_runs_25_and_100_calls_reference_first() -> None:
    outcome, sampler, _ = measure("paper", noisy(2, 1, 0.05))
    assert sampler.requests == [(("reference",), 125), (("candidate",), 125)]
    assert (outcome.warmup, outcome.stopped) == (25, "fixed count")
    assert len(outcome.samples.reference) == len(outcome.samples.candidate) == 100


def test_warm_up_calls_are_in_the_same_queue_and_no_samples() -> None:
    outcome, _, _ = measure("paper", lambda _role, call: 9.0 if call % 125 < 25 else 1.0)
    assert set(outcome.samples.reference) == set(outcome.samples.candidate) == {1.0}
    assert len(outcome.samples.reference_wall) == 100


def test_paper_gives_the_ratio_of_the_medians() -> None:
    outcome, _, _ = measure("paper", noisy(2, 1, 0.2))
    expected = median(outcome.samples.reference) / median(outcome.samples.candidate)
    assert outcome.interval.estimate == expected


def test_paper_does_not_look_at_the_time() -> None:
    outcome, _, _ = measure("paper", noisy(2, 1, 0.2), limit=AT_ONCE)
    assert len(outcome.samples.candidate) == 100


def test_do_bench_fills_25_and_100_milliseconds_with_calls() -> None:
    outcome, sampler, _ = measure("do_bench", lambda role, _call: 2.0 if role == "reference" else 0.5)
    assert sampler.requests == [
        (("reference",), 5), (("reference",), 62),
        (("candidate",), 5), (("candidate",), 250),
    ]  # fmt: skip
    assert outcome.interval.estimate == 4.0
    assert (outcome.warmup, outcome.stopped) == (17, "fixed time")


def test_do_bench_takes_at_least_one_call_of_a_slow_kernel() -> None:
    outcome, sampler, _ = measure("do_bench", lambda _role, _call: 500.0)
    assert [reps for _role, reps in sampler.requests] == [5, 2, 5, 2]
    assert len(outcome.samples.reference) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_use_corrected_samples_records_raw_ones(policy: str) -> None:
    def doubled(samples: Samples) -> Samples:
        return Samples(
            reference=samples.reference,
            candidate=[time_ms * 2 for time_ms in samples.candidate],
            reference_wall=samples.reference_wall,
            candidate_wall=samples.candidate_wall,
        )

    outcome, _, _ = measure(policy, noisy(3, 1, 0.0), correct=doubled)
    assert outcome.interval.estimate == pytest.approx(1.5)
    assert set(outcome.samples.candidate) == {1.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failing_sampler_ends_the_measurement(policy: str) -> None:
    def fail(order: Sequence[str], reps: int, flush: bool = True) -> Samples:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        POLICIES[policy].measure(fail, unchanged, precision=0.01, confidence=0.95, limit=NEVER, report=lambda *_: None)


def test_samples_are_appended_role_by_role() -> None:
    samples = Samples(reference=[1.0], candidate=[2.0], reference_wall=[3.0], candidate_wall=[4.0])
    samples.extend(Samples(reference=[5.0], candidate=[6.0], reference_wall=[7.0], candidate_wall=[8.0]))
    assert (samples.reference, samples.candidate) == ([1.0, 5.0], [2.0, 6.0])
    assert (samples.reference_wall, samples.candidate_wall) == ([3.0, 7.0], [4.0, 8.0])


def test_two_sets_of_samples_share_nothing() -> None:
    Samples().extend(Samples(reference=[1.0]))
    assert Samples().reference == []


LEAST_STARTS, MOST_STARTS = 4, 30


# --- processes that are restarted -------------------------------------------------------------------------------------


def restarted(
    cost: Callable[[str, int], float], *, every: int, precision: float = 0.01
) -> tuple[Measurement, list[int]]:
    """The paired policy with a restart after every so many questions; the pairs at which the policy asked."""
    sampler, asked = ScriptedSampler(cost), []

    class EveryFew:
        warmup = 3

        def restart(self, samples: Samples) -> bool:
            asked.append(len(sampler.calls))
            return len(asked) % every == 0

        def warmed(self) -> None: ...

        def full(self, samples: Samples) -> bool:
            return False

        def enough(self, samples: Samples) -> bool:
            return len(samples.starts) >= LEAST_STARTS

        def exhausted(self, samples: Samples) -> bool:
            return len(samples.starts) > MOST_STARTS

    outcome = POLICIES["paired"].measure(
        sampler, unchanged, precision=precision, confidence=0.95, limit=NEVER, report=lambda *_: None,
        process_restart=EveryFew(),
    )  # fmt: skip
    return outcome, asked


def test_every_process_restart_is_warmed_up() -> None:
    outcome, asked = restarted(noisy(2, 1, 0.2), every=5, precision=0.05)
    starts = outcome.samples.starts
    assert starts[0] == 0
    assert len(starts) == 1 + len(asked) // 5
    assert starts == sorted(set(starts))
    assert all(start <= len(outcome.samples.candidate) for start in starts)


def test_without_enough_starts_precision_does_not_stop_it() -> None:
    outcome, _ = restarted(noisy(2, 1, 0.001), every=5)
    assert outcome.stopped == "precise"
    assert len(outcome.samples.starts) >= LEAST_STARTS


def test_without_precision_it_stops_after_the_last_start() -> None:
    outcome, _ = restarted(noisy(2, 1, 0.2), every=2, precision=1e-6)
    assert outcome.stopped == "start limit"
    assert len(outcome.samples.starts) == MOST_STARTS + 1


@pytest.mark.parametrize(
    ("scale_ms", "noise", "starts", "pairs"),
    [(0.01, 0.001, 8, 4), (0.01, 0.5, 16, 4), (1.0, 0.0001, 3, 6), (1.0, 0.5, 8, 6)],
)
def test_on_a_gpu_every_start_has_the_same_weight(scale_ms: float, noise: float, starts: int, pairs: int) -> None:
    """Precise or not: nothing is looked at in the midst of a start, and none goes on longer than others."""
    sampler = ScriptedSampler(noisy(scale_ms, scale_ms, noise))
    outcome = POLICIES["paired"].measure(
        sampler, unchanged, precision=0.01, confidence=0.95, limit=NEVER, report=lambda *_: None,
        process_restart=CountedRestarts(lambda: None),
    )  # fmt: skip
    assert outcome.samples.starts == [pairs * index for index in range(starts)]
    assert len(outcome.samples.candidate) == starts * pairs
    assert outcome.stopped == ("precise" if noise < 0.01 else "start limit")


def test_a_difference_between_starts_widens_the_interval() -> None:
    luck = random.Random(3)
    position = {"factor": 1.0}
    noise = noisy(1, 1, 0.002)

    def cost(role: str, call: int) -> float:
        if call % 40 == 0:
            position["factor"] = math.exp(luck.gauss(0, 0.03))
        return noise(role, call) * (position["factor"] if role == "candidate" else 1.0)

    apart, _ = restarted(cost, every=8, precision=1e-5)
    samples = apart.samples
    together = POLICIES["paired"]._interval(  # the same samples, as if nothing had been restarted
        Samples(reference=samples.reference, candidate=samples.candidate), 0.95, 300
    )  # fmt: skip
    assert apart.interval.half_width > 2 * together.half_width


@pytest.mark.parametrize(
    ("novel", "enough"),
    [
        ([], True), ([True] * 18, True), ([False] * 18, True), ([True] * 7 + [False] * 11, False),
        ([True] * 8 + [False] * 10, True), ([True] * 11 + [False] * 7, False),
    ],
    ids=["none", "all new", "all known", "seven new", "eight new", "seven known"],
)  # fmt: skip
def test_memory_is_told_from_eight_pairs_of_each_kind(novel: list[bool], enough: bool) -> None:
    """Inputs that are all of one kind cannot tell it, however many pairs there are."""
    assert may_be_precise(Samples(novel=novel)) is enough


@pytest.mark.parametrize(("restarts", "pairs"), [(CountedRestarts(lambda: None), 30), (None, 34)])
def test_a_precise_timing_goes_on_until_memory_would_show(restarts: CountedRestarts | None, pairs: int) -> None:
    """At the looks so far 18 pairs would be precise; without restarts the first look is at 20, and then at 26."""

    def novel_at_last(order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
        nonlocal taken
        count = order.count("candidate") * reps * flush
        taken += count
        return Samples(reference=[1.0] * count, candidate=[1.0] * count, novel=[taken <= 2 or taken > 24] * count)

    taken = 0
    outcome = POLICIES["paired"].measure(
        novel_at_last, unchanged, precision=0.01, confidence=0.95, limit=NEVER, report=lambda *_: None,
        process_restart=restarts,
    )  # fmt: skip
    assert outcome.stopped == "precise"
    assert sum(outcome.samples.novel) >= LEAST_NOVEL
    assert len(outcome.samples.novel) == pairs
