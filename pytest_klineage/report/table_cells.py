"""Cells that many tables have: a speedup, a time, so many of so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_klineage.records import Interval, Verdict
from pytest_klineage.report.document import Cell, Table, Tone
from pytest_klineage.report.tables import UNKNOWN, floor_share, floor_text, floors_known, milliseconds, ratio

NOTHING = "-"
OF_FLOOR = (
    "Floor: the least time of the case's bytes and operations by the GPU's data sheet, over the kernel's time; "
    "\N{GREATER-THAN OR EQUAL TO} where only a bound of such machines is known."
)
NONE = Cell(NOTHING, None, Tone.QUIET)
"""Where there is no figure."""
FAIL = Cell("FAIL", None, Tone.BAD)
"""A failure sorts after every number."""


def times(value: float | None, tone: Tone = Tone.PLAIN) -> Cell:
    """A speedup."""
    return Cell(f"{ratio(value)}x", value, tone) if value is not None else NONE


def width_cell(interval: Interval | None) -> Cell:
    """The interval of a speedup, by its lower end."""
    if interval is None:
        return NONE
    return Cell(f"{ratio(interval.low)} to {ratio(interval.high)}", interval.low, Tone.QUIET)


def named(text: str, tone: Tone = Tone.PLAIN, detail: str = "") -> Cell:
    """A word that its column is sorted by."""
    return Cell(text or NOTHING, text or None, tone, detail)


def counted_cell(number: int) -> Cell:
    """A number of things."""
    return Cell(str(number), number)


def share(part: int, whole: int) -> Cell:
    """So many of so many."""
    return Cell(f"{part}/{whole}", part / whole if whole else None)


def floor_cell(verdict: Verdict | None) -> Cell:
    """The share of a kernel's time that its physical floor is."""
    share = floor_share(verdict) if verdict is not None else None
    return Cell(floor_text(verdict), share) if verdict is not None and share else Cell(UNKNOWN, None, Tone.QUIET)


def with_floors(table: Table, verdicts: Sequence[Verdict]) -> Table:
    """A table with a note on its column "floor", or without the column where no floor is known."""
    if floors_known(verdicts):
        return replace(table, notes=(*table.notes, OF_FLOOR))
    return table.picked([index for index, column in enumerate(table.columns) if column.name != "floor"])


def time_cell(value: float | None) -> Cell:
    """A time in ms."""
    return Cell(milliseconds(value), value) if value is not None else NONE
