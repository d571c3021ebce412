"""How a judgement comes to its end early: an exception that carries the reasons. Raised and caught inside the gate."""

from __future__ import annotations

from pytest_klineage.records import Reason


class Rejected(Exception):
    """A judgement has come to its end early; the reasons say why."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__(reasons[0].message)
        self.reasons = reasons
