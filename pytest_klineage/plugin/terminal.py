"""The summary at the end of a run: table, mean, notes and where the records are. The table itself is made in report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.report.tables import note_lines, summary_lines, table_lines

if TYPE_CHECKING:
    import pytest

    from pytest_klineage.plugin.ledger import Ledger


def write_summary(reporter: pytest.TerminalReporter, ledger: Ledger, base: Path) -> None:
    """Write the section; `base` is the directory that shown paths are relative to."""
    verdicts = ledger.verdicts
    if not verdicts and not ledger.problems:
        return
    machines = {verdict.machine.device: verdict.machine.platform for verdict in verdicts if verdict.machine is not None}
    where = ", ".join(f"{platform} ({device})" for device, platform in sorted(machines.items()))
    reporter.section(f"klineage: {where}" if where else "klineage", "=")
    for line in (*table_lines(verdicts), *_set_off(summary_lines(verdicts))):
        reporter.write_line(line)
    for line in _set_off(note_lines(verdicts)):
        reporter.write_line(line, yellow=True)
    for problem in ledger.problems:
        reporter.write_line(f"klineage: {problem}", red=True, bold=True)
    for path in ledger.paths:
        reporter.write_line(f"records: {shown(path, base)}")
    if ledger.paths:
        reporter.write_line(f"again:   pytest-klineage report {shlex.quote(shown(ledger.paths[0], base))}")


def shown(path: Path, base: Path) -> str:
    """A path as the user would type it."""
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _set_off(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []
