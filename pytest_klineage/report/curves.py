"""Curves: running best against dollars, steps of optimizations, and latency along lineages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_klineage.records import Lineage, Verdict
from pytest_klineage.report.collect import ReadLineage
from pytest_klineage.report.details import of_rejection, of_state, of_step
from pytest_klineage.report.document import (
    Cell,
    Details,
    Figure,
    FigureKind,
    Line,
    Mark,
    Point,
    Section,
    Series,
    Table,
    Tone,
    columns,
)
from pytest_klineage.report.outcomes import method_order, study_of
from pytest_klineage.report.steps import Optimization, ReportedStep, running_best
from pytest_klineage.report.table_cells import NONE, counted_cell, named, time_cell, times
from pytest_klineage.report.tables import milliseconds, ratio

DOLLARS, STEPS = "charged for model calls ($)", "step"


def cost_section(found: Sequence[Optimization], details: Details) -> Section:
    """Running best against dollars for each case (the paper's Figure 4), and what each run came to."""
    methods = method_order(one.method for one in found)
    positions: dict[tuple[str, str, str], list[Optimization]] = {}
    for one in found:
        positions.setdefault((study_of(one.path), one.platform, one.case_id), []).append(one)
    figures = []
    for (study, platform, case), here in sorted(positions.items()):
        dollars = any(one.spent_usd > 0 for one in here)
        series = [
            Series(one.method, methods.index(one.method), _best_points(one, details, dollars), Line.STEPS)
            for one in here
        ]
        key, title = _key("cost", study, platform, case), f"{case}, {platform}{_over_expert(study)}"
        figures.append(_speedups(key, title, series, dollars, "best speedup so far (x)"))
    text = (
        "Highest estimate of a kernel that passed the gate so far, by what the model calls had cost. Each line is one "
        "run; a method without a line brought no kernel."
    )
    return Section(
        key="cost", title="Running best over cost", text=text, figures=tuple(figures), tables=(run_table(found),)
    )


def step_section(found: Sequence[Optimization], details: Details) -> Section:
    """Every step of every run, failed ones and wrappers included (the paper's Figure 6)."""
    methods = method_order(one.method for one in found)
    groups: dict[tuple[str, ...], list[Optimization]] = {}
    for one in found:
        groups.setdefault((study_of(one.path), one.platform, one.case_id, one.method), []).append(one)
    figures = [
        _steps(one, number if len(group) > 1 else 0, methods.index(one.method), details)
        for group in groups.values()
        for number, one in enumerate(group, start=1)
    ]
    text = "Each mark is one submission. Failed steps and wrappers have no speedup: they stand below the axis."
    return Section(key="steps", title="Steps", text=text, figures=tuple(figures))


def _steps(one: Optimization, number: int, colour: int, details: Details) -> Figure:
    """The steps of one run; `number` distinguishes several runs of one method, 0 where there is one."""
    dollars = one.spent_usd > 0
    run = f", run {number}" if number else ""
    key = _key("steps", study_of(one.path), one.platform, one.case_id, one.method, str(number or 1))
    title = f"{one.method} on {one.case_id}, {one.platform}{run}{_over_expert(study_of(one.path))}"
    series = [
        Series("steps", colour, _step_points(one, details)),
        Series("running best", colour, _best_points(one, details, dollars), Line.STEPS),
    ]
    return _speedups(key, title, series, dollars, "speedup (x)")


def _speedups(key: str, title: str, series: Sequence[Series], dollars: bool, y_label: str) -> Figure:
    """Speedups over dollars, or over steps where nothing was charged."""
    return Figure(
        key=key, kind=FigureKind.CURVES, title=title, x_label=DOLLARS if dollars else STEPS, y_label=y_label,
        series=tuple(series), parity="reference",
    )  # fmt: skip


def run_table(found: Sequence[Optimization]) -> Table:
    """One row for each optimization; excludes the initial kernel."""
    figures = ("steps", "scored", "wrappers", "failed", "spent $", "budget $", "best", "best at $")
    heads = columns("method", "case", "platform", "model", *figures, "ended", numeric=figures)
    return Table("Runs", heads, tuple(map(_run_row, found))).condensed("platform", "model", "budget $")


def lineage_section(found: Sequence[ReadLineage], details: Details) -> Section:
    """Latency along each lineage from expert to naive, with what was refused (the paper's Figure 5)."""
    text = (
        "Read from left to right as the walk went: each step takes one optimization away from the expert kernel. "
        "Crosses are proposals that were refused there."
    )
    return Section(
        key="lineages",
        title="Deoptimization traces",
        text=text,
        figures=tuple(_trace(read, details) for read in found),
        tables=(state_table(found, details),),
    )


def state_table(found: Sequence[ReadLineage], details: Details) -> Table:
    """Every state of every lineage, naive first."""
    figures = ("kernel ms", "over naive", "step", "refused")
    heads = columns("lineage", "state", "adds", *figures, "outcome", numeric=figures)
    rows = tuple(row for read in found for row in _state_rows(read, details))
    notes = ("step: time before over time after it, measured as a pair. over naive: from the states' own times.",)
    return Table("States of the lineages", heads, rows, notes=notes)


def _trace(read: ReadLineage, details: Details) -> Figure:
    lineage = read.record
    last = len(lineage.states) - 1
    steps = [f"without {step.category.value}" for step in reversed(lineage.transitions)]
    states = tuple(
        Point(
            x=last - index,
            y=_ms(state.verdict),
            text=f"{state.name}: {_time_text(state.verdict)}",
            mark=Mark.SCORED if _ms(state.verdict) is not None else Mark.FAILED,
            detail=of_state(read, index, details),
        )
        for index, state in reversed(list(enumerate(lineage.states)))
    )
    series = [Series("states", 0, states, Line.STRAIGHT)]
    refused = tuple(_refusals(read, details))
    if refused:
        series.append(Series("refused", 5, refused))
    return Figure(
        key=_key("lineage", lineage.name),
        kind=FigureKind.CURVES,
        title=f"{lineage.name}{', hand-made' if lineage.hand_made else ''}: {lineage.case.id}",
        x_label="from expert to naive",
        y_label="kernel (ms)",
        series=tuple(series),
        categories=("expert", *steps),
    )


def _refusals(read: ReadLineage, details: Details) -> list[Point]:
    """Refused proposals at the state that they were made for: the one after the step, or the first state."""
    lineage = read.record
    last = len(lineage.states) - 1
    positions = [(last, lineage.rejected)]
    positions += [(last - number, step.rejected) for number, step in enumerate(lineage.transitions, start=1)]
    return [
        Point(
            x=position + min(0.12, 0.8 / len(rejections)) * (number + 1),
            y=_ms(rejection.verdict),
            text=f"refused, {rejection.category.value}: {rejection.reason}",
            mark=Mark.REJECTED,
            detail=of_rejection(read, position, number, rejection, details),
        )
        for position, rejections in sorted(positions, key=lambda item: item[0])
        for number, rejection in enumerate(rejections)
    ]


def _state_rows(read: ReadLineage, details: Details) -> list[tuple[Cell, ...]]:
    lineage: Lineage = read.record
    naive = _ms(lineage.states[0].verdict) if lineage.states else None
    rows: list[tuple[Cell, ...]] = []
    for index, state in enumerate(lineage.states):
        step = lineage.transitions[index - 1] if index else None
        own, effect = _ms(state.verdict), step.effect if step is not None else None
        refused = len(step.rejected if step is not None else lineage.rejected)
        rows.append(
            (
                Cell(lineage.name, f"{lineage.name} {index:03d}"),
                Cell(state.name, f"{lineage.name} {index:03d}", detail=of_state(read, index, details)),
                Cell(step.category.value if step is not None else NONE.text),
                time_cell(own),
                times(naive / own if naive and own else None),
                times(effect.estimate if effect else None),
                counted_cell(refused),
                _outcome(state.verdict),
            )
        )
    return rows


def _best_points(one: Optimization, details: Details, dollars: bool) -> tuple[Point, ...]:
    """Steps that were better than all before, and the end of the line where the money ended."""
    points = [
        Point(
            x=step.cost_usd if dollars else step.number,
            y=best,
            text=f"{one.method}, step {step.number}: {ratio(best)}x",
            detail=of_step(one, step, details),
        )
        for step, best in running_best(one.steps)
    ]
    if points:
        end = one.spent_usd if dollars else one.steps[-1].number
        last = points[-1]
        points.append(
            Point(x=end, y=last.y, text=f"{one.method}: ended at {ratio(last.y or 0.0)}x", detail=last.detail)
        )
    return tuple(points)


def _step_points(one: Optimization, details: Details) -> tuple[Point, ...]:
    dollars = one.spent_usd > 0
    return tuple(
        Point(
            x=step.cost_usd if dollars else step.number,
            y=step.speedup,
            mark=step.mark,
            text=_step_text(step),
            low=step.interval.low if step.interval else None,
            high=step.interval.high if step.interval else None,
            detail=of_step(one, step, details),
        )
        for step in one.steps
    )


def _step_text(step: ReportedStep) -> str:
    what = f"{ratio(step.speedup)}x" if step.speedup is not None else (step.code.value if step.code else "no kernel")
    return f"step {step.number}, ${step.cost_usd:.2f}: {what}"


def _run_row(one: Optimization) -> tuple[Cell, ...]:
    marks = [step.mark for step in one.steps if not step.is_root]
    best = one.best
    right = marks.count(Mark.SCORED) + marks.count(Mark.SCREENED)
    counts = [right, marks.count(Mark.WRAPPER), marks.count(Mark.FAILED)]
    return (
        *map(named, (one.method, one.case_id, one.platform, one.model)),
        *map(counted_cell, (len(marks), *counts)),
        _dollars(one.spent_usd),
        _dollars(one.budget_usd),
        times(best.speedup if best else None),
        _dollars(best.cost_usd) if best is not None else NONE,
        Cell(one.stopped or "not said", one.stopped or None),
    )


def _dollars(amount: float) -> Cell:
    return Cell(f"{amount:.2f}", amount)


def _ms(verdict: Verdict | None) -> float | None:
    return verdict.timing.candidate_ms if verdict is not None and verdict.timing and verdict.scored else None


def _time_text(verdict: Verdict | None) -> str:
    own = _ms(verdict)
    return f"{milliseconds(own)} ms" if own is not None else _outcome(verdict).text


def _outcome(verdict: Verdict | None) -> Cell:
    if verdict is None:
        return Cell("not judged")
    return named(verdict.code.value, Tone.PLAIN if _ms(verdict) else Tone.BAD)


def _over_expert(study: str) -> str:
    """What a title adds where speedups are over the expert's kernel."""
    return f" ({study}: over the expert's kernel)" if study else ""


def _key(*parts: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(part for part in parts if part).lower()).strip("-")
