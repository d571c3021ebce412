"""Intervals of several runs of one kernel. Each is of its own run; runs differ by more than chance within them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, variance

from pytest_klineage.records import Interval


def half_width(interval: Interval) -> float:
    """As a logarithm."""
    return math.log(interval.high / interval.low) / 2


def between_runs(intervals: Sequence[Interval]) -> float:
    """Standard deviation between two runs or more, as a logarithm, beyond what their intervals account for; 0 where
    that is all."""
    inside = sum((half_width(one) / _z(one)) ** 2 for one in intervals) / len(intervals)
    return math.sqrt(max(variance([math.log(one.estimate) for one in intervals]) - inside, 0.0))


def widened(interval: Interval, between_sd: float) -> Interval:
    """The interval of the speedup over all runs, from one of them: the deviation between runs added to its own."""
    half = math.hypot(half_width(interval), _z(interval) * between_sd)
    estimate = interval.estimate
    return Interval(estimate, estimate * math.exp(-half), estimate * math.exp(half), interval.confidence)


def _z(interval: Interval) -> float:
    return NormalDist().inv_cdf((1 + interval.confidence) / 2)
