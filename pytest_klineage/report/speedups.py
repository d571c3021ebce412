"""Tables and bars of speedups and latencies, by method and by language. Means have their coverage beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pytest_klineage.records import Status, Verdict
from pytest_klineage.report import paper
from pytest_klineage.report.aggregate import geometric_mean, uncertain
from pytest_klineage.report.details import of_step, of_verdict
from pytest_klineage.report.document import (
    Cell,
    Details,
    Figure,
    FigureKind,
    Mark,
    Point,
    Section,
    Series,
    Table,
    Tone,
    columns,
)
from pytest_klineage.report.outcomes import (
    Attempt,
    Result,
    method_order,
    ordered_cases,
    reference_of,
    several_languages,
)
from pytest_klineage.report.steps import mark_of
from pytest_klineage.report.table_cells import (
    FAIL,
    NOTHING,
    floor_cell,
    named,
    share,
    time_cell,
    times,
    width_cell,
    with_floors,
)
from pytest_klineage.report.tables import UNCERTAIN, ratio
from pytest_klineage.results.runs import Record, Run

FAILURES = "A kernel without a speedup is no 1.0x: it lowers the coverage and is not in the mean."
COMPETING = "Where several kernels share a case there is no mean."
CASE = ("device", "case")
SAME = ("device", "language", "reference")
"""Columns that are worth their room only where rows differ."""


def speedup_section(found: Sequence[Result], details: Details) -> Section:
    """Every method on every case: bars with intervals (the paper's Figure 3) and the table behind them."""
    tables = (speedup_table(found, details).condensed(*SAME), mean_table(found).condensed("device", "language"))
    return Section(
        key="speedups",
        title="Speedup over the reference",
        text="Reference time over kernel time; above 1x the kernel is faster. Of each method's attempts the one whose "
        f"interval begins highest, with the 95 % interval of its own measurement. {FAILURES}",
        figures=tuple(speedup_bars(found, details)),
        tables=tables,
    )


def speedup_table(found: Sequence[Result], details: Details) -> Table:
    """One row for every result."""
    names = (*CASE, "method", "language", *MEASURED, "reference", "with a kernel", "outcome")
    rows = tuple(_speedup_row(one, details) for one in ordered(found))
    unsure = any(_unsure(one.best) for one in found)
    note = f"{UNCERTAIN} says little: the machine was busy, or the interval spans more than a factor of two."
    heads = columns(*names, numeric=(*MEASURED, "with a kernel"))
    table = Table("Speedups", heads, rows, notes=(note,) if unsure else ())
    return with_floors(table, [one.best.verdict for one in found if one.best.verdict is not None])


def mean_table(found: Sequence[Result]) -> Table:
    """Geometric mean over scored cases with its coverage, for each device, method and language."""
    groups: dict[tuple[str, str, str], list[Attempt]] = {}
    for one in ordered(found):
        groups.setdefault((one.best.device, one.best.method, one.best.surface), []).append(one.best)
    order = method_order(method for _, method, _ in groups)
    rows = []
    for key, group in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]), item[0][2])):
        speeds = [one.speedup for one in group if one.speedup is not None]
        reached = sum(speed >= 1.0 for speed in speeds)
        mean = times(None if _compete(group) else geometric_mean(speeds))
        rows.append((*map(named, key), mean, share(len(speeds), len(group)), share(reached, len(group))))
    figures = ("geomean of successes", "coverage", "at or above 1x")
    heads = columns("device", "method", "language", *figures, numeric=figures)
    return Table("Means", heads, tuple(rows), notes=(FAILURES, COMPETING))


def _compete(group: Sequence[Attempt]) -> bool:
    """Whether several kernels of a group share a case: a mean over them would describe no kernel."""
    return len({(one.case_id, reference_of(one)) for one in group}) < len(group)


def ordered(found: Sequence[Result]) -> list[Result]:
    """Results by device and case, and known methods first in each."""
    methods = method_order(one.best.method for one in found)
    return sorted(found, key=lambda one: (one.best.device, one.best.case_id, methods.index(one.best.method),
                                          one.best.surface))  # fmt: skip


