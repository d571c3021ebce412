"""Cells that many tables have: a speedup, a time, so many of so many. A failure has no number in any of them."""

from __future__ import annotations

from pytest_klineage.report.document import Cell, Tone
from pytest_klineage.report.tables import milliseconds, ratio

NOTHING = "-"
FAIL = Cell("FAIL", None, Tone.BAD)
"""A failure sorts behind every number."""


def times(value: float | None, tone: Tone = Tone.PLAIN) -> Cell:
    """A speedup."""
    return Cell(f"{ratio(value)}x", value, tone) if value is not None else Cell(NOTHING, None, Tone.QUIET)


def share(part: int, whole: int) -> Cell:
    """So many of so many."""
    return Cell(f"{part}/{whole}", part / whole if whole else None)


def time_cell(value: float | None) -> Cell:
    """A time in ms."""
    return Cell(milliseconds(value), value) if value is not None else Cell(NOTHING, None, Tone.QUIET)
