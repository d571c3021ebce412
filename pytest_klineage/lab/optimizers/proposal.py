"""From a model's reply to a kernel: one block with the whole file, or edits; and the lines that stand before them.

A reply is data. What is not exactly of the form that was asked for is a MalformedReply, whose message goes back to the
model; nothing is guessed.
"""

from __future__ import annotations

import re
import shlex

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.edits import apply_to_files, edit_blocks, one_block, usable_text
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.records import KernelSource, SourceFile, Surface

EDIT_MARK = re.compile(r"^<{7} SEARCH", re.M)
HEADER_LINE = re.compile(r"^[ \t*_#>-]*(?P<name>[A-Z]{2,12})[*_]*[ \t]*:[*_]*[ \t]*(?P<value>.*?)[ \t*_]*$")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
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
        files = apply_to_files({file.name: file.text for file in base.files}, edit_blocks(text))
    else:
        files = {file.name: file.text for file in base.files} | {base.main.name: _whole(text)}
    changed = tuple(SourceFile(name=file.name, text=files[file.name]) for file in base.files)
    return msgspec.structs.replace(base, files=changed, flags=_flags(text, base.flags), label="")


def header_lines(text: str) -> dict[str, str]:
    """Lines such as "CARDS: a, b" that stand before the first block or edit; the first of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if FENCE.match(line) or line.startswith("<<<<<<< SEARCH"):
            break
        if match := HEADER_LINE.match(line):
            found.setdefault(match["name"], match["value"].strip())
    return found


def _whole(text: str) -> str:
    block = one_block(text)
    if not block.text.strip():
        raise MalformedReply(Malformation.EMPTY, "the code block is empty; send the whole main file in it")
    return block.text


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
