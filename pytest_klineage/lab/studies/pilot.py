"""The rule of a pilot: from which speed on a target's shots are successes."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Decimal
from enum import StrEnum


class Decision(StrEnum):
    """What becomes of a target without a threshold."""

    WAIT = "wait"
    """The replies are not all there."""
    EASE = "ease"
    """Too few are right: begin with a later state of its lineage."""


def threshold(speeds: Sequence[float | None], *, replies: int, rank: int) -> float | Decision:
    """The speed of the `rank`-th fastest of a pilot's replies, as a share of the reference's, down to two digits.

    `speeds` has None for a reply that is not right. With the second of four, 40 % of further shots of the same kind are
    expected to reach it (rank over replies + 1), which leaves room above and below. Raises ValueError for a rank that
    no reply can have, or for more speeds than replies.
    """
    if not 1 <= rank <= replies or len(speeds) > replies:
        raise ValueError(f"the {rank}. of {replies} replies, {len(speeds)} of them there, cannot be")
    if len(speeds) < replies:
        return Decision.WAIT
    right = sorted((speed for speed in speeds if speed is not None), reverse=True)
    if len(right) < rank:
        return Decision.EASE
    return float(Decimal(repr(right[rank - 1])).quantize(Decimal("0.01"), ROUND_FLOOR))
