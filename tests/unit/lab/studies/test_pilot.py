"""Which targets a pilot keeps."""

from __future__ import annotations

import pytest

from pytest_klineage.lab.studies.pilot import Decision, decide


def of(succeeded: int, replies: int) -> Decision:
    return decide(succeeded, replies, first=2, most=4, rates=(0.1, 0.7))


@pytest.mark.parametrize(
    ("succeeded", "replies", "decision"),
    [
        (0, 0, Decision.WAIT), (1, 1, Decision.WAIT), (1, 2, Decision.KEEP), (0, 2, Decision.MORE),
        (2, 2, Decision.MORE), (0, 3, Decision.MORE), (2, 3, Decision.KEEP), (1, 4, Decision.KEEP),
        (2, 4, Decision.KEEP), (3, 4, Decision.HARDEN), (4, 4, Decision.HARDEN), (0, 4, Decision.EASE),
    ],
)  # fmt: skip
def test_a_target_is_kept_where_an_effect_can_be_seen(succeeded: int, replies: int, decision: Decision) -> None:
    assert of(succeeded, replies) is decision


def test_bounds_are_kept() -> None:
    assert decide(1, 10, first=2, most=4, rates=(0.1, 0.7)) is Decision.KEEP
    assert decide(7, 10, first=2, most=4, rates=(0.1, 0.7)) is Decision.KEEP


@pytest.mark.parametrize(("succeeded", "replies", "first"), [(3, 2, 2), (-1, 2, 2), (0, 0, 0)])
def test_what_cannot_be_is_refused(succeeded: int, replies: int, first: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        decide(succeeded, replies, first=first, most=4, rates=(0.1, 0.7))
