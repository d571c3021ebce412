"""The statistics of paired timings, by their laws: scale, swap, width, coverage, and the class of an interval."""

from __future__ import annotations

import math
import random
import statistics as standard
from collections.abc import Callable
from statistics import NormalDist, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.gate.timing.statistics import (
    FIRST_LOOK,
    Standing,
    chance_of_as_many,
    next_look,
    paired_interval,
    precise_enough,
    quantile_of_others,
    standing,
    unpaired_interval,
)
from pytest_klineage.records import Interval
from pytest_klineage.records.bootstrap import FEW_PAIRS, log_ratios, quantile, start_factor, tail_share

TIMES = st.floats(1e-4, 1e4)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40)
MANY_PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=FEW_PAIRS, max_size=40)
CONFIDENCE = st.floats(0.5, 0.999)
QUICK = 120
"""Resamples where only a law is tested, not a width."""


def sides(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-9)


def log_normal(draw: random.Random, count: int, noise: float, centre: float = 1.0) -> list[float]:
    return [centre * math.exp(draw.gauss(0, noise)) for _ in range(count)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50), st.integers(2, 20))
def test_quantiles_match_the_inclusive_standard_ones(values: list[float], pieces: int) -> None:
    ordered = sorted(values)
    expected = standard.quantiles(ordered, n=pieces, method="inclusive")
    for index, value in enumerate(expected, start=1):
        assert math.isclose(quantile(ordered, index / pieces), value, rel_tol=1e-9, abs_tol=1e-6)


@given(st.lists(TIMES, min_size=1))
def test_the_outer_quantiles_are_minimum_and_maximum(values: list[float]) -> None:
    assert quantile(sorted(values), 0) == min(values)
    assert quantile(sorted(values), 1) == max(values)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30), st.floats(0, 1))
def test_the_quantile_of_others_is_that_without_the_value_itself(values: list[float], share: float) -> None:
    expected = [quantile(sorted(values[:index] + values[index + 1 :]), share) for index in range(len(values))]
    assert quantile_of_others(values, share) == expected


def test_a_single_value_has_no_others() -> None:
    assert quantile_of_others([3.0], 0.9) == [3.0]


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@pytest.mark.parametrize(("reference", "candidate"), [([], []), ([1.0], []), ([1.0], [1.0, 2.0])])
def test_pairs_must_be_complete(reference: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError, match="equally many"):
        paired_interval(reference, candidate)


def test_a_time_of_zero_is_no_pair() -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        log_ratios([1.0], [0.0])
    with pytest.raises((ValueError, ZeroDivisionError)):
        log_ratios([0.0], [1.0])


@settings(max_examples=40)
@given(PAIRS, CONFIDENCE)
def test_the_interval_contains_its_estimate(pairs: list[tuple[float, float]], confidence: float) -> None:
    for interval in (
        paired_interval(*sides(pairs), confidence=confidence, resamples=QUICK),
        unpaired_interval(*sides(pairs), confidence=confidence, resamples=QUICK),
    ):
        assert 0 < interval.low <= interval.estimate <= interval.high
        assert interval.confidence == confidence


@settings(max_examples=40)
@given(PAIRS)
def test_the_interval_lies_within_the_range_of_the_ratios(pairs: list[tuple[float, float]]) -> None:
    interval = paired_interval(*sides(pairs), resamples=QUICK)
    ratios = [reference / candidate for reference, candidate in pairs]
    assert min(ratios) * (1 - 1e-9) <= interval.low
    assert interval.high <= max(ratios) * (1 + 1e-9)


