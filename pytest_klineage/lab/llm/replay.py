"""Replies from a recorded trajectory: the same prompts bring the same replies at the same cost; others are refused."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import Backend, Reply
from pytest_klineage.lab.llm.conversation import PROMPT_SET, Conversation, difference
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.trajectory import RecordedCall, read_trajectory, recorded_calls
from pytest_klineage.records import Answered, Stopped, begun_of


class ReplayBackend(Backend):
    """A trajectory as a model. Equal prompts are answered in the order in which they were recorded.

    Usage and cost are the recorded ones, so that a replay goes through a budget as the original did. A call that failed
    fails again; one that was cut off was never answered and is left out. After the last reply of a run that its budget
    has ended, the budget is exhausted again.
    """

    name = "replay"

    def __init__(self, path: Path) -> None:
        lines, _ = read_trajectory(path)
        events = tuple(line.event for line in lines)
        self.path = path
        begun = begun_of(events)
        self.model = begun.model if begun is not None else ""
        self.prompt_set = begun.prompt_set if begun is not None else PROMPT_SET
        self._limit_usd = begun.budget_usd if begun is not None else 0.0
        ends = [event.reason for event in events if isinstance(event, Stopped)]
        self._spent = ends[-1:] == [BudgetExhausted.REASON]
        self._unused = deque(call for call in recorded_calls(events) if _usable(call))
        self._lock = threading.Lock()
        if not self._unused:
            raise UsageError(f"the trajectory {path} holds no reply to replay")

    def upcoming(self, chat: str) -> RecordedCall | None:
        """The chat's next call that has not been replayed; None after the last."""
        with self._lock:
            return next((call for call in self._unused if call.asked.chat == chat), None)

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """What the call cost as recorded. Raises TrajectoryMismatch, or BudgetExhausted where that came next."""
        with self._lock:
            if self._spent and not self._unused:
                raise BudgetExhausted(self._limit_usd, 0.0, self._limit_usd)
            return _cost_usd(self._find(conversation))

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """The recorded reply. Raises TrajectoryMismatch for a prompt that was not recorded, or not so often."""
        with self._lock:
            recorded = self._find(conversation)
            self._unused.remove(recorded)
        outcome = recorded.outcome
        if isinstance(outcome, Answered):
            return replied(outcome)
        raise recorded_failure(recorded)

    def _find(self, conversation: Conversation) -> RecordedCall:
        digest = conversation.digest
        for recorded in self._unused:
            if recorded.asked.digest == digest:
                return recorded
        if not self._unused:
            raise TrajectoryMismatch(f"every reply of {self.path} has been given, and the run asks for more")
        nearest = self._unused[0]
        raise TrajectoryMismatch(
            f"{self.path} has no reply to this prompt. Compared with its next one (call {nearest.asked.call}, chat "
            f"{nearest.asked.chat!r}), {difference(nearest.conversation, conversation)}\n"
            "Replay with the versions and settings of the recording, or ask a model."
        )


def replied(outcome: Answered) -> Reply:
    """A recorded answer as the reply it was."""
    return Reply(
        text=outcome.text,
        usage=outcome.usage,
        stop_reason=outcome.stop_reason,
        model=outcome.model,
        ids=outcome.ids,
    )


def recorded_failure(recorded: RecordedCall) -> BackendFailed:
    """A recorded failure as the exception it was. The call must not have been answered."""
    outcome = recorded.outcome
    reason = outcome.reason if outcome is not None and not isinstance(outcome, Answered) else Failure.LOST
    failure = Failure(reason) if reason in list(Failure) else Failure.SERVER
    return BackendFailed(
        failure, f"call {recorded.asked.call} failed when it was recorded", billed=_cost_usd(recorded) > 0
    )


def _usable(call: RecordedCall) -> bool:
    """Whether the run that was recorded saw an outcome of this call."""
    return isinstance(call.outcome, Answered) or (call.outcome is not None and call.outcome.reason != Failure.LOST)


def _cost_usd(call: RecordedCall) -> float:
    outcome = call.outcome
    if isinstance(outcome, Answered):
        return outcome.usage.cost_usd
    return outcome.cost_usd if outcome is not None else 0.0