def speedup_bars(found: Sequence[Result], details: Details) -> list[Figure]:
    """One figure for each device."""
    figures = []
    methods = method_order(one.best.method for one in found)
    for number, device in enumerate(sorted({one.best.device for one in found})):
        here = [one for one in found if one.best.device == device]
        cases = list(dict.fromkeys(_category(one.best) for one in ordered(here)))
        variants = dict.fromkeys((one.best.method, one.best.surface) for one in ordered(here))
        series = [
            Series(
                _variant(method, surface, variants),
                methods.index(method),
                _bars(here, (method, surface), cases, details),
            )
            for method, surface in sorted(variants, key=lambda name: (methods.index(name[0]), name[1]))
        ]
        figures.append(
            Figure(
                key=f"speedups-{number}" if number else "speedups", kind=FigureKind.BARS,
                title=f"Speedup over the reference, {device}", x_label="case", y_label="speedup (x)",
                series=tuple(series), categories=tuple(cases), parity="reference",
            )
        )  # fmt: skip
    return figures


def latency_section(found: Sequence[Result]) -> Section:
    """Median times by method, in the form of the paper's Table 5, and by language, as in its Table 6."""
    methods = method_order(one.best.method for one in found)
    tables = [_latencies("Latency by method, ms", found, methods, lambda one: one.method)]
    languages = sorted({one.best.surface for one in found if one.best.surface})
    if several_languages(found):
        tables.append(_latencies("Latency by language, ms", found, languages, lambda one: one.surface))
    text = "Medians in milliseconds; lower is better. The reference is the one that each kernel was timed beside."
    return Section(key="latencies", title="Latencies", text=text, tables=tuple(tables))


def setup_section(verdicts: Sequence[Verdict]) -> Section:
    """What was run and on what, in the form of the paper's Table 2."""
    rows: dict[tuple[str, ...], tuple[Cell, ...]] = {}
    for verdict in verdicts:
        machine = verdict.machine
        shape = ", ".join(f"{axis}={size}" for axis, size in verdict.case.shape.items())
        options = ", ".join(f"{name}={value}" for name, value in verdict.case.options.items())
        software = {**(machine.software if machine else {}), **verdict.reference}
        versions = [
            f"{name} {software[name]}" for name in ("torch", "cuda", "driver", "flashinfer") if name in software
        ]
        texts = (paper.OPERATORS.get(verdict.case.operator, verdict.case.operator),
                 "; ".join(part for part in (shape, options) if part), verdict.case.dtype,
                 verdict.reference.get("label") or verdict.case.reference,
                 machine.device if machine else NOTHING, ", ".join(versions) or NOTHING)  # fmt: skip
        rows.setdefault(texts[:5], tuple(map(named, texts)))
    heads = columns("kernel", "shape", "type", "reference", "device", "software")
    table = Table("Workloads", heads, tuple(rows.values())).condensed("device", "software")
    return Section(key="setup", title="Setup", tables=(table,))


def _unsure(one: Attempt) -> bool:
    return one.verdict is not None and one.speedup is not None and uncertain(one.verdict)


def _key(one: Attempt, details: Details) -> str:
    if one.optimization is not None and one.step is not None:
        return of_step(one.optimization, one.step, details)
    if one.verdict is None:
        return ""
    return of_verdict(one.verdict, f"verdict:{one.trial}:{one.case_id}:{one.verdict.source_digest[:16]}", details)


def _reason(one: Attempt) -> str:
    return one.code.value if one.code is not None else "no kernel"


def _speedup_row(result: Result, details: Details) -> tuple[Cell, ...]:
    one = result.best
    reference, kernel = one.milliseconds or (None, None)
    scored = one.speedup is not None
    text = f"{UNCERTAIN if _unsure(one) else ''}{ratio(one.speedup)}x" if one.speedup is not None else NOTHING
    return (
        named(one.device),
        named(one.case_id, detail=_key(one, details)),
        named(one.name),
        named(one.surface),
        Cell(text, one.speedup, Tone.GOOD if (one.speedup or 0.0) >= 1.0 else Tone.PLAIN),
        width_cell(one.interval),
        time_cell(kernel),
        floor_cell(one.verdict),
        time_cell(reference),
        named(reference_of(one)),
        share(result.succeeded, result.attempts),
        named(_reason(one), Tone.PLAIN if scored else Tone.BAD),
    )