@settings(max_examples=40)
@given(PAIRS, st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(pairs: list[tuple[float, float]], factor: float) -> None:
    reference, candidate = sides(pairs)
    plain = paired_interval(reference, candidate, resamples=QUICK)
    scaled = paired_interval([t * factor for t in reference], [t * factor for t in candidate], resamples=QUICK)
    assert close(plain.estimate, scaled.estimate)
    assert close(plain.low, scaled.low)
    assert close(plain.high, scaled.high)


@settings(max_examples=40)
@given(PAIRS, st.floats(1e-3, 1e3))
def test_a_slower_reference_moves_the_whole_interval(pairs: list[tuple[float, float]], factor: float) -> None:
    reference, candidate = sides(pairs)
    plain = paired_interval(reference, candidate, resamples=QUICK)
    moved = paired_interval([t * factor for t in reference], candidate, resamples=QUICK)
    assert close(plain.estimate * factor, moved.estimate)
    assert close(plain.low * factor, moved.low)


@settings(max_examples=40)
@given(PAIRS)
def test_swapping_the_sides_inverts_the_interval(pairs: list[tuple[float, float]]) -> None:
    reference, candidate = sides(pairs)
    forth = paired_interval(reference, candidate, resamples=QUICK)
    back = paired_interval(candidate, reference, resamples=QUICK)
    assert close(forth.estimate * back.estimate, 1)
    assert close(forth.low * back.high, 1)
    assert close(forth.high * back.low, 1)


@settings(max_examples=40)
@given(PAIRS, CONFIDENCE, CONFIDENCE)
def test_more_confidence_never_gives_a_narrower_interval(
    pairs: list[tuple[float, float]], one: float, other: float
) -> None:
    less, more = sorted((one, other))
    for interval_of in (paired_interval, unpaired_interval):
        narrow = interval_of(*sides(pairs), confidence=less, resamples=QUICK)
        wide = interval_of(*sides(pairs), confidence=more, resamples=QUICK)
        assert wide.low <= narrow.low
        assert narrow.high <= wide.high


@pytest.mark.parametrize(("count", "student"), [(12, 2.2010), (24, 2.0687), (32, 2.0395), (101, 1.9840)])
def test_the_tail_is_that_of_students_t_expanded_for_few_values(count: int, student: float) -> None:
    """Quantiles of t for 97.5 %, from a table."""
    expected = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student)
    assert tail_share(0.95, count) == pytest.approx(expected, rel=2e-3)


@given(CONFIDENCE, st.integers(2, 10_000))
def test_fewer_values_never_give_a_larger_tail(confidence: float, count: int) -> None:
    assert tail_share(confidence, count) <= tail_share(confidence, count + 1) <= (1 - confidence) / 2


EXPANSION = (((1, 1), 4), ((5, 16, 3), 96), ((3, 19, 17, -15), 384))
"""Polynomials of Abramowitz and Stegun 26.7.5, the highest power first and only odd ones, with their divisors."""


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_the_tail_has_the_coefficients_of_the_handbook(confidence: float, count: int) -> None:
    z, freedom = NormalDist().inv_cdf((1 + confidence) / 2), count - 1
    student = z
    for order, (coefficients, divisor) in enumerate(EXPANSION, start=1):
        powers = range(2 * len(coefficients) - 1, 0, -2)
        terms = (factor * z**power for factor, power in zip(coefficients, powers, strict=True))
        student += sum(terms) / (divisor * freedom**order)
    expected = NormalDist().cdf(-math.sqrt(count / freedom) * student)
    assert tail_share(confidence, count) == pytest.approx(expected, rel=1e-9)


def test_a_single_value_has_no_scatter_to_expand() -> None:
    assert tail_share(0.95, 1) == pytest.approx(0.025)


def test_the_expansion_covers_the_truth_more_often() -> None:
    """24 pairs of one start, and of four that differ by 0.6 times what pairs do; shares of 600 tries."""
    alone, apart = coverage((0,)), coverage((0, 6, 12, 18))
    assert alone["expanded"] >= 0.945
    assert apart["expanded"] >= 0.915
    assert alone["expanded"] + apart["expanded"] >= alone["plain"] + apart["plain"] + 0.01


