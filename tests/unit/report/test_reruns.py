"""Intervals over runs, on runs whose deviations are known."""

from __future__ import annotations

import math
import random

import pytest

from pytest_klineage.records import Interval
from pytest_klineage.report.reruns import between_runs, half_width, widened

Z = 1.959964


def run(estimate: float, within: float) -> Interval:
    """A 95 % interval about an estimate whose deviation within a run is known."""
    return Interval(estimate, estimate * math.exp(-Z * within), estimate * math.exp(Z * within), 0.95)


def runs(count: int, *, between: float, within: float) -> list[Interval]:
    drawn = random.Random(7)
    return [run(1.5 * math.exp(drawn.gauss(0, math.hypot(between, within))), within) for _ in range(count)]


@pytest.mark.parametrize("between", [0.005, 0.02, 0.1])
def test_what_runs_differ_by_is_found(between: float) -> None:
    assert between_runs(runs(4000, between=between, within=0.01)) == pytest.approx(between, rel=0.12)


def test_runs_that_their_intervals_explain_do_not_differ() -> None:
    assert between_runs([run(estimate, 0.02) for estimate in (1.0, 1.01, 0.99)]) == 0.0


def test_a_wider_interval_covers_the_truth() -> None:
    """Of a run's own 95 % intervals far fewer cover it."""
    made = runs(4000, between=0.03, within=0.01)
    covered = [widened(one, 0.03).low <= 1.5 <= widened(one, 0.03).high for one in made]
    narrow = [one.low <= 1.5 <= one.high for one in made]
    assert sum(covered) / len(covered) == pytest.approx(0.95, abs=0.015)
    assert sum(narrow) / len(narrow) < 0.6


def test_without_a_deviation_an_interval_stays() -> None:
    wide = widened(run(2.0, 0.01), 0.0)
    assert (wide.estimate, wide.confidence) == (2.0, 0.95)
    assert half_width(wide) == pytest.approx(Z * 0.01, rel=1e-4)
    assert wide.low < wide.estimate < wide.high
