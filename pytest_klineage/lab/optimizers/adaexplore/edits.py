"""AdaExplore's edits: numbered pairs of old and new text, read and applied as leniently as in the release."""

from __future__ import annotations

import re

import msgspec

from pytest_klineage.lab.llm.faults import Malformation, MalformedReply

PAIR = re.compile(
    r"<old_str_(?P<number>\d+)>(?P<old>.*?)</old_str_(?P=number)>\s*"
    r"<new_str_(?P=number)>(?P<new>.*?)</new_str_(?P=number)>",
    re.S,
)


class Edited(msgspec.Struct, frozen=True):
    """A text after edits, and how many of them applied."""

    text: str
    applied: int
    skipped: int


def edited(text: str, reply: str) -> Edited:
    """Apply all edits of a reply in order; one that fits nowhere, or in several places, is skipped.

    Raises MalformedReply when none applies. The release judges the unchanged kernel once more then.
    """
    applied, pairs = 0, list(PAIR.finditer(reply))
    for pair in pairs:
        old, new = pair["old"].strip("\r\n"), pair["new"].strip("\r\n")
        span = _place(text, old)
        if span is not None and text[slice(*span)] != new:
            text = text[: span[0]] + new + text[span[1] :]
            applied += 1
    if not pairs:
        raise MalformedReply(Malformation.NO_EDIT, "the reply has no pair of old_str and new_str")
    if not applied:
        raise MalformedReply(
            Malformation.EDIT_NOT_FOUND, f"none of {len(pairs)} edits applies: the old text must stand there once"
        )
    return Edited(text, applied, len(pairs) - applied)


def _place(text: str, old: str) -> tuple[int, int] | None:
    """Where the old text stands: literally; else without blanks at ends of lines; else also without empty lines."""
    for wanted in (re.escape(old), _loose(old), _loose(_without_empty_ends(old))):
        found = [match.span() for match in re.finditer(wanted, text)] if old.strip() else []
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _loose(old: str) -> str:
    return r"[ \t]*\n".join(re.escape(line.rstrip()) for line in old.split("\n"))


def _without_empty_ends(old: str) -> str:
    lines = old.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join(lines)
