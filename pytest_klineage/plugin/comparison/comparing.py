"""The controller's side of comparing: gathers comparisons, pins baselines, writes the summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, KlineageError
from pytest_klineage.plugin.terminal import shown
from pytest_klineage.records import Status, Verdict, from_plain
from pytest_klineage.records.baseline import Comparison
from pytest_klineage.records.codec import finite_json
from pytest_klineage.report.comparisons import (
    Annotation,
    annotation_lines,
    annotations_of,
    compared_with,
    comparison_lines,
    comparisons_markdown,
)
from pytest_klineage.report.tables import markdown_report
from pytest_klineage.report.text import counted
from pytest_klineage.report.wording import in_one_line
from pytest_klineage.results.baselines import PinKey, pins_of, save_pins
from pytest_klineage.results.runs import Record, Run

if TYPE_CHECKING:
    from pytest_klineage.plugin.comparison.plan import Plan
    from pytest_klineage.plugin.hooks import Hooks
    from pytest_klineage.plugin.session import KlineageSession

COMPARISONS_FILE = "comparisons.jsonl"
"""Beside the run's records, one Comparison per line."""
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


class Collector:
    """What one run has found, in order of arrival. Trouble with files is kept in `problems`, not raised."""

    def __init__(self, session: KlineageSession, plan: Plan) -> None:
        self._session, self._plan = session, plan
        self.comparisons: list[Comparison] = []
        self.verdicts: list[tuple[str, Verdict]] = []
        self._to_pin: list[tuple[str, Verdict]] = []
        self._again: dict[PinKey, Verdict] = {}
        self.problems: list[str] = []
        self._failures: list[Annotation] = []
        self._pinned: list[str] = []
        self._left: list[str] = []

    def add(
        self, report: pytest.TestReport, verdicts: list[dict[str, Any]], compared: list[dict[str, Any]],
        again: list[tuple[list[Any], dict[str, Any]]],
    ) -> None:  # fmt: skip
        """Keep what came with the report of one phase of a test."""
        try:
            fresh = [(entry["nodeid"], from_plain(entry["verdict"], Verdict)) for entry in verdicts]
            found = [from_plain(entry, Comparison) for entry in compared]
            seconds = {msgspec.convert(key, PinKey): from_plain(entry, Verdict) for key, entry in again}
        except BadRecord as error:
            self.problems.append(f"what {report.nodeid} found could not be read: {error}")
            return
        self.verdicts += fresh
        self._to_pin += fresh
        if str(report.outcome) == "rerun":  # pytest-rerunfailures': only the last attempt is pinned
            self._to_pin = [(nodeid, verdict) for nodeid, verdict in self._to_pin if nodeid != report.nodeid]
        self._again |= seconds
        self.comparisons += found
        for comparison in found:
            self._write(comparison)
        if report.failed:
            bad = [verdict for _, verdict in fresh if not verdict.ok and verdict.status is not Status.SKIPPED]
            self._failures += [_annotation(verdict, report) for verdict in bad]

    def finish(self, *, interrupted: bool) -> None:
        """Pin the run, unless it was interrupted, and write the summary."""
        if self._plan.save:
            self._save(interrupted=interrupted)
        path = self._plan.summary or _step_summary()
        if path is not None:
            try:
                # What other steps have written there stays.
                with path.open("a" if path == _step_summary() else "w", encoding="utf-8") as file:
                    file.write(self._markdown())
            except OSError as error:
                self.problems.append(f"the summary {path} cannot be written: {error.strerror or error}")

    def show(self, reporter: pytest.TerminalReporter) -> None:
        """The section on the terminal; under GitHub Actions also its annotations."""
        groups: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault(compared_with(comparison), []).append(comparison)
        for whom, group in groups.items():
            reporter.section(f"klineage: compared with {whom}", "=")
            for line in comparison_lines(group):
                reporter.write_line(line)
        if self._pinned or self._left or self.problems:
            reporter.section("klineage: baseline", "=")
        for line in (*self._pinned, *self._left):
            reporter.write_line(line)
        for problem in self.problems:
            reporter.write_line(f"klineage: {problem}", red=True, bold=True)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            found = [*self._failures, *annotations_of(self.comparisons, failing=self._plan.failing)]
            for line in annotation_lines(item._replace(file=self._in_workspace(item.file)) for item in found):
                reporter.write_line(line)

    def _save(self, *, interrupted: bool) -> None:
        name = self._plan.save
        if interrupted:
            self.problems.append(f"the run was interrupted; nothing was pinned as {name!r}")
            return
        refused = {
            (comparison.nodeid, comparison.case, comparison.kernel)
            for comparison in self.comparisons
            if self._plan.failing and comparison.outcome.bad
        }
        pins, left = pins_of(self._to_pin, self._again)
        kept = [pin for pin in pins if (pin.nodeid, pin.case.id, pin.label) not in refused]
        left += [f"{pin.case.id} {pin.label} fails its comparison" for pin in pins if pin not in kept]
        self._left = [f"not pinned: {line}" for line in left]
        if not kept:
            self.problems.append(f"nothing was pinned as {name!r}: no kernel was timed that may be")
            return
        try:
            saved = save_pins(self._session.settings.results, name, kept)
        except KlineageError as error:
            self.problems.append(str(error))
            return
        base = self._session.config.invocation_params.dir
        for path, baseline in saved:
            self._pinned.append(f"pinned: {shown(path, base)} ({counted(len(baseline.pins), 'kernel')})")

    def _write(self, comparison: Comparison) -> None:
        """One line beside the run's records; samples of judgements against the base are kept nowhere else."""
        folder = self._run_folder()
        if folder is None:
            return
        try:
            with (folder / COMPARISONS_FILE).open("ab") as file:
                file.write(finite_json(comparison) + b"\n")
        except OSError as error:
            problem = f"comparisons cannot be written to {folder}: {error.strerror or error}"
            if problem not in self.problems:
                self.problems.append(problem)

    def _run_folder(self) -> Path | None:
        hooks: Hooks | None = self._session.config.pluginmanager.getplugin("klineage-hooks")
        return hooks.ledger.paths[-1] if hooks is not None and hooks.ledger.paths else None

    def _markdown(self) -> str:
        if not self.verdicts:
            return "klineage: no kernel was judged.\n"
        folder = self._run_folder() or Path("this run")
        records = tuple(Record(nodeid=nodeid, verdict=verdict) for nodeid, verdict in self.verdicts)
        table = markdown_report(Run(path=folder, info=None, records=records))
        said = comparisons_markdown(self.comparisons, failing=self._plan.failing)
        return f"{said}\n{table}\n" if said else f"{table}\n"

    def _in_workspace(self, file: str) -> str:
        """A file as GitHub names it: relative to the workspace, which pytest's root directory may lie in."""
        workspace = os.environ.get("GITHUB_WORKSPACE")
        path = self._session.config.rootpath / file
        if file and workspace and path.is_relative_to(workspace):
            return path.relative_to(workspace).as_posix()
        return file


def _step_summary() -> Path | None:
    """The file that GitHub shows under a job, where there is one."""
    name = os.environ.get(STEP_SUMMARY)
    return Path(name) if name else None


def _annotation(verdict: Verdict, report: pytest.TestReport) -> Annotation:
    file, line, _ = report.location
    title = f"{verdict.code.value}: {verdict.case.id} {verdict.label}".rstrip()
    return Annotation("error", title, in_one_line(verdict.reasons), file, 0 if line is None else line + 1)
