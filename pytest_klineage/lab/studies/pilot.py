"""The rule of a pilot: which targets leave room for an effect. No target is judged here."""

from __future__ import annotations

from enum import StrEnum


class Decision(StrEnum):
    """What becomes of a target."""

    WAIT = "wait"
    """The first replies are not all there."""
    KEEP = "keep"
    MORE = "more replies"
    """None or all of the first replies succeeded, which chance does to a good target as well."""
    EASE = "ease"
    """Hardly any reply succeeds: begin with a later state of its lineage."""
    HARDEN = "harden"
    """Hardly any reply fails: ask for more, or take another target."""


def decide(succeeded: int, replies: int, *, first: int, most: int, rates: tuple[float, float]) -> Decision:
    """What the replies so far say of a target: kept from the first to the second of `rates`, both included.

    After `first` replies a target that is not kept gets further ones, up to `most`; then it is eased or hardened.
    Raises ValueError for more successes than replies, or no first reply.
    """
    if not 0 <= succeeded <= replies or first < 1:
        raise ValueError(f"{succeeded} of {replies} replies, of which {first} come first, cannot be")
    if replies < first:
        return Decision.WAIT
    rate = succeeded / replies
    if rates[0] <= rate <= rates[1]:
        return Decision.KEEP
    if replies < most:
        return Decision.MORE
    return Decision.EASE if rate < rates[0] else Decision.HARDEN