def coverage(starts: tuple[int, ...], tries: int = 600) -> dict[str, float]:
    """How often an interval of 95 %, and one of the confidence that has 2.5 % beyond each end, holds the truth."""
    draw, held = random.Random(1), {"plain": 0, "expanded": 0}
    plain = plain_confidence(24)
    for _ in range(tries):
        shares = [own + draw.gauss(0, 1) for own in shifts(starts, draw) for _ in range(24 // len(starts))]
        ratios = [math.exp(0.01 * share) for share in shares]
        for name, confidence in (("plain", plain), ("expanded", 0.95)):
            interval = paired_interval(ratios, [1.0] * 24, confidence=confidence, resamples=QUICK, starts=starts)
            held[name] += interval.low <= 1 <= interval.high
    return {name: count / tries for name, count in held.items()}


def plain_confidence(count: int) -> float:
    """The confidence at which the expansion leaves 2.5 % beyond each end."""
    low, high = 0.5, 0.95
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail_share(middle, count) > 0.025 else (low, middle)
    return low


def shifts(starts: tuple[int, ...], draw: random.Random) -> list[float]:
    """By how much each start is off, in units of the scatter of pairs."""
    return [0.6 * draw.gauss(0, 1) if len(starts) > 1 else 0.0 for _ in starts]


def test_an_interval_of_two_sides_is_expanded_too() -> None:
    draw = random.Random(2)
    times = [[math.exp(0.01 * draw.gauss(0, 1)) for _ in range(FEW_PAIRS)] for _ in range(2)]
    ratios = unpaired_interval(*times, confidence=0.95)
    plain = unpaired_interval(*times, confidence=plain_confidence(FEW_PAIRS))
    assert ratios.half_width > 1.05 * plain.half_width


@given(st.lists(TIMES, min_size=1, max_size=FEW_PAIRS - 1), st.lists(TIMES, min_size=1, max_size=40))
def test_few_samples_of_a_side_give_the_range_of_all_ratios(reference: list[float], candidate: list[float]) -> None:
    interval = unpaired_interval(reference, candidate, resamples=QUICK)
    assert close(interval.low, min(reference) / max(candidate))
    assert close(interval.high, max(reference) / min(candidate))


@settings(max_examples=20)
@given(MANY_PAIRS)
def test_the_same_samples_give_the_same_interval(pairs: list[tuple[float, float]]) -> None:
    assert paired_interval(*sides(pairs), resamples=QUICK) == paired_interval(*sides(pairs), resamples=QUICK)


@pytest.mark.parametrize("interval_of", [paired_interval, unpaired_interval])
def test_a_record_is_computed_again_from_seed_zero(interval_of: Callable[..., Interval]) -> None:
    times = log_normal(random.Random(1), 30, 0.3), log_normal(random.Random(2), 30, 0.3)
    plain = interval_of(*times, resamples=QUICK)
    assert plain == interval_of(*times, resamples=QUICK, seed=0)
    assert plain != interval_of(*times, resamples=QUICK, seed=1)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=FEW_PAIRS - 1), CONFIDENCE)
def test_few_pairs_give_the_range_of_all_of_them(pairs: list[tuple[float, float]], confidence: float) -> None:
    interval = paired_interval(*sides(pairs), confidence=confidence)
    ratios = [reference / candidate for reference, candidate in pairs]
    assert close(interval.low, min(ratios))
    assert close(interval.high, max(ratios))


def test_enough_pairs_give_less_than_their_range() -> None:
    reference = log_normal(random.Random(1), FEW_PAIRS, 0.1)
    interval = paired_interval(reference, [1.0] * FEW_PAIRS)
    assert min(reference) < interval.low
    assert interval.high < max(reference)


def test_one_outlier_does_not_move_the_estimate() -> None:
    reference = [1.0] * 21
    assert paired_interval([*reference, 1000.0], [1.0] * 22).estimate == 1.0


def test_common_noise_of_a_pair_does_not_widen_the_interval() -> None:
    load = log_normal(random.Random(2), 60, 1.0)
    noise = random.Random(3)
    reference, candidate = ([t * math.exp(noise.gauss(0, 0.01)) for t in load] for _ in range(2))
    assert paired_interval(reference, candidate).half_width < 0.02
    assert unpaired_interval(reference, candidate).half_width > 0.2


