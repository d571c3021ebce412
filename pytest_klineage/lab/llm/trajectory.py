"""The file of a trajectory: written line by line around every call, read back after a crash. Its words are records."""

from __future__ import annotations

import datetime
import fcntl
import os
import threading
from collections import deque
from pathlib import Path
from typing import Self

import msgspec

from pytest_klineage.errors import StoreError, UsageError
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn, continued
from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    Event,
    Failed,
    Judged,
    Opened,
    TrajectoryLine,
    parse_trajectory,
    to_json,
)
from pytest_klineage.results.packed import read_packed

CallOutcome = Answered | Failed


class RecordedCall(msgspec.Struct, frozen=True):
    """A call as it was recorded: what was asked, all that the model saw, and what came of it."""

    asked: Asked
    conversation: Conversation
    outcome: CallOutcome | None
    """None when the call was cut off."""


class Trajectory:
    """The writer of one optimization's events. Holds the file locked until `close`; safe to share between threads.

    A resumed trajectory remembers what it has recorded, so that a policy which runs again from its start gets recorded
    replies and verdicts back, free of charge, until it comes to something new.
    """

    def __init__(self, path: Path, descriptor: int, events: tuple[Event, ...], warnings: tuple[str, ...] = ()) -> None:
        self.path, self.warnings = path, warnings
        self._descriptor, self._events = descriptor, list(events)
        self._lock = threading.RLock()
        self._calls: dict[str, deque[RecordedCall]] = {}
        self._verdicts: dict[str, deque[Judged]] = {}
        for call in recorded_calls(events):
            self._calls.setdefault(call.asked.chat, deque()).append(call)
        for event in events:
            if isinstance(event, Judged):
                self._verdicts.setdefault(event.source_digest, deque()).append(event)
        self._opened = {event.chat: event for event in events if isinstance(event, Opened)}
        self._live: set[str] = set()
        self._last_call = max((event.call for event in events if isinstance(event, Asked)), default=0)

    @classmethod
    def create(cls, path: Path, begun: Begun) -> Self:
        """Begin a new file. Raises UsageError when it exists: resume it instead, or choose another name."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _open(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise UsageError(f"the trajectory {path} exists: resume it, or choose another file") from error
        except OSError as error:
            raise _store_error(path, error) from error
        trajectory = cls(path, descriptor, ())
        trajectory.append(begun)
        return trajectory

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Go on with a file. A last line that was cut short is taken away and reported in `warnings`."""
        try:
            descriptor = _open(path, 0)
        except FileNotFoundError as error:
            raise UsageError(f"there is no trajectory {path} to resume") from error
        except OSError as error:
            raise _store_error(path, error) from error
        try:
            lines, warnings = _mended(path, descriptor)
            return cls(path, descriptor, tuple(line.event for line in lines), warnings)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, those of before a resume included."""
        with self._lock:
            return tuple(self._events)

    def append(self, event: Event) -> None:
        """Write one event and sync it. Raises StoreError, and then the file is as it was."""
        line = to_json(TrajectoryLine(event=event, at=_now())) + b"\n"
        with self._lock:
            length = os.lseek(self._descriptor, 0, os.SEEK_END)
            try:
                complete = os.write(self._descriptor, line) == len(line)
                os.fsync(self._descriptor)
            except OSError as error:
                os.ftruncate(self._descriptor, length)
                raise _store_error(self.path, error) from error
            if not complete:
                os.ftruncate(self._descriptor, length)
                raise StoreError(f"the trajectory {self.path} took only part of an event: no space left?")
            self._events.append(event)

    def next_call(self) -> int:
        """A number for a new call."""
        with self._lock:
            self._last_call += 1
            return self._last_call

    def open_chat(self, chat: str, prefix: Prefix) -> None:
        """Record a chat's prefix, once. Raises UsageError for a second chat of this name, or another prefix."""
        event = Opened(chat=chat, system=prefix.system, context=prefix.context)
        with self._lock:
            if chat in self._live:
                raise UsageError(f"the chat {chat!r} is open already: every chat of a trajectory has a name of its own")
            self._live.add(chat)
            known = self._opened.get(chat)
            if known is None:
                self.append(event)
                self._opened[chat] = event
            elif known != event:
                raise UsageError(
                    f"the chat {chat!r} of {self.path.name} has another system prompt or context: give the new chat a "
                    "name of its own, or begin a new trajectory"
                )

    def recall(self, chat: str) -> RecordedCall | None:
        """Take the next recorded call of a chat; None after the last."""
        with self._lock:
            calls = self._calls.get(chat)
            return calls.popleft() if calls else None

    def upcoming(self, chat: str) -> RecordedCall | None:
        """What `recall` would take next."""
        with self._lock:
            calls = self._calls.get(chat)
            return calls[0] if calls else None

    def recall_verdict(self, source_digest: str) -> Judged | None:
        """The next recorded verdict on a source that was not recalled yet; None when it must be judged."""
        with self._lock:
            verdicts = self._verdicts.get(source_digest)
            return verdicts.popleft() if verdicts else None

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mended(path: Path, descriptor: int) -> tuple[tuple[TrajectoryLine, ...], tuple[str, ...]]:
    """Lines and warnings of a file; a last line that was cut short is taken away. Raises BadRecord or StoreError."""
    try:
        data = path.read_bytes()
        lines, warnings = parse_trajectory(data, path.name)
        if warnings:
            os.ftruncate(descriptor, data.rfind(b"\n") + 1)
            os.fsync(descriptor)
    except OSError as error:
        raise _store_error(path, error) from error
    return lines, warnings


def read_trajectory(path: Path) -> tuple[tuple[TrajectoryLine, ...], tuple[str, ...]]:
    """Lines of a trajectory that is not being written, and warnings. Raises UsageError, BadRecord or StoreError."""
    try:
        return parse_trajectory(read_packed(path), path.name)
    except FileNotFoundError as error:
        raise UsageError(f"there is no trajectory {path}") from error
    except OSError as error:
        raise _store_error(path, error) from error


def recorded_calls(events: tuple[Event, ...]) -> tuple[RecordedCall, ...]:
    """Every call in the order it was sent, with the conversation rebuilt. Raises UsageError when one does not fit."""
    prefixes = {
        event.chat: Prefix(system=event.system, context=event.context) for event in events if isinstance(event, Opened)
    }
    outcomes = {event.call: event for event in events if isinstance(event, Answered | Failed)}
    said: dict[str, tuple[Turn, ...]] = {}
    calls = []
    for asked in (event for event in events if isinstance(event, Asked)):
        turns = said.get(asked.chat, ())
        history = turns[len(turns) - asked.history :]
        conversation = Conversation(
            prefix=prefixes.get(asked.chat, Prefix()), turns=(*history, Turn(Role.USER, asked.text))
        )
        if conversation.digest != asked.digest:
            raise UsageError(
                f"call {asked.call} of the trajectory does not fit its digest: was the file changed by hand?"
            )
        outcome = outcomes.get(asked.call)
        if isinstance(outcome, Answered):
            said[asked.chat] = continued(turns, asked.text, outcome.text)
        calls.append(RecordedCall(asked, conversation, outcome))
    return tuple(calls)


def _open(path: Path, flags: int) -> int:
    """A descriptor for appending, locked. Raises UsageError when another process writes to the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(f"another run writes to the trajectory {path}: wait for it, or choose another file") from error
    return descriptor


def _store_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"the trajectory {path} cannot be used: {error.strerror or error}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
