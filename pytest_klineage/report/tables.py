"""Speedup tables as text: for a terminal (at most 100 columns) and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pytest_klineage.records import Code, Interval, Status, Verdict
from pytest_klineage.records.facts import MEASURED, NO_PART, SLOWER_SEARCH, VERSION_NOTE
from pytest_klineage.report.advice import next_step
from pytest_klineage.report.aggregate import by_kernel, summarise, uncertain
from pytest_klineage.report.text import INDENT, WIDTH, column_widths, elided, plain_table, wrapped
from pytest_klineage.report.wording import in_one_line
from pytest_klineage.results.runs import Run

BUILT = frozenset({Code.ACCEPTED_BUILT, Code.SPILLS, Code.MISSING_INSTRUCTION})
SHRINKABLE = (("kernel", 14), ("case", 20), ("ref", 6), ("kernel", 6))
"""Columns that give way when a table of times is too wide, in turn, and what is left of each."""
SHRINKABLE_BUILDS = (
    ("kernel", 20),
    ("instructions", 30),
    ("case", 20),
    ("kernel", 14),
    ("instructions", 8),
    ("kernel", 6),
)
"""The same of a table of builds."""
UNCERTAIN = "~"
"""Stands before a speedup that says little: see `aggregate.uncertain`."""
UNKNOWN = "\N{EN DASH}"
"""Stands where there is no floor to compare with."""
NOTE_LINES = 3
"""About as long as the findings of one verdict may be in the notes."""
ONE_LINE = 100_000
"""Width of cells that the output format wraps."""


def table_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """The speedup table for a terminal: one line per verdict, no line wider than `width`."""
    if not verdicts:
        return []
    columns = _columns(verdicts)
    if _total_width(_cells(columns, verdicts)) > width:
        columns = _without_floor(columns)
    headers, *rows = _fitted(
        _cells(columns, verdicts), width, SHRINKABLE_BUILDS if only_built(verdicts) else SHRINKABLE
    )
    return plain_table(headers, rows, [column.side for column in columns])


def summary_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Geometric mean and coverage, one line for all kernels or one for each method; then what they rest on unsafely.

    Of a compile stage: how many were built.
    """
    if only_built(verdicts):
        return [_build_summary(verdicts)]
    lines = [line for sweep in _sweeps(verdicts) for line in wrapped(sweep, width)]
    lines += [_geomean(group, label) for label, group in by_kernel(verdicts).items()]
    doubtful = [verdict for verdict in verdicts if uncertain(verdict)]
    if doubtful:
        scored = sum(verdict.scored for verdict in verdicts)
        names = ", ".join(map(_name, doubtful))
        why = "busy machine, unstable times, or high/low above 2"
        text = f"{UNCERTAIN} {len(doubtful)} of {scored} speedups uncertain ({why}): {names}"
        lines += wrapped(text, width)
    return lines


def note_lines(verdicts: Sequence[Verdict], width: int = WIDTH) -> list[str]:
    """Why a verdict is not a plain acceptance, with the next step; then what is amiss with references."""
    lines: list[str] = []
    for verdict in verdicts:
        if verdict.status is Status.ACCEPTED:
            continue
        name = _name(verdict)
        text = f"{name}: {in_one_line(verdict.reasons, NOTE_LINES * width - len(name))}"
        lines += wrapped(text, width)
        lines += wrapped(f"next: {next_step(verdict)}", width, first=INDENT)
    for note in _reference_notes(verdicts):
        lines += wrapped(f"note: {note}", width)
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
    columns = _columns(verdicts)
    headers, *rows = [list(map(_escaped, row)) for row in _cells(columns, verdicts)]
    sides = [column.side for column in columns]
    table = tabulate(rows, headers, tablefmt="pipe", colalign=sides, disable_numparse=True) if rows else ""
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
    """A speedup with two digits after the point, and with more where it is tiny."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def speedup_text(verdict: Verdict) -> str:
    """A speedup with its interval, such as "3.42x [3.38, 3.46]"; "-" where nothing was measured that counts."""
    if verdict.timing is None or not verdict.scored:
        return "-"
    return interval_text(verdict.timing.speedup)


def interval_text(interval: Interval) -> str:
    """A ratio with its interval, such as "3.42x [3.38, 3.46]"."""
    return f"{ratio(interval.estimate)}x [{ratio(interval.low)}, {ratio(interval.high)}]"


def floor_share(verdict: Verdict) -> float | None:
    """The share of a kernel's time that arithmetic or memory takes at the least; None where that is not known."""
    if verdict.floor is None or verdict.timing is None or not verdict.scored:
        return None
    return verdict.floor.ms / verdict.timing.candidate_ms


def floor_text(verdict: Verdict) -> str:
    """That share, such as "78%", after an at-least sign where only a bound of such machines is known."""
    share = floor_share(verdict)
    if share is None or verdict.floor is None:
        return UNKNOWN
    least = "" if verdict.floor.product else "\N{GREATER-THAN OR EQUAL TO}"
    return least + (f"{share:.0%}" if share >= 0.1 else f"{share:.1%}")