def test_more_samples_give_narrower_intervals() -> None:
    draw = random.Random(4)

    def typical_width(count: int) -> float:
        series = [(log_normal(draw, count, 0.1), log_normal(draw, count, 0.1)) for _ in range(15)]
        return median([paired_interval(*pair, resamples=300).half_width for pair in series])

    widths = [typical_width(count) for count in (15, 60, 240)]
    # The width falls with the square root of the count: by 2 between neighbours.
    assert widths[0] > 1.4 * widths[1]
    assert widths[1] > 1.4 * widths[2]


def test_intervals_of_a_kernel_against_itself_contain_one() -> None:
    """400 series of 60 log-normal pairs, nominal coverage 95 %.

    A percentile bootstrap of a median covers 93 to 96 %; with at least 93 %, fewer than 346 of 400 has a probability
    below 1e-6. An interval of half the right width covers 67 %.
    """
    draw = random.Random(5)
    covered = 0
    for _ in range(400):
        reference, candidate = log_normal(draw, 60, 0.05), log_normal(draw, 60, 0.05)
        interval = paired_interval(reference, candidate, resamples=200)
        covered += interval.low <= 1 <= interval.high
    assert covered >= 346


@pytest.mark.parametrize("interval_of", [paired_interval, unpaired_interval])
def test_the_interval_finds_a_true_speedup(interval_of: type) -> None:
    draw = random.Random(6)
    interval = interval_of(log_normal(draw, 200, 0.05, centre=3.0), log_normal(draw, 200, 0.05, centre=2.0))
    assert interval.low < 1.5 < interval.high
    assert interval.half_width < 0.03


@given(st.integers(0, 10_000))
def test_every_look_comes_later_and_the_gaps_grow(pairs: int) -> None:
    look = next_look(pairs)
    assert look >= FIRST_LOOK
    assert look > pairs
    assert look >= 1.25 * pairs
    assert next_look(look) - look >= look - max(pairs, FIRST_LOOK) - 1


def test_many_pairs_need_few_looks() -> None:
    looks, pairs = 0, 0
    while (pairs := next_look(pairs)) < 2000:
        looks += 1
    assert looks < 30


@given(low=st.floats(0.1, 1), estimate=st.floats(1, 2), high=st.floats(2, 3), precision=st.floats(0.001, 2))
def test_sampling_stops_by_width_alone(low: float, estimate: float, high: float, precision: float) -> None:
    interval = Interval(estimate, low, high)
    assert precise_enough(interval, precision) == ((high - low) / (2 * estimate) <= precision)


def test_the_width_that_was_asked_for_is_precise_enough() -> None:
    assert precise_enough(Interval(1.0, 0.75, 1.25), 0.25)


@given(
    ends=st.lists(st.floats(0.01, 10), min_size=3, max_size=3).map(sorted),
    at_least=st.floats(0.05, 5),
    margin=st.floats(0, 0.99),
)
@settings(max_examples=500)
def test_every_interval_has_the_one_class_that_the_rules_give_it(
    ends: list[float], at_least: float, margin: float
) -> None:
    low, estimate, high = ends
    position = standing(Interval(estimate, low, high), at_least=at_least, margin=margin)
    line = at_least * (1 - margin)
    met = low >= line
    assert (position is Standing.SLOWER) == (high < line)
    assert (position is Standing.INCONCLUSIVE) == (low < line <= high)
    assert (position is Standing.FASTER) == (met and low > 1)
    same = met and 1 - margin <= low <= 1 and high <= 2 * low and (high >= 1 or at_least >= 1)
    assert (position is Standing.SAME) == same
    assert (position is Standing.MEETS) == (met and low <= 1 and not same)


@given(
    ends=st.lists(st.floats(0.01, 10), min_size=3, max_size=3).map(sorted),
    at_least=st.floats(0.05, 5),
    more=st.floats(1, 3),
)
def test_asking_for_more_never_turns_a_failure_into_a_success(ends: list[float], at_least: float, more: float) -> None:
    rank = {Standing.SLOWER: 0, Standing.INCONCLUSIVE: 1}
    interval = Interval(ends[1], ends[0], ends[2])
    lenient = standing(interval, at_least=at_least, margin=0.05)
    strict = standing(interval, at_least=at_least * more, margin=0.05)
    assert rank.get(strict, 2) <= rank.get(lenient, 2)


