"""Hooks that compare kernels with a pinned baseline, or with the base of a pull request. How to compare is report's.

Compared is where the test runs, in xdist's workers too, so that a slower kernel fails its own test. Pinned, shown and
written is by the process that owns the run store. Without the options nothing of this is registered.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_klineage.errors import KlineageError, MissingDependency, UsageError
from pytest_klineage.plugin.base_checkout import BaseCheckout
from pytest_klineage.plugin.hooks import REPORT_ATTRIBUTE
from pytest_klineage.plugin.options import COMPARING_NAMES, OPTIONS, option_value

if TYPE_CHECKING:
    from pytest_klineage.plugin.comparing import Collector
    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records import KernelCase, KernelSource, Verdict
    from pytest_klineage.records.baseline import Baseline, Comparison, Outcome

COMPARED_ATTRIBUTE = "klineage_compared"
"""Where a test report carries its comparisons, as plain data."""
PAIRED_KEY = pytest.StashKey[list["Comparison"]]()
"""Comparisons of a test with the base, made while it runs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the options ask for."""

    save: str
    compare: str
    base: Path | None
    summary: Path | None
    margin: float
    """Relative change of speed that counts."""
    failing: bool
    """Whether a kernel that is slower by more fails its test; else it is only reported."""


def read_plan(session: KlineageSession) -> Plan | None:
    """What was asked for; None for nothing. Raises pytest.UsageError for what does not fit together."""
    from pytest_klineage.report.compare import MARGIN, read_tolerance

    config = session.config
    given = {option.name: option_value(config, option) for option in OPTIONS if option.name in COMPARING_NAMES}
    if not any(given.values()):
        return None
    failing = given["compare-fail"]
    if failing and not (given["compare"] or given["base"]):
        raise pytest.UsageError("--klineage-compare-fail needs --klineage-compare=NAME or --klineage-base=DIR")
    timed = [name for name in ("save", "compare", "base") if given[name]]
    if timed and session.settings.gate.get("stage") == "compile":
        raise pytest.UsageError(f"--klineage-{timed[0]} is about times; --klineage-stage=compile takes none")
    return Plan(
        save=given["save"] or "",
        compare=given["compare"] or "",
        base=_path(config, "base", given["base"]),
        summary=_path(config, "summary", given["summary"]),
        margin=read_tolerance(failing) if failing else MARGIN,
        failing=bool(failing),
    )


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

    Where kernels that are slower shall fail, a baseline that nobody has pinned stops the run before it begins.
    """

    def __init__(self, session: KlineageSession, plan: Plan) -> None:
        from pytest_klineage.library.baselines import check_name, find_baselines

        self.session, self.plan = session, plan
        self._base = BaseCheckout(session.config.rootpath, plan.base) if plan.base else None
        self._baselines: list[Baseline] = []
        self._collector: Collector | None = None
        if plan.save:
            check_name(plan.save)
        if plan.compare:
            self._baselines = find_baselines(session.settings.results, plan.compare)
        if plan.compare and plan.failing and not self._baselines:
            raise UsageError(
                f"there is no baseline {plan.compare!r} in {session.settings.results / 'baselines'}; pin it where the "
                f"reviewed code is: pytest --klineage-save={plan.compare}"
            )

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

    @pytest.hookimpl(optionalhook=True)
    def pytest_klineage_judged(
        self, item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict, platforms: tuple[str, ...]
    ) -> None:
        """Judge the kernel against the base's version of it, where there is one that differs."""
        if self._base is not None:
            made = self._against_base(self._base, item, case, source, verdict, platforms)
            item.stash.setdefault(PAIRED_KEY, []).append(made)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the comparisons of this phase on its report, and fail a test whose kernel has become slower."""
        from pytest_klineage.records import to_plain

        report = yield
        found = [*self._with_baseline(report), *item.stash.get(PAIRED_KEY, [])]
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
                report, getattr(report, REPORT_ATTRIBUTE, []), getattr(report, COMPARED_ATTRIBUTE, [])
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
            from pytest_klineage.plugin.comparing import Collector

            self._collector = Collector(self.session, self.plan)
        return self._collector

    def _with_baseline(self, report: pytest.TestReport) -> list[Comparison]:
        """The verdicts of a report, compared with the baseline of their device."""
        entries: list[dict[str, Any]] = getattr(report, REPORT_ATTRIBUTE, [])
        if not self.plan.compare or not entries:
            return []
        from pytest_klineage.library.baselines import numbered
        from pytest_klineage.records import Verdict, from_plain
        from pytest_klineage.report.compare import compare_with, missing

        pairs = [(entry["nodeid"], from_plain(entry["verdict"], Verdict)) for entry in entries]
        found, margin = [], self.plan.margin
        with self._undisturbed():
            for (nodeid, verdict), number in zip(pairs, numbered(pairs), strict=True):
                device = verdict.machine.device if verdict.machine else ""
                mine = [baseline for baseline in self._baselines if baseline.device == device]
                if mine:
                    made = compare_with(mine[0], nodeid, verdict, number=number, margin=margin)
                else:
                    made = missing(nodeid, verdict, self.plan.compare, self._baselines, margin=margin)
                found.append(_placed(made, *report.location[:2]))
        return found

    def _undisturbed(self) -> AbstractContextManager[None]:
        """Bootstraps are work for a core: beside xdist's other workers, wait until none of them times on the CPU."""
        if not self.session.is_worker or self.session.platform != "cpu":
            return nullcontext()
        from pytest_klineage.gate.locks import machine_lock

        return machine_lock("cpu", alone=False)

    def _against_base(
        self,
        base: BaseCheckout,
        item: pytest.Item,
        case: KernelCase,
        source: KernelSource,
        verdict: Verdict,
        platforms: tuple[str, ...],
    ) -> Comparison:
        from pytest_klineage.records.baseline import Comparison, Outcome
        from pytest_klineage.report.compare import compare_base

        found = _older(base, item, source, verdict)
        if isinstance(found, tuple):
            outcome, message = found
        else:
            try:
                paired = self._judge(case, source, found, platforms)
            except (MissingDependency, UsageError) as error:
                outcome, message = Outcome.BASE_FAILED, str(error)
            except KlineageError as error:
                # A fault of ours is no finding about the kernel, and must not pass for one.
                pytest.fail(f"klineage: the comparison with the base failed: {error}", pytrace=False)
            else:
                made = compare_base(item.nodeid, verdict, paired, margin=self.plan.margin)
                return _placed(made, *self._place(base, item, source))
        return Comparison(
            nodeid=item.nodeid, case=case.id, kernel=source.label, against="base", outcome=outcome, message=message,
            margin=self.plan.margin, new=verdict.timing.speedup if verdict.timing else None,
        )  # fmt: skip

    def _judge(
        self, case: KernelCase, source: KernelSource, older: KernelSource, platforms: tuple[str, ...]
    ) -> Verdict:  # fmt: skip
        """The head's kernel with the base's in the place of the reference."""
        older = msgspec.structs.replace(older, label=f"{older.label} (base)")
        progress = self.session.progress
        if progress is not None:
            progress.begin(f"{case.id} {source.label} against the base".rstrip())
        try:
            # What the case demands is asked of the head alone; here only the ratio counts.
            equal = msgspec.structs.replace(case, at_least=1.0)
            return self.session.gate.judge(equal, source, reference_source=older, platforms=platforms)
        finally:
            if progress is not None:
                progress.end()

    def _place(self, base: BaseCheckout, item: pytest.Item, source: KernelSource) -> tuple[str, int | None]:
        """The kernel's own file, or the test where it lies outside of pytest's root directory."""
        path = base.files.locate(source.files[0], item.path.parent)
        root = self.session.config.rootpath.resolve()
        if path is None or not path.is_relative_to(root):
            return item.location[:2]
        return path.relative_to(root).as_posix(), 0


