"""Intervals of published kernels with what differs between runs in them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_klineage.records import Interval, Verdict
from pytest_klineage.report.reruns import between_runs, widened
from pytest_klineage.report.tables import ratio
from pytest_klineage.results.packed import line_files, read_lines

QUALITY = Path(__file__).parents[1] / "results" / "gate_quality"


class Rerun(msgspec.Struct, frozen=True):
    """Of a recorded judgement of one kernel in several runs: what suites/gate_quality/test_reruns.py publishes."""

    case: str
    source_digest: str
    speedup: Interval


def between_runs_of(run: str) -> dict[str, float]:
    """By case the largest deviation between recorded runs of one kernel, as a logarithm; empty where there are none."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    name, _, platform = run.rpartition("-")
    paths = line_files(QUALITY, f"reruns*-{platform}") if name == "main_tier" else ()
    for one in (one for path in paths for one in read_lines(path, Rerun)):
        groups.setdefault((one.case, one.source_digest), []).append(one.speedup)
    found: dict[str, float] = {}
    for (case, _digest), intervals in groups.items():
        if len(intervals) > 1:
            found[case] = max(found.get(case, 0.0), between_runs(intervals))
    return found


def over_runs(verdict: Verdict, spread: dict[str, float]) -> str:
    """The verdict's interval, wider by what runs of its case differ by."""
    if verdict.timing is None or verdict.case.id not in spread:
        return "-"
    wide = widened(verdict.timing.speedup, spread[verdict.case.id])
    return f"[{ratio(wide.low)}, {ratio(wide.high)}]"
