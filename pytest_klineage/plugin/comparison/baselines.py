"""Hooks that compare kernels with a pinned baseline, or with the base of a pull request. How to compare is report's.

Compared is where the test runs, in xdist's workers too, so that a slower kernel fails its own test. Pinned, shown and
written is by the process that owns the run store. Without the options nothing of this is registered.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.comparison.plan import AGAIN_KEY, Plan, read_plan
from pytest_klineage.plugin.hooks import REPORT_ATTRIBUTE

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_klineage.plugin.comparison.comparing import Collector
    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records import KernelCase, KernelSource, Verdict
    from pytest_klineage.records.baseline import Comparison

COMPARED_ATTRIBUTE = "klineage_compared"
"""Where a test report carries its comparisons, as plain data."""
AGAIN_ATTRIBUTE = "klineage_again"
"""Where it carries second judgements of what is to be pinned: pairs of a pin's key and a verdict, as plain data."""
PAIRED_KEY = pytest.StashKey[list["Comparison"]]()
"""Comparisons of a test with the base, made while it runs."""


def register_baselines(session: KlineageSession) -> None:
    """Register the hooks when an option asks for them. Raises pytest.UsageError before anything is collected."""
    plan = read_plan(session)
    if plan is None:
        return
    try:
        hooks = BaselineHooks(session, plan)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    session.config.pluginmanager.register(hooks, "klineage-baselines")


class BaselineHooks:
    """pytest's hooks for one process. Raises UsageError for a baseline that is damaged, or a base that is no folder.

    Where kernels that are slower shall fail, a baseline that is not pinned stops the run before it begins.
    """

    def __init__(self, session: KlineageSession, plan: Plan) -> None:
        from pytest_klineage.plugin.comparison.against_base import AgainstBase
        from pytest_klineage.plugin.comparison.against_pins import AgainstPins

        self.session, self.plan = session, plan
        self._base = AgainstBase(session, plan.base, plan.margin) if plan.base else None
        self._pins = AgainstPins(session, plan)
        self._collector: Collector | None = None

    def pytest_report_header(self) -> str | None:
        """One line about what kernels are compared with."""
        plan = self.plan
        whom = [f"baseline {plan.compare!r}"] if plan.compare else []
        whom += ["the base"] if plan.base else []
        if not whom:
            return None
        limit = f"{100 * plan.margin:.3g} %"
        ends = f"slower by more than {limit} fails" if plan.failing else f"advisory, margin {limit}"
        return f"klineage: compared with {' and '.join(whom)} ({ends})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that is run again is compared as in its first attempt."""
        self._pins.begin(item)

    @pytest.hookimpl(optionalhook=True)
    def pytest_klineage_judged(
        self, item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict,
        reference_source: KernelSource | None, platforms: tuple[str, ...], paths: tuple[Path, ...],
    ) -> None:  # fmt: skip
        """Compare the kernel with its pin and with the base's version of it, while there is a gate to judge again."""
        self._pins.judged(item, case, source, verdict, reference_source, platforms)
        if self._base is not None:
            made = self._base.compare(item, case, source, verdict, platforms, paths)
            item.stash.setdefault(PAIRED_KEY, []).append(made)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the comparisons of this phase on its report, and fail a test whose kernel has become slower."""
        from pytest_klineage.records import to_plain

        report = yield
        again = item.stash.get(AGAIN_KEY, {})
        if again:
            setattr(report, AGAIN_ATTRIBUTE, [(list(key), to_plain(verdict)) for key, verdict in again.items()])
            item.stash[AGAIN_KEY] = {}
        found = [*self._pins.comparisons(item, report), *item.stash.get(PAIRED_KEY, [])]
        item.stash[PAIRED_KEY] = []
        if not found:
            return report
        setattr(report, COMPARED_ATTRIBUTE, [to_plain(comparison) for comparison in found])
        bad = [comparison for comparison in found if comparison.outcome.bad]
        if self.plan.failing and bad and report.passed:
            report.outcome = "failed"
            report.longrepr = "\n".join(failure(comparison) for comparison in bad)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what a test, of this process or of a worker, has found."""
        if not self.session.is_worker:
            self.collector.add(
                report, getattr(report, REPORT_ATTRIBUTE, []), getattr(report, COMPARED_ATTRIBUTE, []),
                getattr(report, AGAIN_ATTRIBUTE, []),
            )  # fmt: skip

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Pin, and write the summary; what could not be written makes a good exit status a bad one."""
        if self.session.is_worker:
            return
        self.collector.finish(interrupted=session.exitstatus == pytest.ExitCode.INTERRUPTED)
        if self.collector.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of comparisons, what was pinned, and annotations for GitHub."""
        if not self.session.is_worker:
            self.collector.show(terminalreporter)

    @property
    def collector(self) -> Collector:
        """What this run's comparisons are gathered in."""
        if self._collector is None:
            from pytest_klineage.plugin.comparison.comparing import Collector

            self._collector = Collector(self.session, self.plan)
        return self._collector


def failure(comparison: Comparison) -> str:
    """Why a test fails: what happened to which kernel, the figures, the next step."""
    whom = "the base" if comparison.against == "base" else f"baseline {comparison.against!r}"
    name = f"kernel {comparison.kernel!r}" if comparison.kernel else "the kernel"
    lines = [f"{name} on {comparison.case}, compared with {whom}: {comparison.outcome.value.replace('_', ' ')}"]
    lines.append(f"  {comparison.message}")
    if comparison.old and comparison.new:
        lines.append(f"  over the reference: {comparison.old.estimate:.3f}x then, {comparison.new.estimate:.3f}x now")
    if comparison.advice:
        lines.append(f"  next: {comparison.advice}")
    return "\n".join(lines)
