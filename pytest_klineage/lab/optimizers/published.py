"""What the two published methods share: prompts that stand alone, lenient reading of replies, notes. No policy."""

from __future__ import annotations

import re

import msgspec

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.proposal import FLAGS, empty_source, header_lines, proposed_source
from pytest_klineage.lab.optimizers.recording import Recording, open_chat
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import Answered, Asked, KernelSource, Noted, StopReason, Usage

FENCE = re.compile(r"^ {0,3}(`{3,}[^`]*|~{3,}.*)$")


class Answer(msgspec.Struct, frozen=True):
    """A reply and the number of the call that brought it."""

    reply: Reply
    call: int

    @property
    def text(self) -> str:
        """What the model wrote; empty when it refused."""
        return "" if self.reply.stop_reason is StopReason.REFUSAL else self.reply.text


class FreshChat:
    """A chat that remembers nothing: every prompt stands alone behind the same prefix."""

    def __init__(
        self, session: Session, name: str, *, system: str, context: tuple[str, ...], max_output_tokens: int
    ) -> None:
        self._session, self._max_output_tokens = session, max_output_tokens
        self._chat = open_chat(session, name, system=system, context=context)
        self._answers = 0

    def ask(self, text: str, *, max_output_tokens: int | None = None) -> Answer:
        """Ask, and forget. Raises what Chat.ask raises."""
        self._chat.forget()
        reply = self._chat.ask(text, max_output_tokens=max_output_tokens or self._max_output_tokens)
        self._answers += 1
        events = self._session.events
        answered = {event.call for event in events if isinstance(event, Answered)}
        asked = (event.call for event in events if isinstance(event, Asked) and event.chat == self._chat.name)
        calls = [call for call in asked if call in answered]
        return Answer(reply, calls[self._answers - 1])


class Notebook:
    """Notes in a session's trajectory; a resumed run writes none of them twice."""

    def __init__(self, session: Session) -> None:
        self._session, self._written = session, Recording(session.events)

    def note(self, topic: str, text: str) -> None:
        """Write a note, unless it stands there already."""
        if not self._written.noted(topic, text):
            self._session.record(Noted(topic=topic, text=text))


def recorded_note(session: Session, topic: str) -> str | None:
    """The first note of a topic in the trajectory that is resumed or replayed; None when there is none."""
    events = session.events
    if isinstance(session.backend, ReplayBackend):
        events = tuple(line.event for line in read_trajectory(session.backend.path)[0])
    return next((event.text for event in events if isinstance(event, Noted) and event.topic == topic), None)


def base_of(task: Task) -> KernelSource:
    """What a whole file in a reply is put into: the root, or a kernel with an empty file."""
    return task.root if task.root is not None else empty_source(task.surface)


def main_text(kernel: KernelSource) -> str:
    """The text of the file that is compiled or imported."""
    return kernel.main.text if kernel.main else ""


def with_main_text(head: str, base: KernelSource, text: str) -> KernelSource:
    """The base with another text, and with the build flags of a line "FLAGS: ..." in `head`. Raises MalformedReply."""
    if not text.strip():
        raise MalformedReply(Malformation.EMPTY, "the code block is empty; send the whole main file in it")
    flags = header_lines(head).get(FLAGS, "")
    reply = Reply(text=f"{FLAGS}: {flags}\n\n{fenced(text)}\n", usage=Usage(model=""))
    return proposed_source(reply, base)


def first_block_source(answer: Answer, base: KernelSource) -> KernelSource:
    """The kernel whose main file is the first fenced block of a reply; further blocks are ignored.

    Raises MalformedReply when no block is closed. The release of AdaExplore takes the whole reply for the kernel then.
    """
    lines = f"{answer.text}\n".splitlines(keepends=True)
    begin = next((place for place, line in enumerate(lines) if FENCE.match(line)), len(lines))
    mark = lines[begin].strip()[:3] if begin < len(lines) else ""
    closing = (place for place in range(begin + 1, len(lines)) if _closes(lines[place], lines[begin], mark))
    end = next(closing, None)
    if end is None:
        raise MalformedReply(Malformation.NO_BLOCK, "the reply has no closed code block, and no kernel is in it")
    return with_main_text("".join(lines[:begin]), base, "".join(lines[begin + 1 : end]))


def _closes(line: str, opened: str, mark: str) -> bool:
    """Whether a line closes the block: nothing but marks, at least as many as opened it."""
    bare, opening = line.strip(), opened.strip()
    return len(bare) >= len(opening) - len(opening.lstrip(mark[0])) and not bare.strip(mark[0]) and bare != ""
