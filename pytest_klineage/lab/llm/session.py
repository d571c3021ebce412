"""Session: a backend, a budget and a trajectory as one; Chat: a conversation that goes through all three."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Self

import msgspec

from pytest_klineage.errors import BadRecord, KlineageError, UsageError
from pytest_klineage.lab.llm.backend import Backend, Reply
from pytest_klineage.lab.llm.conversation import (
    PROMPT_SET,
    Conversation,
    Prefix,
    Role,
    Turn,
    continued,
    difference,
    well_formed,
)
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.prices import Budget
from pytest_klineage.lab.llm.replay import ReplayBackend, recorded_failure, replied
from pytest_klineage.lab.llm.trajectory import RecordedCall, Trajectory
from pytest_klineage.records import Answered, Asked, Begun, Event, Failed, Judged, Noted, Stopped, Usage, begun_of

MAX_OUTPUT_TOKENS = 16384


class Session:
    """One optimization as far as models are concerned. Make it with `begin` or `resume`.

    After `resume` the policy runs again from its start: recorded prompts get their recorded replies at once and free of
    charge, and the first prompt that was not recorded is sent. Nothing that was paid for is asked twice, except a call
    that was cut off and cannot be taken up again; that one stays charged at the most it can have cost.
    """

    def __init__(self, backend: Backend, budget: Budget, trajectory: Trajectory) -> None:
        self.backend, self.budget, self.trajectory = backend, budget, trajectory

    @classmethod
    def begin(
        cls, path: Path, backend: Backend, *, limit_usd: float, name: str, settings: Mapping[str, str] | None = None
    ) -> Self:
        """Begin a trajectory in a new file. Raises UsageError when the file exists, or the backend is another run's."""
        budget = Budget(limit_usd)
        backend.begin()
        begun = Begun(
            name=name,
            backend=backend.name,
            model=backend.model,
            budget_usd=limit_usd,
            settings=dict(settings or {}),
            prompt_set=backend.prompt_set if isinstance(backend, ReplayBackend) else PROMPT_SET,
        )
        return cls(backend, budget, Trajectory.create(path, begun))

    @classmethod
    def resume(cls, path: Path, backend: Backend, *, limit_usd: float | None = None, note: bool = True) -> Self:
        """Go on with a trajectory, with its own budget or another. Raises UsageError when the model is another one.

        `note` writes down that it was resumed. A run that only waited is the same run, and leaves that out.
        """
        trajectory = Trajectory.resume(path)
        try:
            begun = next(iter(trajectory.events), None)
            if not isinstance(begun, Begun):
                raise BadRecord(f"{path} does not begin as a trajectory does; begin a new one")
            if begun.model != backend.model:
                raise UsageError(
                    f"{path} was begun with the model {begun.model!r}, and cannot go on with {backend.model!r}: choose "
                    "the same model, or begin a new trajectory"
                )
            budget = Budget.restored(begun.budget_usd if limit_usd is None else limit_usd, trajectory.events)
            if note:
                trajectory.append(Noted(topic="resumed", text=f"budget {budget.limit_usd:g} USD"))
        except BaseException:
            trajectory.close()
            raise
        return cls(backend, budget, trajectory)

    def chat(
        self,
        name: str = "main",
        *,
        system: str = "",
        context: tuple[str, ...] = (),
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
    ) -> Chat:
        """Open a chat. Every chat of a session has a name of its own, the same one after a resume."""
        prefix = Prefix(system=well_formed(system), context=tuple(well_formed(block) for block in context))
        return Chat(self, name, prefix, max_output_tokens)

    @property
    def usage(self) -> Usage:
        """Tokens and dollars of all answered calls."""
        used = [event.usage for event in self.trajectory.events if isinstance(event, Answered)]
        return reduce(add, used) if used else Usage(model=self.backend.model)

    @property
    def prompt_set(self) -> int:
        """The number of the prompt set that the trajectory was begun with."""
        begun = begun_of(self.trajectory.events)
        return begun.prompt_set if begun is not None else PROMPT_SET

    def record(self, event: Judged | Noted | Stopped) -> None:
        """Write what is not a call: a verdict, a note, an end."""
        self.trajectory.append(event)

    def recall_verdict(self, source_digest: str) -> Judged | None:
        """After a resume: the recorded verdict on a source, in order; None when it must be judged."""
        return self.trajectory.recall_verdict(source_digest)

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything so far."""
        return self.trajectory.events

    def close(self) -> None:
        """Release the trajectory's file."""
        self.trajectory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Chat:
    """A conversation with a model: a prefix that never changes, and turns that grow until `forget`."""

    def __init__(self, session: Session, name: str, prefix: Prefix, max_output_tokens: int) -> None:
        self.name, self.prefix, self.max_output_tokens = name, prefix, max_output_tokens
        self._session = session
        self._turns: tuple[Turn, ...] = ()
        self._lock = threading.Lock()
        session.trajectory.open_chat(name, prefix)

    def forget(self) -> None:
        """Drop all turns; the prefix stays."""
        with self._lock:
            self._turns = ()

    def ask(self, text: str, *, max_output_tokens: int | None = None) -> Reply:
        """Say something and wait for the reply.

        Raises BudgetExhausted when the call could cost more than is left, BackendFailed when it brought no reply, and
        TrajectoryMismatch when a resumed run asks something else than it did. A refusal, and what was written before
        a limit cut it off, are replies; see `stop_reason`. An empty reply leaves no trace in the turns.
        """
        with self._lock:
            text = self._worded(well_formed(text))
            conversation = Conversation(prefix=self.prefix, turns=(*self._turns, Turn(Role.USER, text)))
            limit = self.max_output_tokens if max_output_tokens is None else max_output_tokens
            if limit < 1:
                raise UsageError(f"max_output_tokens must be 1 or more, got {limit}")
            reply = self._recalled(conversation)
            if reply is None:
                call = self._reserved(conversation, text, limit)
                reply = self._sent(conversation, limit, call)
            elif isinstance(reply, Asked):
                reply = self._sent(conversation, reply.max_output_tokens, reply.call)
            self._turns = continued(self._turns, text, reply.text)
            return reply

    def _worded(self, text: str) -> str:
        """The text; in place of it the recorded prompt, where the recording is of another prompt set."""
        if self._session.prompt_set == PROMPT_SET:
            return text
        trajectory, backend = self._session.trajectory, self._session.backend
        recorded = trajectory.upcoming(self.name)
        if recorded is None and isinstance(backend, ReplayBackend):
            recorded = backend.upcoming(self.name)
        same_turn = recorded is not None and recorded.asked.history == len(self._turns)
        return recorded.asked.text if recorded is not None and same_turn else text

    def _recalled(self, conversation: Conversation) -> Reply | Asked | None:
        """The recorded reply; or the recorded call to take up again; or None after the last."""
        trajectory = self._session.trajectory
        while (recorded := trajectory.upcoming(self.name)) is not None:
            if recorded.asked.digest != conversation.digest:
                raise TrajectoryMismatch(
                    f"call {recorded.asked.call} of {trajectory.path} was another prompt than the resumed run asks: "
                    f"{difference(recorded.conversation, conversation)}\n"
                    "Resume with the versions, settings and seed of before, or begin a new trajectory."
                )
            trajectory.recall(self.name)
            if isinstance(recorded.outcome, Answered):
                return replied(recorded.outcome)
            if recorded.outcome is None and self._session.backend.resumable:
                return recorded.asked
            if recorded.outcome is None:
                self._write_off(recorded.asked)
            elif self._went_on(recorded):
                raise recorded_failure(recorded)
        return None

    def _went_on(self, recorded: RecordedCall) -> bool:
        """Whether the policy saw this failure and asked something else next, as it must be made to do again."""
        following = self._session.trajectory.upcoming(self.name)
        return following is not None and following.asked.digest != recorded.asked.digest

    def _write_off(self, asked: Asked) -> None:
        """Charge a call that was cut off with all that it can have cost."""
        message = "the program ended during the call"
        self._failed(asked.call, Failure.LOST, message, billed=True)

    def _reserved(self, conversation: Conversation, text: str, limit: int) -> int:
        """Reserve the cost of a new call, and record that it is about to be sent. Returns its number."""
        session = self._session
        call = session.trajectory.next_call()
        try:
            try:
                worst_case_usd = session.backend.worst_case_usd(conversation, limit)
                session.budget.reserve(call, worst_case_usd)
            except BudgetExhausted:
                worst_case_usd = session.backend.counted_worst_case_usd(conversation, limit)
                session.budget.reserve(call, worst_case_usd)
        except BudgetExhausted as error:
            session.trajectory.append(Stopped(reason=error.reason, message=str(error)))
            raise
        asked = Asked(
            call=call,
            chat=self.name,
            digest=conversation.digest,
            text=text,
            history=len(self._turns),
            max_output_tokens=limit,
            reserved_usd=worst_case_usd,
        )
        try:
            session.trajectory.append(asked)
        except KlineageError:
            session.budget.charge(call, 0.0)
            raise
        return call

    def _sent(self, conversation: Conversation, limit: int, call: int) -> Reply:
        """Send a call that is reserved and recorded; record and charge what comes of it."""
        session = self._session
        started = time.monotonic()
        try:
            reply = session.backend.reply(conversation, max_output_tokens=limit, call=call)
        except BackendFailed as error:
            self._failed(call, error.failure, error.detail, billed=error.billed)
            raise
        reply = msgspec.structs.replace(reply, text=well_formed(reply.text))
        answered = Answered(
            call=call,
            text=reply.text,
            stop_reason=reply.stop_reason,
            model=reply.model,
            usage=reply.usage,
            ids=reply.ids,
            seconds=time.monotonic() - started,
        )
        session.trajectory.append(answered)
        session.budget.charge(call, reply.usage.cost_usd)
        return reply

    def _failed(self, call: int, failure: Failure, message: str, *, billed: bool) -> None:
        session = self._session
        cost_usd = (session.budget.reservation_usd(call) or 0.0) if billed else 0.0
        session.trajectory.append(
            Failed(call=call, reason=failure.value, message=well_formed(message), cost_usd=cost_usd)
        )
        session.budget.charge(call, cost_usd)