def _older(
    base: BaseCheckout, item: pytest.Item, source: KernelSource, verdict: Verdict
) -> KernelSource | tuple[Outcome, str]:
    """The base's version of a kernel; or why there is nothing to judge it against."""
    from pytest_klineage.records.baseline import Outcome

    if not verdict.scored:
        return Outcome.SKIPPED, f"it was not timed itself: {verdict.code.value}"
    try:
        older = base.twin(source, item.path.parent)
    except UsageError as error:
        return Outcome.NO_SOURCE, str(error)
    if older is None:
        return Outcome.NEW, "the base has no such kernel"
    return (Outcome.UNCHANGED, "the base has the same source") if older.digest == source.digest else older


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


def _placed(comparison: Comparison, file: str, line: int | None) -> Comparison:
    """The comparison with the place where it is shown; `line` from 0, as pytest counts."""
    return msgspec.structs.replace(comparison, file=file, line=0 if line is None else line + 1)


def _path(config: pytest.Config, name: str, text: str | None) -> Path | None:
    """A path from the command line is relative to where pytest was started, one from the ini file to the ini file."""
    if not text:
        return None
    from_ini = config.getoption(f"klineage_{name}") is None
    base = config.inipath.parent if from_ini and config.inipath else config.invocation_params.dir
    return (base / Path(text).expanduser()).absolute()
