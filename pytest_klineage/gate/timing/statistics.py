"""Pure statistics of paired timings: bootstrap interval, stopping rule, verdict class."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist, median

from pytest_klineage.records import Interval, speedup
from pytest_klineage.records.verdict import WIDEST

FIRST_LOOK = 10
"""Pairs before the stopping rule looks for the first time."""
LOOK_GROWTH = 1.25
"""The number of pairs grows by this factor between two looks."""
LOOK_RESAMPLES = 300
"""Bootstrap resamples while sampling goes on."""
FINAL_RESAMPLES = 2000
FEW_PAIRS = 12
"""Below this many pairs a bootstrap is too narrow; the range of all pairs stands in for it."""


def log_ratios(reference_ms: Sequence[float], candidate_ms: Sequence[float]) -> list[float]:
    """Logarithm of every pair's speedup. Raises ValueError unless both have the same positive length and values."""
    if len(reference_ms) != len(candidate_ms) or not reference_ms:
        raise ValueError("pairs need equally many samples of both sides, at least one")
    return [math.log(speedup(r, c)) for r, c in zip(reference_ms, candidate_ms, strict=True)]


def paired_interval(
    reference_ms: Sequence[float],
    candidate_ms: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = FINAL_RESAMPLES,
    seed: int = 0,
    starts: Sequence[int] = (0,),
    widened: bool = True,
) -> Interval:
    """Speedup and its percentile bootstrap interval: exp of the median of the paired log-ratios.

    Samples in milliseconds; the n-th of both belong together. `starts` are the pairs at which both processes were new:
    two starts of one program differ for as long as they live, so the bootstrap draws starts first and then pairs of
    each (Davison and Hinkley, Bootstrap Methods and their Application, 3.8). The interval is expanded for few pairs,
    see `tail_share`, and for few starts, see `start_factor`. Records from before 2026-11-23, whose `statistic` does not
    mention it, are not `widened` so. `seed` makes a record reproducible from its samples.
    """
    ratios = log_ratios(reference_ms, candidate_ms)
    draw = random.Random(seed)
    count = len(ratios)
    if count < FEW_PAIRS:
        return Interval(math.exp(median(ratios)), math.exp(min(ratios)), math.exp(max(ratios)), confidence)
    groups = [ratios[start:end] for start, end in zip(starts, [*starts[1:], count], strict=True) if start < end]
    medians = sorted(median(_resample(groups, draw)) for _ in range(resamples))
    tail = tail_share(confidence, count)
    low, high = quantile(medians, tail), quantile(medians, 1 - tail)
    estimate = median(ratios)
    # A percentile interval of a discrete bootstrap can, with few pairs, end on the wrong side of its own estimate.
    wider = start_factor(len(groups)) if widened else 1.0
    low = max(estimate - wider * max(estimate - low, 0.0), min(ratios))
    high = min(estimate + wider * max(high - estimate, 0.0), max(ratios))
    return Interval(math.exp(estimate), math.exp(low), math.exp(high), confidence)


def chance_of_as_many(first: int, of_first: int, second: int, of_second: int) -> float:
    """Fisher's exact test, one-sided: how likely as many as `first` of `of_first` are, or more, by chance alone.

    That is where all that are counted, `first` and `second`, are dealt out at random among `of_first` and `of_second`.
    Raises ValueError for counts that cannot be.
    """
    if not (0 <= first <= of_first and 0 <= second <= of_second):
        raise ValueError(f"{first} of {of_first} and {second} of {of_second} are no counts")
    counted = first + second
    ways = sum(
        math.comb(of_first, n) * math.comb(of_second, counted - n) for n in range(first, min(of_first, counted) + 1)
    )
    return ways / math.comb(of_first + of_second, counted)


def start_factor(starts: int) -> float:
    """By how much an interval over so many starts is wider than its bootstrap.

    A bootstrap that draws k of k starts underestimates the variance between them by (k - 1)/k (Davison and Hinkley,
    3.8). A single start says nothing of others: 1. Recorded pairs under it: gate_quality/policy-replay-sm90.md.
    """
    return math.sqrt(starts / (starts - 1)) if starts > 1 else 1.0


