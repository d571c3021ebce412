"""A report as Markdown: its tables, with links to figures where they were drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tabulate import tabulate

from pytest_klineage.report.document import Headline, Report, Section, Table

SPECIAL = re.compile(r"[\\`*<>\[\]|]")
"""What Markdown would not show as it is."""


def markdown_document(report: Report, images: Mapping[str, str] | None = None) -> str:
    """The report; `images` gives the path of the picture of each figure that has one, relative to the document."""
    lines = [f"# {escaped(report.title)}", "", *map(_headline, report.summary), ""]
    if report.problems:
        lines += ["## What could not be read", ""]
        lines += [f"- {escaped(f'{one.where}: {one.what}. Next: {one.next_step}.')}" for one in report.problems]
        lines.append("")
    for section in report.sections:
        lines += _section(section, images or {})
    if report.absent:
        rows = [(escaped(one.what), f"`{one.command}`") for one in report.absent]
        lines += ["## Not in these records", "", tabulate(rows, ("what", "made by"), tablefmt="pipe"), ""]
    lines += ["## Sources", "", *(f"- {escaped(line)}" for line in report.sources)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    return SPECIAL.sub(lambda found: "\\" + found[0], " ".join(text.split()))


def _headline(line: Headline) -> str:
    return f"- {escaped(line.what)}: **{escaped(line.value)}** ({escaped(line.rests_on)})"


def _section(section: Section, images: Mapping[str, str]) -> Iterator[str]:
    yield from (f"## {escaped(section.title)}", "")
    if section.text:
        yield from (escaped(section.text), "")
    for figure in section.figures:
        if figure.key in images:
            yield from (f"![{escaped(figure.title)}]({images[figure.key]})", "")
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    whose = f" (paper: {table.paper})" if table.paper else ""
    yield from (f"**{escaped(table.title + whose)}**", "")
    rows = [[escaped(cell.text) for cell in row] for row in (*table.rows, *table.foot)]
    sides = ["right" if column.numeric else "left" for column in table.columns]
    head = [escaped(column.name) for column in table.columns]
    if rows:
        yield from (tabulate(rows, head, tablefmt="pipe", colalign=sides, disable_numparse=True), "")
    for note in table.notes:
        yield from (escaped(note), "")
