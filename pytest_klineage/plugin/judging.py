"""What the fixture `kernel_gate` returns: judge a kernel, keep the verdict, and turn it into the test's outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import pytest

from pytest_klineage.errors import KlineageError, MissingDependency, UsageError, Waiting
from pytest_klineage.plugin.benchmark import export
from pytest_klineage.plugin.explain import explain
from pytest_klineage.plugin.markers import case_of
from pytest_klineage.plugin.session import KlineageSession
from pytest_klineage.records import KernelCase, KernelSource, Status, Surface, Verdict, platform_name
from pytest_klineage.report.wording import format_message
from pytest_klineage.surfaces import read_source

Scalar: TypeAlias = str | float
Kernel: TypeAlias = str | Path | KernelSource

MODULE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")
"""How a function of a module is written."""
MESSAGE_LIMIT = 4_000
"""Characters of a fault's message, which may hold the last words of a process."""


class KernelGate:
    """Judges kernels for one test. Calling it returns the verdict, or ends the test in gate mode when it is bad."""

    def __init__(self, session: KlineageSession, request: pytest.FixtureRequest) -> None:
        self.session = session
        self._request = request
        self._item: pytest.Item = request.node

    @property
    def case(self) -> KernelCase:
        """The case of the test's marker. Raises UsageError without one."""
        case = case_of(self._item)
        if case is None:
            raise UsageError("this test has no kernel_case marker; add one, or pass case= to kernel_gate")
        return case

    def __call__(
        self,
        kernel: Kernel,
        *,
        entry: str | None = None,
        surface: str | None = None,
        flags: Sequence[str] = (),
        also: Sequence[str | Path] = (),
        case: KernelCase | None = None,
        against: Kernel | None = None,
        label: str = "",
        platforms: Sequence[str] = (),
    ) -> Verdict:
        """Judge a kernel.

        Args:
            kernel: a file, relative to the test's own; "package.module:function"; or a KernelSource.
            entry: exported symbol or function, "run" by default.
            surface: the language, such as "triton", when the suffix does not say it.
            flags: build flags, from the surface's allow-list.
            also: files that the kernel includes or imports.
            case: instead of the marker's; see `make_case`.
            against: another kernel that takes the place of the reference.
            label: what tables call the kernel; the file's stem by default.
            platforms: those that the kernel was written for, such as ("sm90",); on others it is skipped.
        """
        __tracebackhide__ = True
        failure: KlineageError
        try:
            chosen = case if case is not None else self.case
            source = self._source(kernel, surface, entry, flags, also, label)
            reference_kernel = None if against is None else self._source(against, None, None, (), (), "")
            verdict = self.session.judge(chosen, source, reference_source=reference_kernel, platforms=_names(platforms))
        except Waiting:
            raise  # the hooks end the test's turn
        except KlineageError as error:
            failure = error
        else:
            self._keep(verdict)
            self._item.ihook.pytest_klineage_judged(
                item=self._item, case=chosen, source=source, verdict=verdict, reference_source=reference_kernel,
                platforms=_names(platforms), paths=self._paths(kernel, also),
            )  # fmt: skip
            self._report_outcome(verdict)
            return verdict
        # Outside of the handler, so that pytest shows the message without the chain of exceptions.
        self._fail_or_skip(failure)

    def _source(
        self,
        kernel: Kernel,
        surface: str | None,
        entry: str | None,
        flags: Sequence[str],
        also: Sequence[str | Path],
        label: str,
    ) -> KernelSource:
        if isinstance(kernel, KernelSource):
            return kernel
        if isinstance(flags, str):
            raise UsageError(f"flags= is a sequence of strings, got the string {flags!r}")
        if isinstance(also, str | Path):
            raise UsageError(f"also= is a sequence of files, got {str(also)!r}")
        path: str | Path = self._located(kernel)
        if (beside := self._module_file(kernel)) is not None:
            path, entry = beside
            label = label or str(kernel)
        return read_source(
            path,
            surface=surface.value if isinstance(surface, Surface) else surface,
            entry=entry,
            flags=tuple(flags),
            label=label,
            also=tuple(self._located(file) for file in also),
        )

    def _paths(self, kernel: Kernel, also: Sequence[str | Path]) -> tuple[Path, ...]:
        """Where a kernel's files lie, in the order of its source; none of text that was handed over, or of a module."""
        if isinstance(kernel, KernelSource):
            return ()
        beside = self._module_file(kernel)
        located = [beside[0] if beside else self._located(kernel), *map(self._located, also)]
        return tuple(path for path in located if isinstance(path, Path))

    def _located(self, path: str | Path) -> str | Path:
        """A path relative to the test's own file; "module:function" as it is."""
        located = self._item.path.parent / path
        return path if isinstance(path, str) and MODULE.fullmatch(path) and not located.exists() else located

    def _module_file(self, kernel: Kernel) -> tuple[Path, str] | None:
        """File and function of "module:function" when module.py lies beside the test or in the root directory.

        The worker imports installed packages and what is on PYTHONPATH; where pytest looks for test modules is not its
        business, and the text of a file is audited and recorded, which that of an import is not.
        """
        found = MODULE.fullmatch(kernel) if isinstance(kernel, str) else None
        if found is None:
            return None
        for folder in (self._item.path.parent, self._item.config.rootpath):
            if (path := folder / f"{found[1]}.py").is_file():
                return path, found[2]
        return None

    def _keep(self, verdict: Verdict) -> None:
        self._item.user_properties.extend(scalars(verdict).items())
        self.session.remember(self._item.nodeid, verdict)
        export(self._request, verdict)

    def _report_outcome(self, verdict: Verdict) -> None:
        __tracebackhide__ = True
        if self.session.mode == "record" or verdict.ok:
            return
        if verdict.status is Status.SKIPPED and not self.session.settings.fail_skipped:
            pytest.skip(f"klineage: {verdict.code.value}: {verdict.reasons[0].message}")
        pytest.fail(explain(verdict), pytrace=False)

    def _fail_or_skip(self, failure: KlineageError) -> NoReturn:
        """End the test without a verdict: a skip for want of a dependency, else a failure."""
        __tracebackhide__ = True
        if isinstance(failure, MissingDependency) and not self.session.settings.fail_skipped:
            pytest.skip(f"klineage: {failure}")
        known = isinstance(failure, MissingDependency | UsageError)
        pytest.fail(f"klineage: {failure}" if known else fault(failure), pytrace=False)


def _names(platforms: Sequence[str]) -> tuple[str, ...]:
    """Canonical names of the platforms that a kernel was written for. Raises UsageError."""
    if isinstance(platforms, str):
        raise UsageError(f"platforms= is a sequence of names, got the string {platforms!r}")
    return tuple(platform_name(name) for name in platforms)


def fault(failure: KlineageError) -> str:
    """A fault of the harness: the line that says most first, all of it below, bounded at its beginning."""
    text = str(failure)
    head = f"klineage: the harness failed, which says nothing about the kernel: {format_message(text).line}"
    if "\n" not in text.strip():
        return head[:MESSAGE_LIMIT]
    kept = text if len(text) <= MESSAGE_LIMIT else f"... {text[-MESSAGE_LIMIT:]}"
    return "\n".join([head[:MESSAGE_LIMIT], *(f"    {line}" for line in kept.splitlines())])


def scalars(verdict: Verdict) -> dict[str, Scalar]:
    """The figures of a verdict that fit into JUnit properties."""
    found: dict[str, Scalar] = {
        "klineage_case": verdict.case.id,
        "klineage_kernel": verdict.label,
        "klineage_status": verdict.status.value,
        "klineage_code": verdict.code.value,
    }
    if verdict.timing is not None:
        interval = verdict.timing.speedup
        found |= {
            "klineage_speedup": interval.estimate,
            "klineage_speedup_low": interval.low,
            "klineage_speedup_high": interval.high,
            "klineage_reference_ms": verdict.timing.reference_ms,
            "klineage_candidate_ms": verdict.timing.candidate_ms,
        }
    return found
