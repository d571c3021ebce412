"""Every record of the runs, one row each: failures, skips and builds stand beside what was scored."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_klineage.records import Status, Verdict
from pytest_klineage.report.behind import of_verdict
from pytest_klineage.report.cells import NOTHING, time_cell, times
from pytest_klineage.report.document import Cell, Column, Details, Section, Table, Tone
from pytest_klineage.report.tables import ratio
from pytest_klineage.results.runs import Record, Run

NUMERIC = frozenset({"speedup", "95 % interval", "kernel ms", "reference ms"})
COLUMNS = ("case", "kernel", "status", "reason", "speedup", "95 % interval", "kernel ms", "reference ms", "reference")
TONES = {Status.ACCEPTED: Tone.GOOD, Status.SKIPPED: Tone.QUIET, Status.INCONCLUSIVE: Tone.PLAIN}
"""Statuses whose cells do not look like a failure."""


def records_section(runs: Sequence[Run], details: Details) -> Section:
    """One table for each run, with a row for each of its records in the order of judgement."""
    return Section(
        key="verdicts",
        title="Every verdict",
        text="All records of these runs, whether scored or not. A name opens the reasons and the logs.",
        tables=tuple(_table(run, details) for run in runs if run.records),
    )


def _table(run: Run, details: Details) -> Table:
    columns = tuple(Column(name, numeric=name in NUMERIC) for name in COLUMNS)
    title = run.info.name if run.info is not None and run.info.name else run.path.name
    return Table(f"Verdicts of {title}", columns, tuple(_row(record, details) for record in run.records))


def _row(record: Record, details: Details) -> tuple[Cell, ...]:
    verdict = record.verdict
    key = of_verdict(verdict, f"record:{record.nodeid}:{verdict.case.id}:{verdict.judged_at}", details)
    reference = verdict.reference.get("label") or verdict.case.reference
    return (
        Cell(verdict.case.id, verdict.case.id, detail=key),
        Cell(verdict.label or NOTHING, verdict.label or None),
        Cell(verdict.status.value, verdict.status.value, TONES.get(verdict.status, Tone.BAD)),
        Cell(verdict.code.value, verdict.code.value),
        *_measured(verdict),
        Cell(reference, reference),
    )


def _measured(verdict: Verdict) -> tuple[Cell, ...]:
    """Speedup, interval and both times; none of them for a kernel that was not scored."""
    timing = verdict.timing if verdict.scored else None
    if timing is None:
        return (times(None), Cell(NOTHING, None, Tone.QUIET), time_cell(None), time_cell(None))
    interval = timing.speedup
    width = Cell(f"{ratio(interval.low)} to {ratio(interval.high)}", interval.low, Tone.QUIET)
    return (times(interval.estimate), width, time_cell(timing.candidate_ms), time_cell(timing.reference_ms))
