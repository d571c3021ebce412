"""Hooks that carry verdicts from tests to the run store and the terminal. In every process, idle until used."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import Waiting
from pytest_klineage.plugin.benchmark import install_timers
from pytest_klineage.plugin.distribution import Distribution
from pytest_klineage.plugin.markers import CASE_KEY
from pytest_klineage.plugin.waiting import (
    REQUEST_KEY,
    WAITING_ATTRIBUTE,
    WAITING_EXIT,
    WAITS_KEY,
    ending_turn,
    waiting_line,
)

if TYPE_CHECKING:
    from pytest_klineage.plugin.ledger import Ledger
    from pytest_klineage.plugin.session import KlineageSession

REPORT_ATTRIBUTE = "klineage"
"""Where a test report carries its verdicts, as plain data: only that survives the way from an xdist worker."""


def _turn(item: pytest.Item) -> Generator[None, None, None]:
    """Runs a phase of a test; what it waits for becomes a skip."""
    try:
        return (yield)
    except Waiting as waiting:
        item.stash[WAITS_KEY] = ending_turn(waiting)
        item.stash[REQUEST_KEY] = getattr(waiting, "request", "")
        reason = f"klineage: waiting: {waiting}"
    # Outside of the handler, so that the exception does not come with the skip.
    raise pytest.skip.Exception(reason, _use_item_location=True)


class Hooks:
    """pytest's hooks for one process."""

    def __init__(self, session: KlineageSession) -> None:
        self.session = session
        self._ledger: Ledger | None = None
        session.config.pluginmanager.register(Distribution(session), "klineage-distribution")
        if not session.is_worker:
            # At once, not with the test's report: an interrupted test makes no report, and its verdicts are data.
            session.write_with(lambda nodeid, verdict: self.ledger.add(nodeid, verdict))
        if session.settings.ray and session.settings.gate.get("stage") != "compile":
            from pytest_klineage.plugin.waiting import SessionTurns

            turns = SessionTurns(session, lambda nodeid, verdict: self.ledger.add(nodeid, verdict))
            session.config.pluginmanager.register(turns, "klineage-turns")

    def pytest_report_header(self) -> str | None:
        """One line, only when the user asked for something."""
        if not self.session.settings.given:
            return None
        settings = self.session.settings
        said = [f"platform={self.session.platform}", f"mode={settings.mode}"]
        said += [f"{name}={settings.gate[name]}" for name in ("policy", "seed") if name in settings.gate]
        if "method" in settings.given:
            said.append(f"methods={','.join(settings.methods)}")
        if self.session.config.pluginmanager.hasplugin("dsession") and settings.progress != "off":
            said.append("(no live progress with -n)")
        return f"klineage: {' '.join(said)}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[object]) -> None:
        """Remember how many processes will share this machine."""
        self.session.num_workers = len(specs)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Count what is ours, and prepare the export through pytest-benchmark."""
        self.session.num_cases = sum(1 for item in items if CASE_KEY in item.stash)
        if self.session.num_cases:
            install_timers(config, items)

    def pytest_report_collectionfinish(self) -> str | None:
        """One line when kernels will be judged."""
        count = self.session.num_cases
        if not count:
            return None
        return f"klineage: {count} kernel {'case' if count == 1 else 'cases'} on {self.session.platform}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the verdicts of this phase on its report."""
        report = yield
        verdicts = self.session.take_pending()
        if verdicts:
            setattr(report, REPORT_ATTRIBUTE, verdicts)
        if (waits := item.stash.get(WAITS_KEY, None)) is not None and report.skipped:
            setattr(report, WAITING_ATTRIBUTE, list(waits))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """A fixture that waits ends the test's turn."""
        return (yield from _turn(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """A test that waits is skipped, and counted."""
        return (yield from _turn(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down what a worker sent. In a process without workers the verdicts were written when they were made."""
        if not self.session.is_worker and (waits := getattr(report, WAITING_ATTRIBUTE, None)) is not None:
            self.session.waiting.append((str(waits[0]), str(waits[1])))
        if not self.session.is_worker and hasattr(report, "node"):
            entries: list[dict[str, Any]] = getattr(report, REPORT_ATTRIBUTE, [])
            if entries:
                self.ledger.add_plain(entries)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the gate and close the run store; records that could not be written make a good exit status a bad one."""
        self.session.close()
        if self.session.waiting and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = WAITING_EXIT
        if self.session.is_worker or (self._ledger is None and self.session.settings.json is None):
            return
        self.ledger.finish()
        good = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, WAITING_EXIT)
        if self.ledger.problems and session.exitstatus in good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The speedup table, its mean, and where the records are."""
        if self.session.waiting and not self.session.is_worker:
            base = self.session.config.invocation_params.dir
            terminalreporter.write_line(waiting_line(self.session.waiting, base), yellow=True, bold=True)
        if self.session.is_worker or self._ledger is None:
            return
        from pytest_klineage.plugin.terminal import write_summary

        write_summary(terminalreporter, self._ledger, self.session.config.invocation_params.dir)

    def pytest_unconfigure(self) -> None:
        """End the gate even when the session never finished."""
        self.session.close()

    @property
    def ledger(self) -> Ledger:
        """Where this run's verdicts go; made with the first of them."""
        if self._ledger is None:
            from pytest_klineage.plugin.ledger import Ledger

            self._ledger = Ledger(self.session)
        return self._ledger
