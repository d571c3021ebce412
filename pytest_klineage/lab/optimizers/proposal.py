"""From a model's reply to a kernel: strictly in our forms, leniently in those of published methods."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.lineages import texts_of
from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.edits import apply_to_files, edit_blocks, one_block, usable_text
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.instructions import code_language
from pytest_klineage.lab.optimizers.recording import call_number, open_chat
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelSource, SourceFile, StopReason, Surface

EDIT_MARK = re.compile(r"^<{7} SEARCH", re.M)
HEADER_LINE = re.compile(r"^[ \t*_#>-]*(?P<name>[A-Z]{2,12})[*_]*[ \t]*:[*_]*[ \t]*(?P<value>.*?)[ \t*_]*$")
FENCE = re.compile(r"^ {0,3}(`{3,}[^`]*|~{3,}.*)$")
FLAGS = "FLAGS"
NO_FLAGS = ("none", "default", "defaults", "same", "unchanged", "-", "")
MAIN_FILES = {
    Surface.CPP: "kernel.cpp",
    Surface.CUDA: "kernel.cu",
    Surface.PYTHON: "kernel.py",
    Surface.TRITON: "kernel.py",
    Surface.TILELANG: "kernel.py",
}
"""What the main file of a kernel that begins from nothing is called."""


def empty_source(surface: Surface, *, entry: str = "run", flags: tuple[str, ...] = ()) -> KernelSource:
    """A kernel with an empty main file: the base of a reply where there is nothing to begin with."""
    return KernelSource(
        surface=surface, files=(SourceFile(name=MAIN_FILES[surface], text=""),), entry=entry, flags=flags
    )


def proposed_source(reply: Reply, base: KernelSource) -> KernelSource:
    """The kernel that a reply proposes, with the base's surface, entry and further files.

    Either exactly one fenced block, which is the whole main file, or SEARCH/REPLACE edits against `base`. A line
    "FLAGS: ..." before them replaces the build flags. Raises MalformedReply for anything else.
    """
    text = usable_text(reply)
    if base.main is None:
        raise UsageError("a kernel that is an installed module has no text to change; give its file instead")
    if EDIT_MARK.search(text):
        files = apply_to_files(texts_of(base), edit_blocks(text))
    else:
        files = {base.main.name: whole_file(one_block(text).text)}
    return changed_source(base, files, text)


def changed_source(base: KernelSource, files: Mapping[str, str], head: str) -> KernelSource:
    """The base with new texts of some files, and the flags of a line "FLAGS: ..." in `head`. Raises MalformedReply."""
    changed = tuple(SourceFile(name=file.name, text=files.get(file.name, file.text)) for file in base.files)
    return msgspec.structs.replace(base, files=changed, flags=_flags(head, base.flags), label="")


def header_lines(text: str) -> dict[str, str]:
    """Lines such as "CARDS: a, b" that stand before the first block or edit; the first of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if FENCE.match(line) or line.startswith("<<<<<<< SEARCH"):
            break
        if match := HEADER_LINE.match(line):
            found.setdefault(match["name"], match["value"].strip())
    return found


def whole_file(text: str) -> str:
    """The text of a main file. Raises MalformedReply for an empty one."""
    if not text.strip():
        raise MalformedReply(Malformation.EMPTY, "the code block is empty; send the whole main file in it")
    return text


def _flags(text: str, base: tuple[str, ...]) -> tuple[str, ...]:
    written = header_lines(text).get(FLAGS, "").strip("` ")
    if written.lower() in NO_FLAGS:
        return base
    try:
        return tuple(shlex.split(written))
    except ValueError as error:
        raise MalformedReply(
            Malformation.BROKEN_EDIT, f"the line FLAGS cannot be read ({error}); write flags apart by blanks"
        ) from error


class NumberedReply(msgspec.Struct, frozen=True):
    """A reply and the number of the call that brought it."""

    reply: Reply
    call: int

    @property
    def text(self) -> str:
        """What the model wrote; empty when it refused."""
        return "" if self.reply.stop_reason is StopReason.REFUSAL else self.reply.text


class FreshChat:
    """A chat that remembers nothing: every prompt stands alone after the same prefix."""

    def __init__(
        self, session: Session, name: str, *, system: str, context: tuple[str, ...], max_output_tokens: int
    ) -> None:
        self._session, self._max_output_tokens = session, max_output_tokens
        self._chat = open_chat(session, name, system=system, context=context)
        self._answers = 0

    def ask(self, text: str, *, max_output_tokens: int | None = None) -> NumberedReply:
        """Ask, and forget. Raises what Chat.ask raises."""
        self._chat.forget()
        reply = self._chat.ask(text, max_output_tokens=max_output_tokens or self._max_output_tokens)
        self._answers += 1
        return NumberedReply(reply, call_number(self._session, self._chat, self._answers))


def base_of(task: Task) -> KernelSource:
    """What a whole file in a reply is put into: the root, or a kernel with an empty file."""
    return task.root if task.root is not None else empty_source(task.surface)


def main_text(kernel: KernelSource) -> str:
    """The text of the file that is compiled or imported."""
    return kernel.main.text if kernel.main else ""


def built_text(kernel: KernelSource) -> str:
    """The main file in a fence, and the flags that it is built with."""
    built = f"\n\nBuilt with: {' '.join(kernel.flags)}" if kernel.flags else ""
    return fenced(main_text(kernel), code_language(kernel.surface)) + built


def with_main_text(head: str, base: KernelSource, text: str) -> KernelSource:
    """The base with another text, and with the build flags of a line "FLAGS: ..." in `head`. Raises MalformedReply."""
    if base.main is None:
        raise UsageError("a kernel that is an installed module has no text to change; give its file instead")
    return changed_source(base, {base.main.name: whole_file(text if text.endswith("\n") else f"{text}\n")}, head)


def first_block_source(answer: NumberedReply, base: KernelSource) -> KernelSource:
    """The kernel whose main file is the first fenced block of a reply; further blocks are ignored.

    Raises MalformedReply when no block is closed. The release of AdaExplore takes the whole reply for the kernel then.
    """
    lines = f"{answer.text}\n".splitlines(keepends=True)
    begin = next((position for position, line in enumerate(lines) if FENCE.match(line)), len(lines))
    mark = lines[begin].strip()[:3] if begin < len(lines) else ""
    closing = (position for position in range(begin + 1, len(lines)) if _closes(lines[position], lines[begin], mark))
    end = next(closing, None)
    if end is None:
        raise MalformedReply(Malformation.NO_BLOCK, "the reply has no closed code block, and no kernel is in it")
    return with_main_text("".join(lines[:begin]), base, "".join(lines[begin + 1 : end]))


def _closes(line: str, opened: str, mark: str) -> bool:
    """Whether a line closes the block: nothing but marks, at least as many as opened it."""
    bare, opening = line.strip(), opened.strip()
    return len(bare) >= len(opening) - len(opening.lstrip(mark[0])) and not bare.strip(mark[0]) and bare != ""