@pytest.mark.parametrize(
    ("low", "high", "at_least", "expected"),
    [
        (1.2, 1.3, 1.0, Standing.FASTER),
        (0.96, 0.99, 1.0, Standing.SAME),
        (0.99, 1.02, 1.0, Standing.SAME),
        (0.90, 1.02, 1.0, Standing.INCONCLUSIVE),
        (0.80, 0.90, 1.0, Standing.SLOWER),
        (0.55, 0.60, 0.5, Standing.MEETS),
        (0.80, 1.20, 0.5, Standing.MEETS),
        (0.97, 2.50, 1.0, Standing.MEETS),
        (1.2, 1.3, 2.0, Standing.SLOWER),
        (0.95, 1.0, 0.5, Standing.SAME),
        (0.95, 1.9, 1.0, Standing.SAME),
        (0.95, 0.999, 0.5, Standing.MEETS),
    ],
)
def test_examples_of_every_class(low: float, high: float, at_least: float, expected: Standing) -> None:
    assert standing(Interval((low + high) / 2, low, high), at_least=at_least, margin=0.05) is expected


# --- starts -----------------------------------------------------------------------------------------------------------


def test_one_start_is_the_plain_bootstrap() -> None:
    pairs = [(1.0 + 0.01 * (n % 7), 1.0) for n in range(60)]
    plain = paired_interval(*sides(pairs), resamples=QUICK)
    assert paired_interval(*sides(pairs), resamples=QUICK, starts=(0,)) == plain


def test_both_of_two_starts_are_drawn_from() -> None:
    """One start at 1, one at 2: either may be drawn twice, so the interval reaches from one to the other."""
    interval = paired_interval([1.0] * 20 + [2.0] * 20, [1.0] * 40, resamples=QUICK, starts=(0, 20))
    assert (interval.low, interval.high) == pytest.approx((1.0, 2.0))


def test_as_many_starts_are_drawn_as_there_are() -> None:
    """One of sixteen differs. That eight of sixteen drawn ones are this one is impossible; one of one often is it."""
    reference = [1.0] * 150 + [2.0] * 10
    interval = paired_interval(reference, [1.0] * 160, resamples=1000, starts=range(0, 160, 10))
    assert (interval.low, interval.high) == pytest.approx((1.0, 1.0))


def test_as_many_pairs_of_a_start_are_drawn_as_it_has() -> None:
    """Two starts that are alike: the interval is about that of all pairs, not that of one pair of each."""
    reference = log_normal(random.Random(3), 200, 0.1)
    over_starts = paired_interval(reference, [1.0] * 200, resamples=QUICK, starts=(0, 100))
    plain = paired_interval(reference, [1.0] * 200, resamples=QUICK)
    assert over_starts.half_width < 2 * plain.half_width


def test_a_start_without_pairs_changes_nothing() -> None:
    reference = log_normal(random.Random(4), 40, 0.1)
    without = paired_interval(reference, [1.0] * 40, resamples=QUICK, starts=(0, 20))
    assert paired_interval(reference, [1.0] * 40, resamples=QUICK, starts=(0, 20, 20)) == without


def test_the_interval_over_starts_covers_the_truth() -> None:
    """Eight starts that differ by 1 %, forty pairs each with noise of 0.5 %: coverage over a hundred repetitions."""
    draw = random.Random(5)
    held = {"starts": 0, "plain": 0}
    for _ in range(100):
        reference: list[float] = []
        for _ in range(8):
            position = draw.gauss(0, 0.01)
            reference += [math.exp(position + draw.gauss(0, 0.005)) for _ in range(40)]
        candidate, starts = [1.0] * len(reference), range(0, len(reference), 40)
        over_starts = paired_interval(reference, candidate, resamples=200, starts=starts)
        plain = paired_interval(reference, candidate, resamples=200)
        held["starts"] += over_starts.low <= 1 <= over_starts.high
        held["plain"] += plain.low <= 1 <= plain.high
    assert held["starts"] >= 85
    assert held["plain"] <= 60


