"""Pure statistics of paired timings: bootstrap interval, stopping rule, verdict class."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from enum import StrEnum
from statistics import median

from pytest_klineage.records import Interval, speedup
from pytest_klineage.records.bootstrap import (
    FEW_PAIRS,
    FINAL_RESAMPLES,
    groups_of,
    log_ratios,
    quantile,
    resample,
    start_factor,
    tail_share,
)
from pytest_klineage.records.verdict import WIDEST

FIRST_LOOK = 10
"""Pairs before the stopping rule looks for the first time."""
LOOK_GROWTH = 1.25
"""The number of pairs grows by this factor between two looks."""
LOOK_RESAMPLES = 300
"""Bootstrap resamples while sampling goes on."""


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
    groups = groups_of(ratios, starts)
    medians = sorted(median(resample(groups, draw)) for _ in range(resamples))
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
