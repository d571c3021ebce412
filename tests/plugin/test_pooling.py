"""The interval over several judgements: properties, its errors where starts differ, and what is left out of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.plugin.comparison.pooling import CONFIDENCE, compare_judged, pooled_interval, pooled_starts
from pytest_klineage.records import Code, Interval, KernelCase, Reason, Timing, Verdict
from pytest_klineage.records.baseline import ComparisonOutcome
from pytest_klineage.report.compare_base import LEAST, MOST, judge_again, pooled_outcome

QUICK, MARGIN, LINE = 200, 0.03, 0.97
SLOWER, FASTER, SAME, UNCLEAR = (
    ComparisonOutcome.SLOWER, ComparisonOutcome.FASTER, ComparisonOutcome.SAME, ComparisonOutcome.UNCLEAR,
)  # fmt: skip
CASE = KernelCase(operator="gemm", shape={"M": 8}, dtype="fp32", reference="torch")

pairs = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=24)


def timing_of(samples: list[tuple[float, float]], starts: tuple[int, ...] = (0,), **fields: object) -> Timing:
    """A timing of pairs of reference and candidate, with the gate's own interval."""
    reference, candidate = zip(*samples, strict=True)
    known = {"policy": "paired", "speedup": paired_interval(reference, candidate, starts=starts, resamples=QUICK)}
    return Timing(
        **(known | fields), reference_ms=1.0, candidate_ms=1.0, reference_samples_ms=reference, starts=starts,
        candidate_samples_ms=candidate, warmup=3, flush_bytes=0, statistic="",
    )  # fmt: skip


timings = pairs.flatmap(
    lambda samples: st.sets(st.integers(1, max(1, len(samples) - 1)), max_size=4).map(
        lambda later: timing_of(samples, (0, *sorted(start for start in later if start < len(samples))))
    )
)


def noisy(
    draw: random.Random, speedup: float = 1.0, *, starts: int = 6, each: int = 10, between: float = 0.01
) -> Timing:
    """A judgement as they are: starts differ, and pairs of a start do."""
    samples = []
    for _ in range(starts):
        luck = draw.gauss(0, between)
        samples += [(1.0, math.exp(luck + draw.gauss(0, 0.02)) / speedup) for _ in range(each)]
    return timing_of(samples, tuple(range(0, starts * each, each)))


def slowed(timing: Timing, factor: float) -> Timing:
    return msgspec.structs.replace(
        timing, candidate_samples_ms=tuple(sample * factor for sample in timing.candidate_samples_ms)
    )


def verdict_of(timing: Timing | None, code: Code = Code.ACCEPTED_SAME) -> Verdict:
    return Verdict(
        case=CASE, status=code.status, reasons=(Reason(code=code, message="said so\nat length"),), timing=timing
    )


# --- the interval -----------------------------------------------------------------------------------------------------


@given(timing=timings, confidence=st.sampled_from([0.9, 0.95, CONFIDENCE]))
@settings(max_examples=40, deadline=None)
def test_the_pool_of_one_is_the_gates_interval(timing: Timing, confidence: float) -> None:
    gates = paired_interval(
        timing.reference_samples_ms, timing.candidate_samples_ms, confidence=confidence, starts=timing.starts,
        resamples=QUICK,
    )  # fmt: skip
    assert pooled_interval([timing], confidence=confidence, resamples=QUICK) == gates


@given(judged=st.lists(timings, min_size=1, max_size=MOST))
@settings(max_examples=60, deadline=None)
def test_every_start_keeps_its_pairs(judged: list[Timing]) -> None:
    starts = pooled_starts(judged)
    total = sum(len(timing.candidate_samples_ms) for timing in judged)
    assert all(one < other for one, other in pairwise([*starts, total]))
    lengths = [other - one for one, other in pairwise([*starts, total])]
    assert lengths == [
        other - one for timing in judged for one, other in pairwise([*timing.starts, len(timing.candidate_samples_ms)])
    ]


def test_starts_are_counted_on() -> None:
    first, second = timing_of([(1, 1)] * 7, (0, 3)), timing_of([(1, 1)] * 5, (0, 1, 4))
    assert pooled_starts([first, second, first]) == [0, 3, 7, 8, 11, 12, 15]


