"""What intervals are made of, in the gate and where records are compared: resamples, quantiles, how few of them widen.

Pure functions. Put together to an interval they are in gate/timing/statistics.py and report/compare.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from pytest_klineage.records.verdict import speedup

FINAL_RESAMPLES = 2000
FEW_PAIRS = 12
"""Below this many pairs a bootstrap is too narrow; the range of all pairs stands in for it."""


def log_ratios(reference_ms: Sequence[float], candidate_ms: Sequence[float]) -> list[float]:
    """Logarithm of every pair's speedup. Raises ValueError unless both have the same positive length and values."""
    if len(reference_ms) != len(candidate_ms) or not reference_ms:
        raise ValueError("pairs need equally many samples of both sides, at least one")
    return [math.log(speedup(r, c)) for r, c in zip(reference_ms, candidate_ms, strict=True)]


def groups_of(values: Sequence[float], starts: Sequence[int]) -> list[list[float]]:
    """The values of each start, for which there are any; `starts` are the positions at which starts begin."""
    bounds = zip(starts, [*starts[1:], len(values)], strict=True)
    return [list(values[start:end]) for start, end in bounds if start < end]


def resample(groups: list[list[float]], draw: random.Random) -> list[float]:
    """As many groups, drawn with replacement, and of each as many values."""
    if len(groups) == 1:
        return draw.choices(groups[0], k=len(groups[0]))
    drawn = draw.choices(groups, k=len(groups))
    return [value for group in drawn for value in draw.choices(group, k=len(group))]


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


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation in sorted values; `share` between 0 and 1."""
    if not ordered:
        raise ValueError("the quantile of no values")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