def tail_share(confidence: float, count: int) -> float:
    """Share of the resamples beyond each end of an interval from `count` values.

    The expansion is the one for means (Hesterberg, The American Statistician 69, 2015, section 3; t by Abramowitz and
    Stegun 26.7.5): 8 % wider for 24 values. For medians it is simulated in tests/unit/gate: an interval of 24 pairs
    then holds the truth one to two times more in a hundred, alone and where four starts differ. Where starts differ
    more than pairs it is too narrow all the same. A single value has nothing to expand.
    """
    normal = NormalDist()
    if count < 2:
        return (1 - confidence) / 2
    z, freedom = normal.inv_cdf((1 + confidence) / 2), count - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return normal.cdf(-math.sqrt(count / freedom) * student)


def _resample(groups: list[list[float]], draw: random.Random) -> list[float]:
    if len(groups) == 1:
        return draw.choices(groups[0], k=len(groups[0]))
    drawn = draw.choices(groups, k=len(groups))
    return [ratio for group in drawn for ratio in draw.choices(group, k=len(group))]


def unpaired_interval(
    reference_ms: Sequence[float],
    candidate_ms: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = FINAL_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Ratio of the two medians with its bootstrap interval, for policies that time one side after the other.

    Of fewer than FEW_PAIRS samples a side the range of all ratios stands in for it, as with pairs.
    """
    draw = random.Random(seed)
    estimate = speedup(median(reference_ms), median(candidate_ms))
    if min(len(reference_ms), len(candidate_ms)) < FEW_PAIRS:
        slowest, fastest = speedup(min(reference_ms), max(candidate_ms)), speedup(max(reference_ms), min(candidate_ms))
        return Interval(estimate, slowest, fastest, confidence)
    ratios = sorted(
        speedup(_median_of_resample(reference_ms, draw), _median_of_resample(candidate_ms, draw))
        for _ in range(resamples)
    )  # fmt: skip
    tail = tail_share(confidence, min(len(reference_ms), len(candidate_ms)))
    low, high = min(quantile(ratios, tail), estimate), max(quantile(ratios, 1 - tail), estimate)
    return Interval(estimate, low, high, confidence)


def _median_of_resample(values: Sequence[float], draw: random.Random) -> float:
    return median(draw.choices(values, k=len(values)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation in sorted values; `share` between 0 and 1."""
    if not ordered:
        raise ValueError("the quantile of no values")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def quantile_of_others(values: Sequence[float], share: float) -> list[float]:
    """For every value, the quantile of all others; of a single value, itself."""
    if len(values) < 2:
        return list(values)
    ordered = sorted(values)
    positions = (bisect.bisect_left(ordered, value) for value in values)
    return [quantile(ordered[:position] + ordered[position + 1 :], share) for position in positions]


def next_look(pairs: int) -> int:
    """At how many pairs to look again: looking after every pair would spend the confidence on chance."""
    return max(FIRST_LOOK, math.ceil(pairs * LOOK_GROWTH))


def precise_enough(interval: Interval, precision: float) -> bool:
    """Whether sampling may stop. It looks at the width only, never at where the interval lies."""
    return interval.half_width <= precision


class Standing(StrEnum):
    """Where an interval lies against a required speedup."""

    FASTER = "faster"
    SAME = "same"
    MEETS = "meets"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


def standing(interval: Interval, *, at_least: float, margin: float) -> Standing:
    """Classify a speedup against `at_least`, with a relative margin below it.

    slower: the whole interval lies below at_least * (1 - margin). inconclusive: it reaches from below that line to
    above it. Otherwise the requirement is met: faster when the interval lies above 1; same when it contains 1, or the
    requirement is 1, and neither begins further below 1 than the margin nor spans more than a factor of WIDEST; else
    meets, which says no more than what was asked.
    """
    line = at_least * (1 - margin)
    if interval.high < line:
        return Standing.SLOWER
    if interval.low < line:
        return Standing.INCONCLUSIVE
    if interval.low > 1:
        return Standing.FASTER
    close = interval.low >= 1 - margin and interval.high <= WIDEST * interval.low
    return Standing.SAME if close and (interval.high >= 1 or at_least >= 1) else Standing.MEETS