@pytest.mark.parametrize("number", [2, 3])
def test_the_pool_is_the_interval_of_all_starts(number: int) -> None:
    draw = random.Random(7)
    judged = [noisy(draw, speed, starts=starts) for speed, starts in zip((1.0, 1.03, 0.98), (4, 3, 5), strict=True)]
    judged = judged[:number]
    reference = [sample for timing in judged for sample in timing.reference_samples_ms]
    candidate = [sample for timing in judged for sample in timing.candidate_samples_ms]
    whole = paired_interval(
        reference, candidate, confidence=CONFIDENCE, starts=tuple(range(0, len(candidate), 10)), resamples=QUICK
    )
    assert pooled_interval(judged, resamples=QUICK) == whole
    assert whole.confidence == CONFIDENCE
    assert min(reference) == max(reference) == 1.0


@given(judged=st.lists(timings, min_size=1, max_size=MOST), factor=st.floats(1.01, 5))
@settings(max_examples=40, deadline=None)
def test_a_slower_kernel_has_a_lower_interval(judged: list[Timing], factor: float) -> None:
    plain = pooled_interval(judged, resamples=QUICK)
    longer = pooled_interval([slowed(timing, factor) for timing in judged], resamples=QUICK)
    for end in ("low", "estimate", "high"):
        assert getattr(longer, end) == pytest.approx(getattr(plain, end) / factor, rel=1e-9)


@given(judged=st.lists(timings, min_size=1, max_size=MOST), factors=st.tuples(*[st.floats(1, 4)] * 2).map(sorted))
@settings(max_examples=40, deadline=None)
def test_slower_stays_slower(judged: list[Timing], factors: list[float]) -> None:
    some, more = (
        pooled_outcome(
            pooled_interval([slowed(timing, factor) for timing in judged], resamples=QUICK), MARGIN, len(judged)
        )
        for factor in factors
    )
    order = [FASTER, SAME, UNCLEAR, SLOWER]
    if SLOWER in (some, more):
        assert order.index(some) <= order.index(more)
    if FASTER in (some, more):
        assert some is FASTER


def test_more_judgements_narrow_the_interval(simulated: list[list[Interval]]) -> None:
    """By about the root of their number; the first, of six starts, is widened more."""
    widths = [sum(one[look].half_width for one in simulated) for look in range(MOST)]
    assert 1.3 < widths[0] / widths[1] < 1.7
    assert 1.1 < widths[1] / widths[2] < 1.4


def test_judgements_that_disagree_widen_it() -> None:
    draw = random.Random(13)
    one, other = noisy(draw, 0.9), noisy(draw, 1.0)
    found = pooled_interval([one, other])
    assert found.low < 0.91
    assert found.high > 0.99


@pytest.mark.parametrize("policy", ["paper", "do_bench"])
def test_judgements_without_pairs_have_to_agree(policy: str) -> None:
    judged = [
        timing_of([(1.0, 1.0)] * 40, policy=policy, speedup=Interval(estimate, estimate - 0.01, estimate + 0.02))
        for estimate in (0.9, 1.0, 0.93)
    ]
    assert pooled_interval(judged[:1]) == Interval(0.9, 0.89, 0.92)
    assert pooled_interval(judged) == Interval(0.93, 0.89, 1.02)
    with_pairs = timing_of([(1.0, 1.0)] * 40, speedup=Interval(0.91, 0.9, 0.92))
    assert pooled_interval([*judged[:1], with_pairs]) == Interval(0.905, 0.89, 0.92)


def test_two_looks_err_no_more_than_one_of_99_percent() -> None:
    looks_for_a_change = MOST - LEAST + 1
    assert looks_for_a_change * (1 - CONFIDENCE) == pytest.approx(0.01)


# --- how often it errs ------------------------------------------------------------------------------------------------


def looks(draw: random.Random, between: float) -> list[Interval]:
    """The pooled intervals of three judgements of one kernel, one after the other."""
    judged = [noisy(draw, between=between) for _ in range(MOST)]
    return [pooled_interval(judged[:number], resamples=1000) for number in range(1, MOST + 1)]


def decided(found: list[Interval], speed: float) -> tuple[ComparisonOutcome, int]:
    """What a kernel of this speed would have come to, and after how many judgements."""
    for number, change in enumerate(found, 1):
        scaled = Interval(change.estimate * speed, change.low * speed, change.high * speed)
        outcome = pooled_outcome(scaled, MARGIN, number)
        if outcome is not UNCLEAR:
            return outcome, number
    return UNCLEAR, MOST


@pytest.fixture(scope="module")
def simulated() -> list[list[Interval]]:
    """Sixty kernels whose starts differ by 1 %: what a start is worth is most of what a judgement may err by."""
    draw = random.Random(20261130)
    return [looks(draw, between=0.01) for _ in range(60)]


def test_unchanged_kernels_are_the_same_at_once(simulated: list[list[Interval]]) -> None:
    found = [decided(one, 1.0) for one in simulated]
    assert {outcome for outcome, _ in found} == {SAME}
    assert sum(number for _, number in found) <= 1.1 * len(found)


