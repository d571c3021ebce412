"""Text for a terminal: lines of a width, tables in columns, numbers with their nouns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

WIDTH = 100
"""Columns of what is written for people."""
INDENT = "    "


def wrapped(text: str, width: int = WIDTH, *, indent: str = INDENT, first: str = "") -> list[str]:
    """Lines of at most `width`, those after the first indented; names with hyphens stay whole where they can."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def plain_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], alignment: Sequence[str] | None = None
) -> list[str]:
    """A table with a rule below its headers, as wide as its cells ask for."""
    # The headers go in as a row: as headers they would be padded by two columns each.
    rule = ["-" * size for size in column_widths([headers, *rows])]
    table = tabulate([headers, rule, *rows], tablefmt="plain", colalign=alignment, disable_numparse=True)
    return [line.rstrip() for line in table.splitlines()]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def elided(text: str, size: int) -> str:
    """At most `size` characters: the middle gives way, because both ends of a case's name say something."""
    if len(text) <= size:
        return text
    head = (size - 1) // 2
    return f"{text[:head]}..{text[len(text) - (size - 2 - head) :]}"


def shortened(text: str, size: int) -> str:
    """At most `size` characters: the end gives way."""
    return text if len(text) <= size else text[: size - 2] + ".."


def counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