@pytest.mark.parametrize(("starts", "pairs"), [(3, 6), (4, 6), (8, 4)])
@pytest.mark.parametrize("between", [0.2, 0.6], ids=["starts alike", "starts apart"])
def test_few_starts_hold_the_truth(starts: int, pairs: int, between: float) -> None:
    """The least timings of a GPU: normal pairs, and starts that differ by this share of what pairs do."""
    draw, held, count = random.Random(starts * 100 + pairs), 0, 300
    for _ in range(count):
        reference: list[float] = []
        for _ in range(starts):
            start = draw.gauss(0, 0.01 * between)
            reference += [math.exp(start + draw.gauss(0, 0.01)) for _ in range(pairs)]
        found = paired_interval(
            reference, [1.0] * len(reference), resamples=200, starts=range(0, len(reference), pairs)
        )
        held += found.low <= 1 <= found.high
    assert held >= 0.95 * count - 2 * math.sqrt(count * 0.95 * 0.05)


@given(st.integers(2, 100))
def test_more_starts_are_widened_less(starts: int) -> None:
    assert 1 < start_factor(starts + 1) < start_factor(starts)
    assert start_factor(1) == 1


def test_a_widened_interval_stays_within_its_ratios() -> None:
    """Three starts that lie far apart: the bootstrap reaches to the outer ones already."""
    ratios = [0.5] * 6 + [1.0] * 6 + [2.0] * 6
    found = paired_interval(ratios, [1.0] * 18, resamples=QUICK, starts=(0, 6, 12))
    assert (found.low, found.high) == (0.5, 2.0)


def test_older_records_are_computed_anew_without_the_widening() -> None:
    ratios = [1.0 + 0.01 * (n % 5) + 0.005 * (n // 6) for n in range(24)]
    wide, old = (
        paired_interval(ratios, [1.0] * 24, resamples=QUICK, starts=(0, 6, 12, 18), widened=widened)
        for widened in (True, False)
    )
    assert wide.low < old.low < old.high < wide.high
    assert wide.estimate == old.estimate


COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)).map(
    lambda drawn: (min(drawn[0], drawn[1]), drawn[1], min(drawn[2], drawn[3]), drawn[3])
)


class TestFisher:
    def test_the_lady_who_tastes_tea(self) -> None:
        assert chance_of_as_many(3, 4, 1, 4) == pytest.approx(17 / 70)
        assert chance_of_as_many(4, 4, 0, 4) == pytest.approx(1 / 70)

    @given(COUNTS)
    def test_it_is_a_chance_and_that_of_any_number_is_one(self, counts: tuple[int, int, int, int]) -> None:
        first, of_first, second, of_second = counts
        assert 0 < chance_of_as_many(*counts) <= 1
        if first + second <= of_second:
            assert chance_of_as_many(0, of_first, first + second, of_second) == pytest.approx(1)

    @given(COUNTS)
    def test_more_of_the_same_number_is_less_likely(self, counts: tuple[int, int, int, int]) -> None:
        first, of_first, second, of_second = counts
        if first < of_first and second > 0:
            assert chance_of_as_many(first + 1, of_first, second - 1, of_second) <= chance_of_as_many(*counts)

    @given(COUNTS)
    def test_as_many_or_fewer_on_the_other_side(self, counts: tuple[int, int, int, int]) -> None:
        first, of_first, second, of_second = counts
        # Fewer than `first` here are more than `second` there.
        fewer = 0.0
        if first > 0 and second < of_second:
            fewer = chance_of_as_many(second + 1, of_second, first - 1, of_first)
        assert chance_of_as_many(*counts) + fewer == pytest.approx(1)

    def test_it_is_as_often_as_dealt(self) -> None:
        draw, cards = random.Random(1), [True] * 7 + [False] * 13
        met = 0
        for _ in range(4000):
            draw.shuffle(cards)
            met += sum(cards[:12]) >= 6
        assert met / 4000 == pytest.approx(chance_of_as_many(6, 12, 1, 8), abs=0.03)

    @pytest.mark.parametrize("counts", [(3, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 2, 1), (0, 2, -1, 1)])
    def test_what_cannot_be_is_an_error(self, counts: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match="no counts"):
            chance_of_as_many(*counts)