@pytest.mark.parametrize("speed", [0.98, 1 / 0.98])
def test_a_change_within_the_margin_is_no_alarm(simulated: list[list[Interval]], speed: float) -> None:
    assert not [outcome for one in simulated if (outcome := decided(one, speed)[0]).change]


@pytest.mark.parametrize("speed", [LINE, 1 / LINE])
def test_a_change_of_the_margin_is_seldom_one(simulated: list[list[Interval]], speed: float) -> None:
    # 0.5 in a hundred by the intervals' level; a binomial of 0.01 is above 2 of 60 with probability 0.02.
    assert sum(decided(one, speed)[0].change for one in simulated) <= 2


def test_a_slowdown_of_five_percent_is_found(simulated: list[list[Interval]]) -> None:
    found = [decided(one, 1 / 1.05) for one in simulated]
    assert sum(outcome is SLOWER for outcome, _ in found) >= 0.9 * len(found)
    assert min(number for _, number in found) == 2


# --- judgements -------------------------------------------------------------------------------------------------------


@pytest.fixture
def calm() -> Callable[[float], Timing]:
    """Timings of one speed with little noise."""
    draw = random.Random(5)
    return lambda speed: noisy(draw, speed, between=0.001)


@pytest.mark.parametrize(
    ("speeds", "outcome", "again"),
    [
        ([1.0], SAME, False),
        ([0.9], UNCLEAR, True),
        ([1.2], UNCLEAR, True),
        ([0.97], UNCLEAR, True),
        ([0.9, 0.9], SLOWER, False),
        ([1.2, 1.2], FASTER, False),
        ([0.9, 1.0], UNCLEAR, True),
        ([0.9, 1.0, 0.9], UNCLEAR, False),
        ([0.97, 0.97, 0.97], UNCLEAR, False),
        ([0.97, 0.9, 0.9], SLOWER, False),
        ([1.0, 0.9, 0.9], UNCLEAR, False),
    ],
)
def test_a_change_needs_two_judgements(
    calm: Callable[[float], Timing], speeds: list[float], outcome: ComparisonOutcome, again: bool
) -> None:
    judged = [verdict_of(calm(speed)) for speed in speeds]
    found = compare_judged("a", judged[0], judged, margin=MARGIN)
    assert (found.outcome, judge_again(found)) == (outcome, again)
    assert found.ratio == pooled_interval([verdict.timing for verdict in judged if verdict.timing])
    assert (found.verdict, *found.more) == tuple(judged)


@pytest.mark.parametrize("code", [Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE, Code.INCONCLUSIVE_FEW])
def test_a_disturbed_judgement_is_left_out(calm: Callable[[float], Timing], code: Code) -> None:
    good, bad = [verdict_of(calm(0.9)) for _ in range(2)], verdict_of(calm(2.0), code)
    found = compare_judged("a", good[0], [good[0], bad, good[1]], margin=MARGIN)
    assert found.outcome is SLOWER
    assert found.ratio == pooled_interval([verdict.timing for verdict in good if verdict.timing])
    assert "1 disturbed: said so)" in found.message


def test_one_undisturbed_judgement_is_no_change(calm: Callable[[float], Timing]) -> None:
    bad = verdict_of(calm(0.9), Code.INCONCLUSIVE_BUSY)
    found = compare_judged("a", bad, [bad, verdict_of(calm(0.9)), bad], margin=MARGIN)
    assert found.outcome is UNCLEAR
    assert "quieten" in found.advice
    same = compare_judged("a", bad, [bad, verdict_of(calm(1.0))], margin=MARGIN)
    assert same.outcome is SAME


def test_disturbed_judgements_alone_say_nothing(calm: Callable[[float], Timing]) -> None:
    bad = [verdict_of(calm(speed), Code.INCONCLUSIVE_BUSY) for speed in (1.0, 0.9, 0.9)]
    for number in (1, 2, 3):
        found = compare_judged("a", bad[0], bad[:number], margin=MARGIN)
        assert (found.outcome, judge_again(found)) == (UNCLEAR, number < MOST)
        assert found.ratio is not None


def test_a_base_that_fails_ends_it(calm: Callable[[float], Timing]) -> None:
    judged = [verdict_of(calm(0.9)), verdict_of(None, Code.COMPILE)]
    for some in (judged, judged[1:]):
        found = compare_judged("a", judged[0], some, margin=MARGIN)
        assert found.outcome is ComparisonOutcome.BASE_FAILED
        assert found.message.endswith("build_error.compile: said so")
        assert found.more == tuple(some[1:])
        assert not judge_again(found)
