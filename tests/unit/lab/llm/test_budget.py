"""A budget is never exceeded by more than calls cost beyond their reservation, from any thread and at any end."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import BudgetExhausted
from pytest_klineage.lab.llm.prices import Budget
from pytest_klineage.records import Answered, Asked, Event, Failed, StopReason, Usage

COSTS = st.floats(0, 3, allow_nan=False)


def asked(call: int, reserved_usd: float) -> Asked:
    return Asked(
        call=call, chat="main", digest="", text="?", history=0, max_output_tokens=1, reserved_usd=reserved_usd
    )  # fmt: skip


def answered(call: int, cost_usd: float) -> Answered:
    usage = Usage(model="m", cost_usd=cost_usd)
    return Answered(call=call, text="!", stop_reason=StopReason.END, model="m", usage=usage)


class Spending(RuleBasedStateMachine):
    """Calls are reserved, end at any cost up to their worst case or beyond it, or are cut off with all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.limit_usd = 10.0
        self.budget = Budget(self.limit_usd)
        self.events: list[Event] = []
        self.pending: dict[int, float] = {}
        self.billed_usd = 0.0
        self.beyond_usd = 0.0
        self.last = 0

    @rule(worst_usd=COSTS)
    def begin(self, worst_usd: float) -> None:
        self.last += 1
        fits = self.billed_usd + sum(self.pending.values()) + worst_usd
        try:
            self.budget.reserve(self.last, worst_usd)
        except BudgetExhausted:
            assert fits > self.limit_usd - 1e-6
            return
        assert fits <= self.limit_usd + 1e-6 or worst_usd <= 1e-9, "only what is free fits into nothing"
        self.pending[self.last] = worst_usd
        self.events.append(asked(self.last, worst_usd))

    @precondition(lambda self: self.pending)
    @rule(share=st.floats(0, 1), data=st.data())
    def answer(self, share: float, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.pending))), share)

    @precondition(lambda self: self.pending)
    @rule(share=st.floats(1, 2), data=st.data())
    def answer_beyond_the_worst_case(self, share: float, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.pending))), share)

    def _end(self, call: int, share: float) -> None:
        worst_usd = self.pending.pop(call)
        cost_usd = worst_usd * share
        self.billed_usd += cost_usd
        self.beyond_usd += max(0.0, cost_usd - worst_usd)
        self.events.append(answered(call, cost_usd))
        self.budget.charge(call, cost_usd)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def fail_unbilled(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[call]
        self.events.append(Failed(call=call, reason="overloaded", message="", cost_usd=0.0))
        self.budget.charge(call, 0.0)

    @rule()
    def kill_and_restore(self) -> None:
        self.budget = Budget.restored(self.limit_usd, self.events)

    @invariant()
    def what_was_billed_is_within_the_limit(self) -> None:
        assert self.billed_usd <= self.limit_usd + self.beyond_usd + 1e-6
        assert self.budget.spent_usd == pytest.approx(self.billed_usd)
        assert self.budget.reserved_usd == pytest.approx(sum(self.pending.values()))

    @invariant()
    def nothing_is_left_that_is_not_there(self) -> None:
        left = self.limit_usd - self.billed_usd - sum(self.pending.values())
        assert self.budget.remaining_usd == pytest.approx(max(0.0, left), abs=1e-6)


TestSpending = Spending.TestCase
TestSpending.settings = settings(deadline=None, max_examples=60)


def test_a_call_that_does_not_fit_is_named_with_the_next_step() -> None:
    budget = Budget(1.0)
    budget.reserve(1, 0.75)
    with pytest.raises(BudgetExhausted, match="resume the trajectory with a larger budget") as caught:
        budget.reserve(2, 0.5)
    assert caught.value.reason == "budget_exhausted"
    assert "up to $0.5000, and $0.2500 of $1.00 are left" in str(caught.value)
    budget.charge(1, 0.25)
    budget.reserve(2, 0.5)


def test_the_last_cent_can_be_spent() -> None:
    budget = Budget(0.3)
    for call in range(3):
        budget.reserve(call, 0.1)
        budget.charge(call, 0.1)
    with pytest.raises(BudgetExhausted):
        budget.reserve(3, 0.001)
    budget.reserve(4, 0.0)


@pytest.mark.parametrize("wrong", [-0.01, math.nan, math.inf])
def test_sums_that_are_none_are_refused(wrong: float) -> None:
    budget = Budget(1.0)
    with pytest.raises(UsageError):
        Budget(wrong)
    with pytest.raises(UsageError):
        budget.reserve(1, wrong)
    budget.reserve(1, 0.5)
    with pytest.raises(UsageError):
        budget.charge(1, wrong)
    assert budget.reservation_usd(1) == 0.5


def test_a_call_is_reserved_once_and_charged_once() -> None:
    budget = Budget(1.0)
    with pytest.raises(UsageError):
        budget.charge(1, 0.1)
    budget.reserve(1, 0.1)
    with pytest.raises(UsageError):
        budget.reserve(1, 0.1)
    budget.charge(1, 0.1)
    with pytest.raises(UsageError):
        budget.charge(1, 0.1)
    assert budget.spent_usd == 0.1


@settings(deadline=None)
@given(st.lists(st.tuples(COSTS, st.floats(0, 1)), max_size=20), st.integers(0, 60))
def test_a_restored_budget_knows_at_least_what_was_billed(calls: list[tuple[float, float]], cut: int) -> None:
    events: list[Event] = []
    billed = [0.0]
    for call, (worst_usd, share) in enumerate(calls):
        events += [asked(call, worst_usd), answered(call, worst_usd * share)]
        # The provider may bill from the moment on which the call is sent, which is after the first of its two events.
        billed += [billed[-1] + worst_usd * share] * 2
    budget = Budget.restored(1000.0, events[:cut])
    assert budget.spent_usd + budget.reserved_usd >= billed[min(cut, len(events))] - 1e-9


def test_threads_share_a_budget() -> None:
    budget = Budget(10.0)
    sent = []

    def spend(first: int) -> None:
        for call in range(first, first + 50):
            try:
                budget.reserve(call, 0.11)
            except BudgetExhausted:
                return
            sent.append(call)
            budget.charge(call, 0.1)

    threads = [threading.Thread(target=spend, args=(1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.spent_usd == pytest.approx(0.1 * len(sent))
    assert 95 <= len(sent) <= 100
    assert budget.reserved_usd == 0
