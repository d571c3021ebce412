"""Budget: dollars of one workload, reserved before every call and charged after it. It knows no tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Self

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import BudgetExhausted
from pytest_klineage.records import Event, charged_usd, unanswered

SLACK_USD = 1e-9
"""Rounding of sums of binary fractions; no call is as cheap as this."""


class Budget:
    """A limit that no call is sent beyond. Safe to share between threads.

    A call is reserved at the most it can cost, then charged with what it did cost. As long as no call costs more than
    was reserved for it, the sum of charges never exceeds the limit; otherwise it does by that difference, once.
    """

    def __init__(self, limit_usd: float, spent_usd: float = 0.0) -> None:
        if not 0 <= limit_usd < math.inf:
            raise UsageError(f"a budget is a finite number of dollars, 0 or more, got {limit_usd}")
        self.limit_usd = limit_usd
        self._spent_usd = spent_usd
        self._reserved: dict[int, float] = {}
        self._lock = threading.Lock()

    @classmethod
    def restored(cls, limit_usd: float, events: Iterable[Event]) -> Self:
        """A budget as a trajectory left it. Calls that were cut off stay reserved until they are charged."""
        events = tuple(events)
        budget = cls(limit_usd, charged_usd(events))
        budget._reserved = {call: asked.reserved_usd for call, asked in unanswered(events).items()}
        return budget

    @property
    def spent_usd(self) -> float:
        """Dollars charged."""
        with self._lock:
            return self._spent_usd

    @property
    def reserved_usd(self) -> float:
        """Dollars that calls under way can cost at most."""
        with self._lock:
            return math.fsum(self._reserved.values())

    @property
    def remaining_usd(self) -> float:
        """Dollars that are neither charged nor reserved; never negative."""
        with self._lock:
            return self._remaining_usd()

    def reserve(self, call: int, worst_case_usd: float) -> None:
        """Set aside what a call can cost at most. Raises BudgetExhausted, and then the call must not be sent."""
        if not 0 <= worst_case_usd < math.inf:
            raise UsageError(f"the cost of a call is a finite number of dollars, 0 or more, got {worst_case_usd}")
        with self._lock:
            if call in self._reserved:
                raise UsageError(f"call {call} is reserved already")
            if worst_case_usd > self._remaining_usd() + SLACK_USD:
                raise BudgetExhausted(worst_case_usd, self._remaining_usd(), self.limit_usd)
            self._reserved[call] = worst_case_usd

    def charge(self, call: int, cost_usd: float) -> None:
        """Replace a call's reservation by what it cost; nothing, when it was never billed."""
        if not 0 <= cost_usd < math.inf:
            raise UsageError(f"the cost of a call is a finite number of dollars, 0 or more, got {cost_usd}")
        with self._lock:
            if self._reserved.pop(call, None) is None:
                raise UsageError(f"call {call} was not reserved, or has been charged already")
            self._spent_usd += cost_usd

    def reservation_usd(self, call: int) -> float | None:
        """What is set aside for a call; None when it is not under way."""
        with self._lock:
            return self._reserved.get(call)

    def _remaining_usd(self) -> float:
        return max(0.0, self.limit_usd - self._spent_usd - math.fsum(self._reserved.values()))
