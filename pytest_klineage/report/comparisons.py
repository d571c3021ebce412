"""Comparisons as text: a table for a terminal, Markdown for a pull request, annotations for GitHub.

Texts of kernels and tests are data here: they cannot end a table's cell, nor begin a workflow command.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pytest_klineage.records import Interval
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.compare import change_text
from pytest_klineage.report.text import INDENT, WIDTH, elided, plain_table, wrapped

HEADERS = ("case", "kernel", "then", "now", "now/then", "outcome")
NAME_COLUMNS = (25, 14)
"""Characters of a case and of a kernel that a terminal's table shows."""
QUIET = frozenset({ComparisonOutcome.SAME, ComparisonOutcome.UNCHANGED, ComparisonOutcome.SKIPPED})
"""Outcomes that need no line beside the table."""
ANNOTATIONS = 10
"""Of each level, about as many as GitHub shows for one step."""
MESSAGE_CHARACTERS = 1000


class Annotation(NamedTuple):
    """What GitHub shows beside a line of a file."""

    level: str
    """error, warning or notice."""
    title: str
    message: str
    file: str = ""
    """Relative to the repository's root."""
    line: int = 0
    """From 1; 0 when unknown."""


def comparison_lines(comparisons: Sequence[Comparison], width: int = WIDTH) -> list[str]:
    """Table, counts, and a note about everything that is not as before; no line wider than `width`."""
    if not comparisons:
        return []
    rows = [_row(comparison) for comparison in comparisons]
    rows = [[elided(row[0], NAME_COLUMNS[0]), elided(row[1], NAME_COLUMNS[1]), *row[2:]] for row in rows]
    return [*plain_table(HEADERS, rows), "", counts(comparisons), *note_lines(comparisons, width)]


def note_lines(comparisons: Iterable[Comparison], width: int = WIDTH) -> list[str]:
    """What happened to each kernel that is not as before, and what to do; the same thing is said once for all."""
    lines: list[str] = []
    for names, comparison in _alike(comparison for comparison in comparisons if comparison.outcome not in QUIET):
        lines += wrapped(f"{names}: {comparison.outcome.value}: {comparison.message}", width)
        if comparison.advice:
            lines += wrapped(f"next: {comparison.advice}", width, first=INDENT)
    return lines


def counts(comparisons: Iterable[Comparison]) -> str:
    """How many of each outcome, the bad ones first."""
    found = Counter(comparison.outcome for comparison in comparisons)
    ordered = sorted(found, key=lambda outcome: (not outcome.bad, list(ComparisonOutcome).index(outcome)))
    return ", ".join(f"{found[outcome]} {outcome.value.replace('_', ' ')}" for outcome in ordered)


def comparisons_markdown(comparisons: Sequence[Comparison], *, failing: bool) -> str:
    """A section for a pull request: verdict in one line, table, notes. `failing` says whether bad outcomes fail it."""
    if not comparisons:
        return ""
    against = ", ".join(dict.fromkeys(compared_with(comparison) for comparison in comparisons))
    margins = ", ".join(dict.fromkeys(f"{100 * comparison.margin:.3g} %" for comparison in comparisons))
    bad = sum(comparison.outcome.bad for comparison in comparisons)
    mode = "" if failing else " (advisory: nothing fails)"
    rows = [[_cell(cell) for cell in _row(comparison)] for comparison in comparisons]
    lines = [
        f"## Kernels compared with {_cell(against)}",
        "",
        f"**{counts(comparisons)}**{mode}. Margin {margins}.",
        "",
    ]
    lines.append(tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True))
    notes = _alike(comparison for comparison in comparisons if comparison.outcome not in QUIET)
    if notes:
        lines.append("")
    for names, comparison in notes:
        advice = f" Next: {comparison.advice}." if comparison.advice else ""
        lines.append(_cell(f"- {names}: {comparison.outcome.value}: {comparison.message}.{advice}"))
    if bad and failing:
        lines += ["", f"{bad} of {len(comparisons)} fail."]
    return "\n".join(lines) + "\n"


def compared_with(comparison: Comparison) -> str:
    """Whom a kernel was compared with, in words."""
    return "the base" if comparison.against == "base" else f"baseline {comparison.against}"


def annotations_of(comparisons: Iterable[Comparison], *, failing: bool) -> list[Annotation]:
    """One for each kernel that became slower, broken or faster, or that could not be compared; worst first."""
    found = []
    for comparison in comparisons:
        if comparison.outcome in (ComparisonOutcome.FASTER, ComparisonOutcome.BASE_FAILED):
            level = "notice" if comparison.outcome is ComparisonOutcome.FASTER else "warning"
        elif comparison.outcome.bad:
            level = "error" if failing else "warning"
        else:
            continue
        title = f"{comparison.outcome.value.replace('_', ' ')}: {comparison.case} {comparison.kernel}".rstrip()
        message = comparison.message + (f"; next: {comparison.advice}" if comparison.advice else "")
        found.append(Annotation(level, title, message, comparison.file, comparison.line))
    return found


def annotation_lines(found: Iterable[Annotation]) -> list[str]:
    """Workflow commands, one a line, errors first, at most ANNOTATIONS of each level."""
    kept: list[str] = []
    seen: Counter[str] = Counter()
    for item in sorted(found, key=lambda item: ("error", "warning", "notice").index(item.level)):
        seen[item.level] += 1
        if seen[item.level] > ANNOTATIONS:
            continue
        given = {"file": item.file, "line": str(item.line) if item.line and item.file else "", "title": item.title}
        properties = ",".join(f"{name}={_property(value)}" for name, value in given.items() if value)
        kept.append(f"::{item.level} {properties}::{_data(item.message[:MESSAGE_CHARACTERS])}")
    return kept


def _alike(comparisons: Iterable[Comparison]) -> list[tuple[str, Comparison]]:
    """Comparisons that say the same, once, with the names of all kernels that it is said of."""
    groups: dict[tuple[ComparisonOutcome, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.outcome, comparison.message, comparison.advice), []).append(comparison)
    return [(", ".join(f"{c.case} {c.kernel}".rstrip() for c in group), group[0]) for group in groups.values()]


def _row(comparison: Comparison) -> list[str]:
    return [
        comparison.case,
        comparison.kernel or "-",
        _speedup(comparison.old),
        _speedup(comparison.new),
        change_text(comparison.ratio) if comparison.ratio else "-",
        comparison.outcome.value.replace("_", " "),
    ]


def _speedup(interval: Interval | None) -> str:
    return f"{interval.estimate:.3f}x" if interval else "-"


def _cell(text: str) -> str:
    """Text that stays in its cell, or in its line, and is no markup of a browser's."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "\\`")


def _data(text: str) -> str:
    """A message as a workflow command wants it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A property as a workflow command wants it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
