"""What a reply holds, as data: one block of code, one JSON object, or edits to a text. Nothing in it is ever executed.

A reply that is not exactly what was asked for is a MalformedReply with a name, never a guess: two blocks are not "the
last one", and an edit that fits nowhere is not left out.

An edit is written so, with at least the marks at the beginning of their lines; a file's name may follow SEARCH:

    <<<<<<< SEARCH
    the lines as they are
    =======
    the lines as they shall be
    >>>>>>> REPLACE
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.records import Replacement, StopReason

LINE = re.compile(r"[^\n]*\n|[^\n]+")
FENCE = re.compile(r"^ {0,3}(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^\n]*)$")
SEARCH = re.compile(r"^<{7} SEARCH(?:[ \t]+(?P<file>\S.*?))?[ \t]*$")
MIDDLE = re.compile(r"^={7}[ \t]*$")
REPLACE = re.compile(r"^>{7} REPLACE[ \t]*$")
EXCERPT = 120
"""How much of a text a message quotes."""


class FencedBlock(msgspec.Struct, frozen=True):
    """A fenced block: its language as written after the fence, and its text."""

    language: str
    text: str


def usable_text(reply: Reply) -> str:
    """The reply's text. Raises MalformedReply when it was refused or cut off, or is empty."""
    if reply.stop_reason is StopReason.REFUSAL:
        raise MalformedReply(Malformation.REFUSED, "the model, or its provider, declined to answer; ask differently")
    if reply.stop_reason is StopReason.MAX_TOKENS:
        raise MalformedReply(
            Malformation.TRUNCATED, "the reply was cut off at the limit of output tokens; answer more briefly"
        )
    if not reply.text.strip():
        raise MalformedReply(Malformation.EMPTY, "the reply is empty; answer in the form that was asked for")
    return reply.text


def code_blocks(text: str) -> tuple[FencedBlock, ...]:
    """All fenced blocks; a block ends at a fence of its kind at least as long. Raises MalformedReply if one is open."""
    blocks: list[FencedBlock] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in LINE.findall(text):
        fence = FENCE.match(line.rstrip("\r\n"))
        if opened is None:
            if fence is not None and not (fence["mark"][0] == "`" and "`" in fence["info"]):
                opened, lines = fence, []
        elif fence is not None and _closes(fence, opened):
            words = opened["info"].split()
            blocks.append(FencedBlock(words[0].lower() if words else "", "".join(lines)))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise MalformedReply(Malformation.OPEN_BLOCK, "a code block is not closed; send it whole, with a closing fence")
    return tuple(blocks)


def one_block(text: str) -> FencedBlock:
    """The only fenced block of a reply. Raises MalformedReply for none, or several."""
    blocks = code_blocks(text)
    if not blocks:
        raise MalformedReply(Malformation.NO_BLOCK, "the reply has no code block; send exactly one, fenced by ```")
    if len(blocks) > 1:
        raise MalformedReply(
            Malformation.SEVERAL_BLOCKS, f"the reply has {len(blocks)} code blocks; send exactly one, with everything"
        )
    return blocks[0]


def one_object(text: str) -> dict[str, Any]:
    """The JSON object that is the reply, or its only fenced block. Raises MalformedReply."""
    bare = text.strip()
    data = bare if bare.startswith(("{", "[")) else one_block(text).text
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise MalformedReply(Malformation.NOT_JSON, f"the reply is no JSON: {error}; send one JSON object") from error
    if not isinstance(value, dict):
        raise MalformedReply(
            Malformation.NOT_AN_OBJECT, f"the reply is a JSON {type(value).__name__}; send one JSON object"
        )
    return value


def edit_blocks(text: str) -> tuple[Replacement, ...]:
    """All edits of a reply, in order; an empty file name where none is written. Raises MalformedReply."""
    edits: list[Replacement] = []
    file, search, replace = "", [""], [""]
    state = "outside"
    for number, line in enumerate(LINE.findall(text), start=1):
        bare = line.rstrip("\r\n")
        begins, middle, ends = SEARCH.match(bare), MIDDLE.match(bare), REPLACE.match(bare)
        if state == "outside" and begins:
            state, file, search, replace = "search", (begins["file"] or "").strip(), [], []
        elif state == "search" and middle:
            state = "replace"
        elif state == "replace" and ends:
            edits.append(Replacement(file=file, search="".join(search), replace="".join(replace)))
            state = "outside"
        elif begins or (ends and state != "outside") or (middle and state == "replace"):
            raise _broken(f"line {number} ({bare[:EXCERPT]!r}) does not belong there")
        elif ends:
            raise _broken(f"line {number} ends an edit that was not begun")
        elif state != "outside":
            (search if state == "search" else replace).append(line)
    if state != "outside":
        raise _broken("the last edit is not complete")
    if not edits:
        raise MalformedReply(Malformation.NO_EDIT, "the reply has no edit; send SEARCH and REPLACE blocks as described")
    return tuple(edits)


def apply_edits(text: str, edits: Iterable[Replacement]) -> str:
    """The text after all edits, each applied to what the one before left. Raises MalformedReply if one does not fit.

    A piece must occur exactly once, character by character, and must change something.
    """
    for position, edit in enumerate(edits, start=1):
        quoted = repr(edit.search[:EXCERPT])
        if edit.search == edit.replace:
            raise MalformedReply(Malformation.EDIT_CHANGES_NOTHING, f"edit {position} replaces {quoted} by itself")
        count = _occurrences(text, edit.search)
        if not edit.search.strip() or count == 0:
            raise MalformedReply(
                Malformation.EDIT_NOT_FOUND,
                f"edit {position} does not apply: {quoted} is not in the text; copy the lines exactly as they are",
            )
        if count > 1:
            raise MalformedReply(
                Malformation.EDIT_AMBIGUOUS,
                f"edit {position} fits {count} times: {quoted}; quote more lines around it, so that it fits once",
            )
        text = text.replace(edit.search, edit.replace)
    return text


def apply_to_files(files: dict[str, str], edits: Iterable[Replacement]) -> dict[str, str]:
    """New texts of all files. An edit names its file, unless there is only one. Raises MalformedReply."""
    changed = dict(files)
    for edit in edits:
        name = edit.file or (next(iter(files)) if len(files) == 1 else "")
        if name not in changed:
            raise MalformedReply(
                Malformation.EDIT_NOT_FOUND,
                f"an edit names the file {name!r}; write one of these behind SEARCH: {', '.join(sorted(files))}",
            )
        changed[name] = apply_edits(changed[name], (edit,))
    return changed


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    same = fence["mark"][0] == opened["mark"][0] and len(fence["mark"]) >= len(opened["mark"])
    return same and not fence["info"].strip()


def _occurrences(text: str, piece: str) -> int:
    """How often a piece occurs, overlaps included: any of those places could be meant."""
    count, start = 0, text.find(piece)
    while piece and start >= 0:
        count, start = count + 1, text.find(piece, start + 1)
    return count


def _broken(what: str) -> MalformedReply:
    return MalformedReply(Malformation.BROKEN_EDIT, f"an edit is not well formed: {what}; write it as described")
