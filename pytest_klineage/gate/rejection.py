"""How a judgement comes to its end early: an exception that carries the reasons. Raised and caught inside the gate."""

from __future__ import annotations

from pytest_klineage.records import Code, Reason

SEVERITY = {
    Code.LATE_WORK: 5, Code.REPLAY: 5, Code.FAKE_TENSOR: 5, Code.INPUT_MUTATED: 4, Code.ALIASED_OUTPUT: 4,
    Code.OUT_OF_BOUNDS: 3, Code.UNWRITTEN: 2, Code.NON_FINITE: 1,
}  # fmt: skip
"""Which finding explains a failure best when several checks disagree; the others follow as further reasons."""


class Rejected(Exception):
    """A judgement has come to its end early; the reasons say why."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__(reasons[0].message)
        self.reasons = reasons
