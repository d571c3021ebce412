"""A finding in words: an exception's own line before its frames, and nothing said twice."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from pytest_klineage.records import Reason

SHOWN_REASONS = 3
"""Distinct findings that are reported; a kernel that is wrong in every input distribution need not say so for each."""
SHOWN_FRAMES = 3
FRAME = re.compile(r'  File "([^"]*)", line (\d+)(?:, in (.*))?')
NOT_THE_KERNELS = re.compile(r"/pytest_klineage/(worker|surfaces|gate|references)/|^<frozen |/importlib/__init__\.py$")
"""Files whose frames say nothing about a kernel: what calls it, and what imports it."""


class Message(NamedTuple):
    """A message, most useful line first."""

    line: str
    details: tuple[str, ...] = ()
    """What follows: the kernel's own frames, outermost first, or the message's further lines."""
    where: str = ""
    """The kernel's innermost frame, such as "kernel.py, line 2, in run"; empty without one."""


def format_message(message: str) -> Message:
    """A message with its last line first when it is a traceback, and without frames of this package."""
    lines = message.strip("\n").splitlines() or [""]
    frames = [(index, found) for index, line in enumerate(lines) if (found := FRAME.fullmatch(line))]
    if not frames:
        return Message(lines[0].strip(), tuple(lines[1:]))
    end = frames[-1][0] + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    said = lines[end:] or lines[-1:]
    kept = [(index, found) for index, found in frames if not NOT_THE_KERNELS.search(found[1])][-SHOWN_FRAMES:]
    details = [f"at {_location(found)}{_code(lines, index)}" for index, found in kept]
    return Message(said[0].strip(), (*details, *said[1:]), _location(kept[-1][1]) if kept else "")


def distinct(reasons: Sequence[Reason], limit: int = SHOWN_REASONS) -> tuple[list[Reason], int]:
    """The first few reasons that differ in code or sentence, and how many more there are."""
    different: dict[tuple[str, str], Reason] = {}
    for reason in reasons:
        different.setdefault((reason.code, reason.message), reason)
    chosen = list(different.values())[:limit]
    return chosen, len(reasons) - len(chosen)


def in_one_line(reasons: Sequence[Reason], limit: int | None = None) -> str:
    """Reasons for a summary: codes where they change, the place in the kernel where it is known, "and N more".

    `limit` bounds the characters before "and N more".
    """
    chosen, left = distinct(reasons)
    parts: list[str] = []
    for index, reason in enumerate(chosen):
        same = index > 0 and chosen[index - 1].code is reason.code
        parts.append(("" if same else f"{reason.code.value}: ") + _shortest(format_message(reason.message)))
    text = "; ".join(parts)
    if limit is not None:
        text = textwrap.shorten(text, limit, placeholder=" ...")
    return f"{text}; and {left} more" if left else text


def _shortest(say: Message) -> str:
    return f"{say.line} ({say.where})" if say.where else " ".join([say.line, *say.details])


def _location(found: re.Match[str]) -> str:
    """A frame without the folders of this machine."""
    function = f", in {found[3]}" if found[3] else ""
    return f"{PurePosixPath(found[1]).name}, line {found[2]}{function}"


def _code(lines: Sequence[str], index: int) -> str:
    """The line of source that a traceback shows under a frame."""
    following = lines[index + 1] if index + 1 < len(lines) else ""
    return f": {following.strip()}" if following.startswith("    ") else ""
