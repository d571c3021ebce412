"""Speedup tables as text: for a terminal (at most 100 columns) and as Markdown. Nothing is computed here."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pytest_klineage.records import Status, Verdict
from pytest_klineage.records.facts import MEASURED, NO_PART, SLOWER_SEARCH, VERSION_NOTE
from pytest_klineage.report import builds
from pytest_klineage.report.advice import next_step
from pytest_klineage.report.aggregate import by_kernel, summarise, uncertain
from pytest_klineage.report.builds import build_summary, only_built
from pytest_klineage.report.wording import in_one_line
from pytest_klineage.results.runs import Run

WIDTH = 100
HEADERS = ("case", "kernel", "ref", "ref ms", "cand ms", "speedup", "status")
ALIGNMENT = ("left", "left", "left", "right", "right", "left", "left")
SHRINKABLE = ((1, 14), (0, 20), (2, 6), (1, 6))
"""Columns that give way when a table is too wide, in turn, and what is left of each."""
UNCERTAIN = "~"
"""Stands before a speedup that says little: see `aggregate.uncertain`."""
NOTE_LINES = 3
"""About as long as the findings of one verdict may be in the notes."""
ONE_LINE = 100_000
"""Width of what is wrapped by whoever shows it."""


def table_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """The speedup table for a terminal: one line per verdict, no line wider than `width`."""
    if not verdicts:
        return []
    layout = _layout(verdicts)
    rows = _fitted([layout.row(verdict) for verdict in verdicts], width, layout)
    # The headers go in as a row: as headers they would be padded by two columns each.
    rule = ["-" * size for size in _widths([list(layout.headers), *rows])]
    table = tabulate([layout.headers, rule, *rows], tablefmt="plain", colalign=layout.alignment, disable_numparse=True)
    return [line.rstrip() for line in table.splitlines()]


def summary_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Geometric mean and coverage, one line for all kernels or one for each method; then what they rest on unsafely.

    Of a compile stage: how many were built.
    """
    if only_built(verdicts):
        return [build_summary(verdicts)]
    lines = [line for line in _sweeps(verdicts) for line in _wrapped(line, width, indent="    ")]
    lines += [_geomean(group, label) for label, group in by_kernel(verdicts).items()]
    doubtful = [verdict for verdict in verdicts if uncertain(verdict)]
    if doubtful:
        scored = sum(verdict.scored for verdict in verdicts)
        names = ", ".join(map(_name, doubtful))
        why = "busy machine, unstable times, or high/low above 2"
        text = f"{UNCERTAIN} {len(doubtful)} of {scored} speedups uncertain ({why}): {names}"
        lines += _wrapped(text, width, indent="    ")
    return lines


def note_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Why a verdict is not a plain acceptance, with the next step; then what is amiss with references."""
    lines: list[str] = []
    for verdict in verdicts:
        if verdict.status is Status.ACCEPTED:
            continue
        name = _name(verdict)
        text = f"{name}: {in_one_line(verdict.reasons, NOTE_LINES * width - len(name))}"
        lines += _wrapped(text, width, indent="    ")
        lines += ["    " + line for line in _wrapped(f"next: {next_step(verdict)}", width - 4)]
    for note in _reference_notes(verdicts):
        lines += _wrapped(f"note: {note}", width, indent="    ")
    return lines


def _reference_notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Versions of references that have not been checked, libraries that failed, and searches in vain, each once."""
    facts = [fact for verdict in verdicts for fact in verdict.reference.items()]
    versions = [said for key, said in facts if key.partition(".")[0] == VERSION_NOTE]
    return list(
        dict.fromkeys(
            [*versions, *(note for item in verdicts for note in item.notes if NO_PART in note or SLOWER_SEARCH in note)]
        )
    )


def terminal_report(run: Run, width: int = WIDTH) -> str:
    """A run's table, mean and notes as they stand at the end of the test run."""
    verdicts = [record.verdict for record in run.records]
    lines = [*_heading(run), "", *table_lines(verdicts, width), "", *summary_lines(verdicts)]
    notes = note_lines(verdicts, width)
    lines += ["", *notes] if notes else []
    lines += [f"warning: {warning}" for warning in run.warnings]
    return "\n".join(lines) + "\n"


def markdown_report(run: Run) -> str:
    """A run as a Markdown section: heading, provenance, table, mean and notes."""
    verdicts = [record.verdict for record in run.records]
    layout = _layout(verdicts)
    rows = [[_escaped(cell) for cell in layout.row(verdict)] for verdict in verdicts]
    table = ""
    if rows:
        table = tabulate(rows, layout.headers, tablefmt="pipe", colalign=layout.alignment, disable_numparse=True)
    heading, *provenance = _heading(run)
    lines = [f"## {heading}", "", *(f"- {line}" for line in provenance), *_references(verdicts), "", table, ""]
    lines += [f"**{line}**  " for line in summary_lines(verdicts, ONE_LINE)]
    notes = [
        f"- `{_escaped(_name(verdict))}`: {_escaped(in_one_line(verdict.reasons))}"
        for verdict in verdicts
        if verdict.status is not Status.ACCEPTED
    ]
    lines += ["", *notes] if notes else []
    lines += ["", *(f"> {warning}" for warning in run.warnings)] if run.warnings else []
    return "\n".join(lines).rstrip() + "\n"


