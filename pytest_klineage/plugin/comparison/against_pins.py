"""Kernels against a pinned baseline, and second judgements: of what is pinned, and of what seems to have changed."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import KlineageError, UsageError
from pytest_klineage.gate.host.locks import machine_lock
from pytest_klineage.plugin.comparison.plan import AGAIN_KEY, Plan
from pytest_klineage.plugin.hooks import REPORT_ATTRIBUTE
from pytest_klineage.records import KernelCase, KernelSource, Verdict, from_plain
from pytest_klineage.records.baseline import Comparison, placed
from pytest_klineage.report.compare import compare_with, confirmed, missing
from pytest_klineage.results.baselines import PinKey, can_be_pinned, check_name, find_baselines

if TYPE_CHECKING:
    from pytest_klineage.plugin.session import KlineageSession

SEEN_KEY = pytest.StashKey[Counter[tuple[str, str]]]()
"""How often a case and label were judged in this attempt at a test so far."""
REPORTED_KEY = pytest.StashKey[Counter[tuple[str, str, str]]]()
"""How many verdicts on a case and label were in the reports of an attempt's phases so far, by test, case and label."""
COMPARED_KEY = pytest.StashKey[dict[PinKey, Comparison]]()
"""What was compared in this attempt."""


class AgainstPins:
    """The baselines of one name. Raises UsageError for one that is damaged, or missing where it decides."""

    def __init__(self, session: KlineageSession, plan: Plan) -> None:
        self._session, self._plan = session, plan
        if plan.save:
            check_name(plan.save)
        results = session.settings.results
        self._baselines = find_baselines(results, plan.compare) if plan.compare else []
        if plan.compare and plan.failing and not self._baselines:
            raise UsageError(
                f"there is no baseline {plan.compare!r} in {results / 'baselines'}; pin it where the "
                f"reviewed code is: pytest --klineage-save={plan.compare}"
            )

    def begin(self, item: pytest.Item) -> None:
        """Count from the beginning in every attempt at a test: an item and its stash outlive reruns and Ray's turns."""
        item.stash[SEEN_KEY], item.stash[REPORTED_KEY], item.stash[COMPARED_KEY] = Counter(), Counter(), {}

    def judged(
        self, item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict,
        reference_kernel: KernelSource | None, platforms: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Compare what was just judged, and judge it once more if it has changed, or is to be pinned."""
        seen = item.stash.setdefault(SEEN_KEY, Counter())
        key = (item.nodeid, case.id, verdict.label, seen[case.id, verdict.label])
        seen[case.id, verdict.label] += 1
        made = self._compare(key, verdict) if self._plan.compare else None
        changed = made is not None and made.outcome.change
        if changed or (self._plan.save and can_be_pinned(verdict)):
            title = f"{case.id} {source.label} once more".rstrip()
            try:
                again = self._session.judge(
                    case, source, reference_source=reference_kernel, platforms=platforms, title=title
                )
            except KlineageError as error:
                pytest.fail(f"klineage: the second judgement failed: {error}", pytrace=False)
            if made is not None and changed:
                made = confirmed(made, self._compare(key, again), again)
            if self._plan.save:
                item.stash.setdefault(AGAIN_KEY, {})[key] = again
        if made is not None:
            item.stash.setdefault(COMPARED_KEY, {})[key] = made

    def comparisons(self, item: pytest.Item, report: pytest.TestReport) -> list[Comparison]:
        """The verdicts of a report, compared; those that a test recorded without `kernel_gate` only now."""
        entries: list[dict[str, Any]] = getattr(report, REPORT_ATTRIBUTE, [])
        if not self._plan.compare or not entries:
            return []
        known, reported = item.stash.get(COMPARED_KEY, {}), item.stash.setdefault(REPORTED_KEY, Counter())
        found = []
        for entry in entries:
            verdict = from_plain(entry["verdict"], Verdict)
            kernel = (entry["nodeid"], verdict.case.id, verdict.label)
            key = (*kernel, reported[kernel])
            reported[kernel] += 1
            found.append(placed(known.get(key) or self._compare(key, verdict), *report.location[:2]))
        return found

    def _compare(self, key: PinKey, verdict: Verdict) -> Comparison:
        nodeid, _, _, number = key
        device = verdict.machine.device if verdict.machine else ""
        mine = [baseline for baseline in self._baselines if baseline.device == device]
        with beside_no_timing(self._session):
            if mine:
                return compare_with(mine[0], nodeid, verdict, number=number, margin=self._plan.margin)
            return missing(nodeid, verdict, self._plan.compare, self._baselines, margin=self._plan.margin)


def beside_no_timing(session: KlineageSession) -> AbstractContextManager[object]:
    """Bootstraps are work for a core: beside xdist's other workers, wait until none of them times on the CPU."""
    if not session.is_worker or session.platform != "cpu":
        return nullcontext()
    return machine_lock("cpu", alone=False)