def floors_known(verdicts: Iterable[Verdict]) -> bool:
    """Whether a column of floors says anything."""
    return any(floor_share(verdict) is not None for verdict in verdicts)


def only_built(verdicts: Sequence[Verdict]) -> bool:
    """Whether these verdicts are of a compile stage: something was built, and nothing was timed."""
    return any(verdict.code in BUILT for verdict in verdicts) and all(verdict.timing is None for verdict in verdicts)


class _TextColumn(NamedTuple):
    """A column of a table, and what it says of a verdict."""

    header: str
    cell: Callable[[Verdict], str]
    side: str = "left"


def _reference_ms(verdict: Verdict) -> str:
    return milliseconds(verdict.timing.reference_ms) if verdict.timing and verdict.scored else "-"


def _candidate_ms(verdict: Verdict) -> str:
    return milliseconds(verdict.timing.candidate_ms) if verdict.timing and verdict.scored else "-"


def _most(figure: str) -> Callable[[Verdict], str]:
    """The largest figure of any kernel of a build."""

    def cell(verdict: Verdict) -> str:
        kernels = verdict.build.kernels if verdict.build is not None else ()
        return str(max(getattr(kernel, figure) for kernel in kernels)) if kernels else "-"

    return cell


def _kernels(verdict: Verdict) -> str:
    return str(len(verdict.build.kernels)) if verdict.build is not None and verdict.build.kernels else "-"


def _instructions(verdict: Verdict) -> str:
    """All instructions that matter in any kernel of a build."""
    kernels = verdict.build.kernels if verdict.build is not None else ()
    if any(kernel.instructions is None for kernel in kernels):
        return "not looked for"
    return " ".join(sorted({word for kernel in kernels for word in kernel.instructions or ()})) or "-"


CASE = _TextColumn("case", lambda verdict: verdict.case.id)
KERNEL = _TextColumn("kernel", lambda verdict: verdict.label or "-")
STATUS = _TextColumn("status", lambda verdict: verdict.status.value)
FLOOR = _TextColumn("floor", floor_text, "right")
TIMES = (
    CASE, KERNEL, _TextColumn("ref", lambda verdict: verdict.case.reference),
    _TextColumn("ref ms", _reference_ms, "right"), _TextColumn("cand ms", _candidate_ms, "right"), FLOOR,
    _TextColumn("speedup", lambda verdict: (UNCERTAIN if uncertain(verdict) else "") + speedup_text(verdict)), STATUS,
)  # fmt: skip
BUILDS = (
    CASE, KERNEL, _TextColumn("kernels", _kernels, "right"), _TextColumn("regs", _most("registers"), "right"),
    _TextColumn("spill B", _most("spill_bytes"), "right"), _TextColumn("instructions", _instructions), STATUS,
)  # fmt: skip
"""The compile stage: what each build came to, instead of times."""


def _columns(verdicts: Sequence[Verdict]) -> tuple[_TextColumn, ...]:
    if only_built(verdicts):
        return BUILDS
    return TIMES if floors_known(verdicts) else _without_floor(TIMES)


def _without_floor(columns: tuple[_TextColumn, ...]) -> tuple[_TextColumn, ...]:
    """The same without the column that gives way first."""
    return tuple(column for column in columns if column is not FLOOR)


def _cells(columns: Sequence[_TextColumn], verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Headers, then a row for each verdict."""
    return [[column.header for column in columns], *([column.cell(one) for column in columns] for one in verdicts)]


def _total_width(rows: list[list[str]]) -> int:
    """The width of a table that nothing is cut from."""
    widths = column_widths(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _fitted(rows: list[list[str]], width: int, shrinkable: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Headers and rows whose table is at most `width` wide, shortened in the columns that may be."""
    for name, least in shrinkable:
        excess = _total_width(rows) - width
        if excess <= 0:
            break
        column = rows[0].index(name)
        size = max(least, column_widths(rows)[column] - excess)
        for row in rows[1:]:
            row[column] = elided(row[column], size)
    return rows


def _build_summary(verdicts: Sequence[Verdict]) -> str:
    """One line: how many were built and are as demanded."""
    skipped = sum(verdict.status is Status.SKIPPED for verdict in verdicts)
    built = sum(verdict.code is Code.ACCEPTED_BUILT for verdict in verdicts)
    return f"built {built} of {len(verdicts) - skipped}" + (f", {skipped} skipped" if skipped else "")


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
            shown_facts = {key: value for key, value in verdict.reference.items() if not key.startswith(MEASURED)}
            facts = ", ".join(f"{key} {value}" for key, value in shown_facts.items())
            described.setdefault(f"- reference of {verdict.case.id}: {_escaped(facts)}")
    return list(described)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
