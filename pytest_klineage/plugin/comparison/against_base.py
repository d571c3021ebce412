"""Kernels against the base of a pull request: the base's version takes the reference's place, in this run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pytest_klineage.errors import KlineageError, MissingDependency, UsageError
from pytest_klineage.plugin.comparison.against_pins import beside_no_timing
from pytest_klineage.plugin.comparison.base_checkout import BaseCheckout
from pytest_klineage.plugin.comparison.base_tests import named_instead
from pytest_klineage.plugin.comparison.pooling import compare_judged
from pytest_klineage.records import KernelCase, KernelSource, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome, placed
from pytest_klineage.report.compare import finding
from pytest_klineage.report.compare_base import judge_again, precision_for

if TYPE_CHECKING:
    from pytest_klineage.plugin.session import KlineageSession


class AgainstBase:
    """A checkout of the base beside the tree under test. Raises UsageError when it is no folder, or that tree."""

    def __init__(self, session: KlineageSession, folder: Path, margin: float) -> None:
        self._session, self._margin = session, margin
        self._base = BaseCheckout(session.config.rootpath, folder)

    def compare(
        self, item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict, platforms: tuple[str, ...],
        paths: tuple[Path, ...],
    ) -> Comparison:  # fmt: skip
        """Judge the kernel, whose files lie at `paths`, against the base's version of it, where one differs."""
        found = self._older(item, source, verdict, paths)
        if isinstance(found, tuple):
            outcome, message = found
        else:
            try:
                made = self._judged(item, case, source, verdict, found, platforms)
            except (MissingDependency, UsageError) as error:
                outcome, message = ComparisonOutcome.BASE_FAILED, str(error)
            except KlineageError as error:
                # A fault of ours is no finding about the kernel, and must not pass for one.
                pytest.fail(f"klineage: the comparison with the base failed: {error}", pytrace=False)
            else:
                said = "; ".join((made.message, *self._notes(item, paths)))
                made = msgspec.structs.replace(made, message=said)
                return placed(made, *self._location(item, source, paths))
        return finding(item.nodeid, verdict, "base", self._margin, outcome, message)

    def _judged(
        self, item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict, older: KernelSource,
        platforms: tuple[str, ...],
    ) -> Comparison:  # fmt: skip
        """The head's kernel with the base's in the place of the reference, until it is clear or there are MOST."""
        older = msgspec.structs.replace(older, label=f"{older.label} (base)")
        # What the case demands is asked of the head alone; here only the ratio counts.
        equal = msgspec.structs.replace(case, at_least=1.0)
        title = f"{case.id} {source.label} against the base".rstrip()
        ask, precision = self._session.judge, precision_for(self._margin)
        judged: list[Verdict] = []
        while True:
            judged.append(
                ask(equal, source, reference_source=older, platforms=platforms, title=title, precision=precision)
            )
            with beside_no_timing(self._session):
                made = compare_judged(item.nodeid, verdict, judged, margin=self._margin)
            if not judge_again(made):
                return made

    def _older(
        self, item: pytest.Item, source: KernelSource, verdict: Verdict, paths: tuple[Path, ...]
    ) -> KernelSource | tuple[ComparisonOutcome, str]:
        """The base's version of a kernel; or why there is nothing to judge it against."""
        if not verdict.scored:
            return ComparisonOutcome.SKIPPED, f"it was not timed itself: {verdict.code.value}"
        try:
            instead, _ = self._named_instead(item, paths)
            older = self._base.base_kernel(source, item.path.parent, paths, instead)
        except UsageError as error:
            return ComparisonOutcome.NO_SOURCE, str(error)
        if older is None:
            return ComparisonOutcome.NEW, "the base has no such kernel"
        if older.digest != source.digest:
            return older
        if (notes := self._notes(item, paths)) and instead is None:
            return ComparisonOutcome.NO_SOURCE, f"the base has the same source; {'; '.join(notes)}"
        return ComparisonOutcome.UNCHANGED, "the base has the same source"

    def _named_instead(self, item: pytest.Item, paths: tuple[Path, ...]) -> tuple[Path | None, bool]:
        """The kernel that the base's own test names, where it is another one, and whether it names this one."""
        names = [one.name.partition("[")[0] for one in item.listchain() if isinstance(one, pytest.Class | pytest.Item)]
        return named_instead(paths[0], item.path, self._base, names) if paths else (None, True)

    def _notes(self, item: pytest.Item, paths: tuple[Path, ...]) -> list[str]:
        """What is odd about the choice of the base's file."""
        instead, named = self._named_instead(item, paths)
        links = [path.name for path in paths if self._base.became_a_link(path)]
        found = [f"{name} is a link, which it is not in the base" for name in links]
        if instead is not None:
            where = instead.resolve().relative_to(self._base.base)
            found.append(f"compared with {where}, which the base's test names")
        elif not named:
            found.append("the test has changed: in the base it does not name this file")
        return found

    def _location(self, item: pytest.Item, source: KernelSource, paths: tuple[Path, ...]) -> tuple[str, int | None]:
        """The kernel's own file, or the test where it lies outside of pytest's root directory."""
        path = paths[0].resolve() if paths else self._base.files.locate(source.files[0], item.path.parent)
        root = self._session.config.rootpath.resolve()
        if path is None or not path.is_relative_to(root):
            return item.location[:2]
        return path.relative_to(root).as_posix(), 0
