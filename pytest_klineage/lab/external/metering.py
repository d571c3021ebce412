"""Every call of a run as far as money goes: reserved before it is sent, charged after it, both in the trajectory.

Used from one event loop; budget and trajectory may be shared with other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from pytest_klineage.errors import StoreError
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.external.wire import Call, ReceivedReply
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn, estimated_tokens, well_formed
from pytest_klineage.lab.llm.faults import BudgetExhausted, Failure
from pytest_klineage.lab.llm.prices import SLACK_USD, Budget, Prices
from pytest_klineage.lab.llm.trajectory import Trajectory
from pytest_klineage.records import Answered, Asked, Failed, Noted, Stopped, StopReason, Usage

CHAT = "proxy"
"""Every call is a turn of its own: what clients send is taken as it comes, not as a conversation."""
REFUSED_TOPIC, REWRITTEN_TOPIC, CLIENT_TOPIC = "refused", "rewritten", "client"
SHOWN_NOTES = 20
"""Notes of one kind, so that a client that does not stop cannot fill the disk."""
MESSAGE_CHARACTERS = 500


class Meter:
    """Reserves and charges calls, and writes them down.

    A call that does not fit beside calls under way waits for them: they seldom cost what was reserved. One that cannot
    fit in any event ends the run: from then on every call is refused.
    """

    def __init__(self, trajectory: Trajectory, budget: Budget, prices: Prices, model: str) -> None:
        self.trajectory, self.budget, self.prices, self.model = trajectory, budget, prices, model
        self.exhausted_at: float | None = None
        """Monotonic time of the first refusal for want of money."""
        self.last_seen = time.monotonic()
        """When a call began or ended last."""
        self._charged = asyncio.Condition()
        self._open: dict[int, tuple[Call, float]] = {}
        self._notes: Counter[str] = Counter()
        self._known_changes: set[str] = set()

    @property
    def calls_under_way(self) -> int:
        """Calls that are reserved and not yet charged."""
        return len(self._open)

    async def begin(self, call: Call) -> int:
        """Reserve the most that a call can cost, and record it. Returns its number. Raises Refused."""
        price = self.prices.of(self.model)
        worst_usd = price.worst_case_usd(call.input_tokens, call.max_output_tokens, call.life)
        number = self.trajectory.next_call()
        async with self._charged:
            while not self._reserved(number, worst_usd):
                await self._charged.wait()
        try:
            self.trajectory.append(_asked(number, call, worst_usd))
        except StoreError:
            # What cannot be recorded is not sent.
            self.budget.charge(number, 0.0)
            raise
        self._open[number] = call, time.monotonic()
        self.last_seen = time.monotonic()
        self._note_changes(number, call)
        return number

    def answer(self, number: int, received: ReceivedReply) -> Usage:
        """Charge a call with what it used. Returns the usage with its cost."""
        call, started = self._open.pop(number)
        usage = self._priced(call, received)
        answered = Answered(
            call=number, text=well_formed(received.text), stop_reason=received.stop_reason or StopReason.OTHER,
            model=received.model or self.model, usage=usage, ids=received.ids, seconds=time.monotonic() - started,
        )  # fmt: skip
        self._close_call(number, answered, usage.cost_usd)
        return usage

    def fail(self, number: int, failure: Failure, message: str, *, billed: bool) -> None:
        """Charge a call that brought no whole reply: all that was reserved where it may have been billed."""
        self._open.pop(number)
        cost_usd = (self.budget.reservation_usd(number) or 0.0) if billed else 0.0
        text = well_formed(message)[:MESSAGE_CHARACTERS]
        self._close_call(number, Failed(call=number, reason=failure.value, message=text, cost_usd=cost_usd), cost_usd)

    async def release_waiting(self) -> None:
        """Let calls that wait for money try again; call it after a charge."""
        async with self._charged:
            self._charged.notify_all()

    def refuse(self, refused: Refused) -> None:
        """Write down that a request was refused."""
        self.note(REFUSED_TOPIC, f"{refused.refusal}: {refused}"[:MESSAGE_CHARACTERS], kind=refused.refusal.value)

    def note(self, topic: str, text: str, *, kind: str = "") -> None:
        """Write a note, unless there are many of its kind."""
        self._notes[kind or topic] += 1
        if self._notes[kind or topic] <= SHOWN_NOTES:
            self.trajectory.append(Noted(topic=topic, text=well_formed(text)))

    def close(self) -> None:
        """Write off calls that are under way: they may have been billed."""
        for number in list(self._open):
            self.fail(number, Failure.LOST, "the run ended during the call", billed=True)

    def _reserved(self, number: int, worst_usd: float) -> bool:
        """Whether the call is reserved now; False where it may be after other calls. Raises Refused."""
        if self.exhausted_at is None:
            try:
                self.budget.reserve(number, worst_usd)
                return True
            except BudgetExhausted as error:
                if worst_usd <= self.budget.limit_usd - self.budget.spent_usd + SLACK_USD and self._open:
                    return False
                self.exhausted_at = time.monotonic()
                self.trajectory.append(Stopped(reason=error.reason, message=str(error)))
        raise Refused(
            Refusal.BUDGET,
            f"the budget of ${self.budget.limit_usd:.2f} is used up: ${self.budget.spent_usd:.4f} are charged, and "
            f"this call could cost ${worst_usd:.4f}. Nothing more is sent; the best kernel so far counts",
        )

    def _close_call(self, number: int, event: Answered | Failed, cost_usd: float) -> None:
        self.budget.charge(number, cost_usd)
        self.last_seen = time.monotonic()
        self.trajectory.append(event)

    def _priced(self, call: Call, received: ReceivedReply) -> Usage:
        """The usage with its cost. Estimated where none was reported, or where the answering model has no price."""
        usage = received.usage
        if usage is None:
            usage = Usage(
                model=received.model or self.model, input_tokens=estimated_tokens(call.text),
                output_tokens=estimated_tokens(received.text), estimated=True,
            )  # fmt: skip
        return self.prices.priced(usage, self.model)

    def _note_changes(self, number: int, call: Call) -> None:
        """Each change once: clients send the same parameters with every call."""
        for change in call.rewritten:
            if change not in self._known_changes:
                self._known_changes.add(change)
                self.note(REWRITTEN_TOPIC, f"from call {number} on: {change}")


def _asked(number: int, call: Call, worst_usd: float) -> Asked:
    text = well_formed(call.text)
    conversation = Conversation(prefix=Prefix(), turns=(Turn(Role.USER, text),))
    return Asked(
        call=number, chat=CHAT, digest=conversation.digest, text=text, history=0,
        max_output_tokens=call.max_output_tokens, reserved_usd=worst_usd,
    )  # fmt: skip
