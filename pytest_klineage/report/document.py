"""What a report is made of: tables, figures, the kernel or card of a point.

Builders make these from records; Markdown, HTML and figure files are three ways to write them down.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Tone(StrEnum):
    """What a cell's look says beside its words."""

    PLAIN = ""
    GOOD = "good"
    BAD = "bad"
    QUIET = "quiet"


class Mark(StrEnum):
    """What happened at a point of a figure."""

    SCORED = "scored"
    """Right and timed."""
    WRAPPER = "wrapper"
    """A library or the framework did the work: never counted."""
    FAILED = "failed"
    """No speedup: wrong, not built, too late, a cheat, or no kernel in the reply."""
    SCREENED = "screened"
    """Right, and timed too shortly for its speedup to be published."""
    REJECTED = "rejected"
    """A proposed step of a lineage that was not taken."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    order: float | str | None = None
    """What the column is sorted by; None comes last."""
    tone: Tone = Tone.PLAIN
    detail: str = ""
    """Key of its detail."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; a figure's unit belongs in its name."""

    name: str
    numeric: bool = False


def columns(*names: str, numeric: Collection[str] = ()) -> tuple[Column, ...]:
    """Columns by name; those in `numeric` hold figures."""
    return tuple(Column(name, numeric=name in numeric) for name in names)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that can be sorted, and a foot that stays where it is."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()
    paper: str = ""
    """For values of the paper: the device that they were measured on, in its words."""

    def condensed(self, *names: str) -> Table:
        """The table without those of the named columns that say the same in every row; its title says it instead."""
        same = [
            index
            for index, column in enumerate(self.columns)
            if column.name in names and len(self.rows) > 1 and len({row[index].text for row in self.rows}) == 1
        ]
        kept = [index for index in range(len(self.columns)) if index not in same]
        said = [f"{self.columns[index].name} {self.rows[0][index].text}" for index in same]
        return replace(self.picked(kept), title=", ".join([self.title, *said]))

    def picked(self, positions: Sequence[int]) -> Table:
        """The table with some of its columns."""
        return replace(
            self,
            columns=tuple(self.columns[index] for index in positions),
            rows=tuple(tuple(row[index] for index in positions) for row in self.rows),
            foot=tuple(tuple(row[index] for index in positions) for row in self.foot),
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a figure."""

    x: float
    y: float | None
    """None for what has no value: it is drawn below the axis, never at a height."""
    text: str
    mark: Mark = Mark.SCORED
    low: float | None = None
    high: float | None = None
    detail: str = ""


class Line(StrEnum):
    """How the points of a series are joined."""

    NONE = "none"
    STEPS = "steps"
    """The last value holds until the next point."""
    STRAIGHT = "straight"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one method, run or lineage."""

    name: str
    colour: int
    """Number in the palette; the same method has the same number everywhere."""
    points: tuple[Point, ...]
    line: Line = Line.NONE


class FigureKind(StrEnum):
    """What is drawn."""

    BARS = "bars"
    """Horizontal bars from 1x, one group per category; x is the number of the category."""
    CURVES = "curves"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; x and y of its points are plain numbers in the units that the labels name."""

    key: str
    """Unique in its report; also the name of its file."""
    kind: FigureKind
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    """Names of x = 0, 1, 2, ... where x counts instead of measuring."""
    y_log: bool = True
    parity: str = ""
    """What the line at y = 1 means; empty for no such line."""

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of all series, in their order."""
        return tuple(point for series in self.series for point in series.points)


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A piece of text as it was recorded: a kernel, a reply, a log. Untrusted; shown verbatim, never interpreted."""

    caption: str
    text: str


@dataclass(frozen=True, slots=True)
class Detail:
    """The detail of a point or a cell."""

    key: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    blocks: tuple[RecordedText, ...] = ()


@dataclass(frozen=True, slots=True)
class UnreadableInput:
    """Something that could not be read, or is not there."""

    where: str
    what: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Absent:
    """A table or figure that these records do not hold, and the command that makes it."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure that a reader should see first, with what it rests on."""

    value: str
    what: str
    rests_on: str


@dataclass(frozen=True, slots=True)
class Section:
    """One heading with what stands below it."""

    key: str
    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All parts, in order."""

    title: str
    summary: tuple[Headline, ...]
    sections: tuple[Section, ...]
    absent: tuple[Absent, ...] = ()
    problems: tuple[UnreadableInput, ...] = ()
    details: tuple[Detail, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(slots=True)
class Details:
    """Details that are collected while tables and figures are built; equal keys are one detail."""

    found: dict[str, Detail] = field(default_factory=dict)
    kernels: dict[str, tuple[RecordedText, ...]] = field(default_factory=dict)
    """Texts of kernels that are known, by source digest."""
    cards: dict[str, RecordedText] = field(default_factory=dict)
    """Texts of cards, by name."""

    def add(self, detail: Detail) -> str:
        """Keep a detail and give back its key."""
        self.found.setdefault(detail.key, detail)
        return detail.key
