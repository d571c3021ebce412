"""From which speed on a pilot's targets count shots as successes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.lab.studies.pilot import Decision, threshold


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ([], Decision.WAIT), ([1.2, 1.3, 1.4], Decision.WAIT), ([1.2, 1.309, 1.1, 1.4], 1.30),
        ([1.15] * 4, 1.15), ([0.29] * 4, 0.29),
        ([None, 1.2, None, 0.639], 0.63), ([None, 1.2, None, None], Decision.EASE), ([None] * 4, Decision.EASE),
    ],
)  # fmt: skip
def test_the_second_fastest_of_four_sets_it(speeds: list[float | None], found: float | Decision) -> None:
    assert threshold(speeds, replies=4, rank=2) == found


@given(st.lists(st.floats(0.01, 10), min_size=4, max_size=4), st.integers(1, 4))
def test_as_many_reach_it_as_its_rank_says(speeds: list[float], rank: int) -> None:
    least = threshold(speeds, replies=4, rank=rank)
    assert isinstance(least, float)
    assert sum(speed >= least for speed in speeds) >= rank
    assert sum(speed >= least + 0.01 for speed in speeds) < rank or speeds.count(sorted(speeds)[-rank]) > 1


@pytest.mark.parametrize(("there", "replies", "rank"), [(5, 4, 2), (0, 4, 0), (0, 4, 5)])
def test_what_cannot_be_is_refused(there: int, replies: int, rank: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        threshold([1.0] * there, replies=replies, rank=rank)
