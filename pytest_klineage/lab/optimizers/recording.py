"""What a trajectory remembers beside its calls: prompts' prefixes, settings, and verdicts as methods got them.

A verdict that a method got stands in the trajectory twice: as Judged, short, and before it as Noted with the topic
"verdict", whole except for the raw samples. So a resumed run, and a replay, give the method exactly what it got.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable

import msgspec

from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.lab.llm.conversation import Prefix
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Chat, Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    Code,
    Event,
    Noted,
    Opened,
    Status,
    Verdict,
    from_json,
    from_plain,
    is_at_the_edge,
    to_plain,
)
from pytest_klineage.records.codec import finite

VERDICT_TOPIC = "verdict"
RIGHT_CLASS = "right"
"""The class of all verdicts on right kernels: how fast one is depends on the machine."""


class VerdictMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict as a method got it."""

    verdict: Verdict
    """As `abridged` makes it."""
    feedback: str


class Rejudged(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel of a replay: what was recorded, and what the gate says of it now."""

    step: int
    recorded: Verdict
    verdict: Verdict

    @property
    def agrees(self) -> bool:
        """Whether both verdicts are of one class."""
        return same_class(self.recorded, self.verdict)


def disagreements(rejudged: Iterable[Rejudged]) -> str:
    """A line for every kernel of a replay whose verdict is of another class than the recorded one; empty for none."""
    return "\n".join(
        f"step {item.step}: recorded {item.recorded.code.value}, now {item.verdict.code.value}: "
        f"{item.verdict.reasons[0].message}"
        for item in rejudged
        if not item.agrees
    )


def lacks_instructions(rejudged: Iterable[Rejudged]) -> str:
    """Why a replay says nothing on this processor: a kernel has instructions that it lacks. Empty where none has."""
    for item in rejudged:
        reason, recorded = item.verdict.reasons[0], item.recorded.code
        if reason.code is Code.CRASH is not recorded and reason.evidence.get("signal") == signal.SIGILL:
            return f"step {item.step}: the kernel ended by SIGILL, as by instructions that this processor lacks"
    return ""


class Recording:
    """Earlier events, for a run that repeats them."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.settings: dict[str, str] = {}
        self.prefixes: dict[str, Prefix] = {}
        self.messages: dict[str, VerdictMessage] = {}
        """By digest of the source; a source is judged once in a run."""
        self._notes: Counter[tuple[str, str]] = Counter()
        self._last = ""
        """Digest of the kernel after whose verdict nothing was asked or judged."""
        for event in events:
            if isinstance(event, Begun):
                self.settings = dict(event.settings)
            elif isinstance(event, Opened):
                self.prefixes[event.chat] = Prefix(system=event.system, context=event.context)
            elif isinstance(event, Asked):
                self._last = ""
            elif isinstance(event, Noted):
                self._take(event)

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.messages or self._notes)

    def first(self, topic: str) -> str | None:
        """The first note of this topic; None without one."""
        return next((text for found, text in self._notes if found == topic), None)

    def noted(self, topic: str, text: str) -> bool:
        """Whether this note stands there already; each one counts once."""
        if not self._notes[topic, text]:
            return False
        self._notes[topic, text] -= 1
        return True

    def went_on_after(self, source_digest: str) -> bool:
        """Whether more was asked or judged after the verdict on that kernel."""
        return source_digest in self.messages and source_digest != self._last

    def _take(self, note: Noted) -> None:
        if note.topic == VERDICT_TOPIC:
            message = from_json(note.text, VerdictMessage)
            self._last = message.verdict.source_digest
            self.messages.setdefault(self._last, message)
        else:
            self._notes[note.topic, note.text] += 1


def recording_of(session: Session) -> Recording:
    """What the trajectory that is replayed, else the session's own, has recorded. Raises BadRecord or UsageError."""
    if isinstance(session.backend, ReplayBackend):
        lines, _ = read_trajectory(session.backend.path)
        return Recording(line.event for line in lines)
    return Recording(session.events)


class Notebook:
    """Notes in a session's trajectory; a resumed run writes none of them twice."""

    def __init__(self, session: Session) -> None:
        self._session, self._written = session, Recording(session.events)

    def note(self, topic: str, text: str) -> None:
        """Write a note, unless it stands there already."""
        if not self._written.noted(topic, text):
            self._session.record(Noted(topic=topic, text=text))


def open_chat(session: Session, name: str, *, system: str, context: tuple[str, ...] = ()) -> Chat:
    """A chat whose prefix is the recorded one where there is a recording.

    What a prefix says of the machine, and which cards are in it, may differ by now: a run that goes on, or is replayed,
    does so with what the model was shown.
    """
    prefix = recording_of(session).prefixes.get(name) or Prefix(system=system, context=context)
    return session.chat(name, system=prefix.system, context=prefix.context)


def call_number(session: Session, chat: Chat, replies: int) -> int:
    """Number of the call that brought a chat's reply number `replies`, from 1; 0 when the trajectory has none.

    A run that goes on gets recorded replies first, so that the last call of the trajectory need not be the one.
    """
    asked = {event.call for event in session.events if isinstance(event, Asked) and event.chat == chat.name}
    answered = [event.call for event in session.events if isinstance(event, Answered) and event.call in asked]
    return answered[replies - 1] if 0 < replies <= len(answered) else 0


def abridged(verdict: Verdict) -> Verdict:
    """The verdict without raw samples and lists of executed kernels, which no method gets; all figures finite."""
    timing = verdict.timing
    if timing is not None:
        timing = msgspec.structs.replace(
            timing,
            reference_samples_ms=(),
            candidate_samples_ms=(),
            reference_overheads_ms=(),
            candidate_overheads_ms=(),
        )
    short = msgspec.structs.replace(verdict, timing=timing, other_timings=(), kernels=(), reference_kernels=())
    return from_plain(finite(to_plain(short)), Verdict)


def same_class(recorded: Verdict, fresh: Verdict) -> bool:
    """Whether both are of one class: right, or one way of being wrong.

    A machine that cannot judge says nothing. Nor does an error at the edge of what is allowed: with other inputs it is
    on the other side.
    """
    if fresh.status is Status.SKIPPED or verdict_class(recorded.status) == verdict_class(fresh.status):
        return True
    return all(verdict.ranked or is_at_the_edge(verdict.reasons[0]) for verdict in (recorded, fresh))


def verdict_class(status: Status) -> str:
    """What a replay must reproduce: "right" for every scored kernel, else the status."""
    return RIGHT_CLASS if status in RIGHT else status.value