def milliseconds(value: float) -> str:
    """A time with about four significant digits, never in exponent form."""
    if value >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}" if value >= 1 else f"{value:.4f}"


def ratio(value: float) -> str:
    """A speedup with two digits behind the point, and with more where it is tiny."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def speedup_text(verdict: Verdict) -> str:
    """A speedup with its interval, such as "3.42x [3.38, 3.46]"; "-" where nothing was measured that counts."""
    if verdict.timing is None or not verdict.scored:
        return "-"
    interval = verdict.timing.speedup
    return f"{ratio(interval.estimate)}x [{ratio(interval.low)}, {ratio(interval.high)}]"


class _Layout(NamedTuple):
    """A table's columns."""

    headers: tuple[str, ...]
    alignment: tuple[str, ...]
    shrinkable: tuple[tuple[int, int], ...]
    row: Callable[[Verdict], list[str]]


def _layout(verdicts: Sequence[Verdict]) -> _Layout:
    """Times, or what the compile stage has instead."""
    if only_built(verdicts):
        return _Layout(builds.HEADERS, builds.ALIGNMENT, builds.SHRINKABLE, builds.build_row)
    return _Layout(HEADERS, ALIGNMENT, SHRINKABLE, _row)


def _row(verdict: Verdict) -> list[str]:
    timing = verdict.timing if verdict.scored else None
    return [
        verdict.case.id,
        verdict.label or "-",
        verdict.case.reference,
        milliseconds(timing.reference_ms) if timing else "-",
        milliseconds(timing.candidate_ms) if timing else "-",
        (UNCERTAIN if uncertain(verdict) else "") + speedup_text(verdict),
        verdict.status.value,
    ]


def _fitted(rows: list[list[str]], width: int, layout: _Layout) -> list[list[str]]:
    """Rows whose table is at most `width` wide, shortened in the columns that may be."""
    for column, least in layout.shrinkable:
        widths = _widths([list(layout.headers), *rows])
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        if excess <= 0:
            break
        size = max(least, widths[column] - excess)
        rows = [[_elided(cell, size) if index == column else cell for index, cell in enumerate(row)] for row in rows]
    return rows


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _elided(text: str, size: int) -> str:
    """At most `size` characters: the middle gives way, because both ends of a case's name say something."""
    if len(text) <= size:
        return text
    head = (size - 2 + 1) // 2
    tail = size - 2 - head
    return f"{text[:head]}..{text[len(text) - tail :]}"


def _sweeps(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for every operator that one kernel was judged on at several shapes: its mean, and the worst of them."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in verdicts:
        case = verdict.case
        key = (case.operator, case.dtype, case.reference, repr(sorted(case.options.items())), verdict.label)
        groups.setdefault(key, []).append(verdict)
    return [_sweep(group) for group in groups.values() if len({str(item.case.shape) for item in group}) > 1]


def _sweep(verdicts: Sequence[Verdict]) -> str:
    """One operator's line."""
    case, timed = verdicts[0].case, [item for item in verdicts if item.scored and item.timing is not None]
    name = " ".join(filter(None, (case.operator, case.dtype, verdicts[0].label)))
    summary = summarise(verdicts)
    if not timed or summary.geomean is None:
        return f"{name}: none of {len(verdicts)} shapes scored"
    worst = min(timed, key=lambda item: item.timing.speedup.estimate if item.timing else 0.0)
    where = "x".join(map(str, worst.case.shape.values()))
    mean = f"geomean {ratio(summary.geomean)}x over {len(timed)} of {len(verdicts)} shapes"
    return f"{name}: {mean}, worst {ratio(worst.timing.speedup.estimate if worst.timing else 0.0)}x at {where}"


def _geomean(verdicts: Sequence[Verdict], label: str) -> str:
    summary = summarise(verdicts)
    whose = f" ({label})" if label else ""
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    if summary.geomean is None:
        return f"no geomean: 0 of {summary.judged} scored{skipped}{whose}"
    return f"geomean {ratio(summary.geomean)}x over {summary.scored} of {summary.judged} scored{skipped}{whose}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width`; names with hyphens stay whole where they can."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _name(verdict: Verdict) -> str:
    return f"{verdict.case.id} {verdict.label}".rstrip()


def _heading(run: Run) -> list[str]:
    """What a reader must know before the numbers: where and when they were taken."""
    machines = {record.verdict.machine.device for record in run.records if record.verdict.machine is not None}
    policies = {record.verdict.timing.policy for record in run.records if record.verdict.timing is not None}
    if run.info is None:
        return [f"klineage: {run.path.name}"]
    title = f"klineage: {run.info.name or run.path.name}, {run.info.platform}, {len(run.records)} verdicts"
    facts: list[tuple[str, str]] = [("started", run.info.started_at)]
    facts.append(("machine", ", ".join(sorted(machines)) or (run.info.machine.device if run.info.machine else "")))
    facts.append(("timing policy", ", ".join(sorted(policies))))
    return [title, *(f"{name}: {value}" for name, value in facts if value)]


def _references(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per reference that was really used: its label with versions and flags, without what it took."""
    described: dict[str, None] = {}
    for verdict in verdicts:
        if verdict.reference:
            told = {key: value for key, value in verdict.reference.items() if not key.startswith(MEASURED)}
            facts = ", ".join(f"{key} {value}" for key, value in told.items())
            described.setdefault(f"- reference of {verdict.case.id}: {_escaped(facts)}")
    return list(described)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