def _category(one: Attempt) -> str:
    """What a group of bars is called: the case, and the kernel where several are judged on one."""
    return f"{one.case_id} {one.kernel}".rstrip()


def _variant(method: str, surface: str, variants: Collection[tuple[str, str]]) -> str:
    """A method's name, with the language where it has several."""
    return f"{method}, {surface}" if sum(name == method for name, _ in variants) > 1 else method


def _bars(
    here: Sequence[Result], variant: tuple[str, str], cases: Sequence[str], details: Details
) -> tuple[Point, ...]:
    points = []
    for result in here:
        one, interval = result.best, result.best.interval
        if (one.method, one.surface) != variant:
            continue
        mark = mark_of(one.code, one.speedup) if one.code is not None else Mark.FAILED
        text = f"{one.name} on {one.case_id}: " + (f"{ratio(one.speedup)}x" if one.speedup else _reason(one))
        if interval is not None:
            text += f" [{ratio(interval.low)}, {ratio(interval.high)}]"
        points.append(
            Point(
                x=cases.index(_category(one)), y=one.speedup, text=text, mark=mark,
                low=interval.low if interval else None, high=interval.high if interval else None,
                detail=_key(one, details),
            )
        )  # fmt: skip
    return tuple(points)


def _latencies(title: str, found: Sequence[Result], names: Sequence[str], name_of: Callable[[Attempt], str]) -> Table:
    """A column for each name with the best time, and the reference's beside the fastest of them."""
    figures = (*(f"{name} ms" for name in names), "reference ms")
    rows = []
    for _, device, case in ordered_cases(found):
        here = [one.best for one in found if one.best.device == device and one.best.case_id == case]
        best = {name: _fastest([one for one in here if name_of(one) == name]) for name in names}
        cells = [_latency(one) for one in best.values()]
        known = [one.milliseconds[0] for one in best.values() if one is not None and one.milliseconds is not None]
        rows.append((named(device), named(case), *cells, time_cell(min(known, default=None))))
    notes = ("FAIL: the method brought no kernel that passed the gate.",)
    failed = any(cell.tone is Tone.BAD for row in rows for cell in row)
    heads = columns(*CASE, *figures, numeric=figures)
    return Table(title, heads, tuple(rows), notes=notes if failed else ()).condensed("device")


def _fastest(group: Sequence[Attempt]) -> Attempt | None:
    return max(group, key=lambda one: one.speedup or 0.0, default=None)


def _latency(one: Attempt | None) -> Cell:
    if one is None:
        return time_cell(None)
    if one.milliseconds is not None:
        return time_cell(one.milliseconds[1])
    return Cell(f"{ratio(one.speedup)}x", None) if one.speedup is not None else FAIL


MEASURED = ("speedup", "95 % interval", "kernel ms", "floor", "reference ms")
COLUMNS = columns("case", "kernel", "status", "reason", *MEASURED, "reference", numeric=MEASURED)
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
    title = run.info.name if run.info is not None and run.info.name else run.path.name
    table = Table(f"Verdicts of {title}", COLUMNS, tuple(_row(record, details) for record in run.records))
    return with_floors(table, [record.verdict for record in run.records])


def _row(record: Record, details: Details) -> tuple[Cell, ...]:
    verdict = record.verdict
    key = of_verdict(verdict, f"record:{record.nodeid}:{verdict.case.id}:{verdict.judged_at}", details)
    timing = verdict.timing if verdict.scored else None
    return (
        named(verdict.case.id, detail=key),
        named(verdict.label),
        named(verdict.status.value, TONES.get(verdict.status, Tone.BAD)),
        named(verdict.code.value),
        times(timing.speedup.estimate if timing else None),
        width_cell(timing.speedup if timing else None),
        time_cell(timing.candidate_ms if timing else None),
        floor_cell(verdict),
        time_cell(timing.reference_ms if timing else None),
        named(verdict.reference.get("label") or verdict.case.reference),
    )
