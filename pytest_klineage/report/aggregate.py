"""One number for many cases: the geometric mean of the speedups that count, with its coverage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_klineage.records import Status, Verdict
from pytest_klineage.records.verdict import DISTURBED, WIDEST


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of verdicts comes to. A failure is never 1.0x: it lowers the coverage and leaves the mean alone."""

    geomean: float | None
    """Geometric mean of the scored speedups; None when nothing was scored."""
    scored: int
    judged: int
    """Verdicts that are not skips."""
    skipped: int


def geometric_mean(values: Iterable[float]) -> float | None:
    """exp of the mean log; None for no values. Raises ValueError for a value that is not positive and finite."""
    logs = []
    for value in values:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"a geometric mean needs positive, finite values, got {value}")
        logs.append(math.log(value))
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def summarise(verdicts: Iterable[Verdict]) -> Summary:
    """Mean and coverage of some verdicts."""
    speedups: list[float] = []
    judged = skipped = 0
    for verdict in verdicts:
        if verdict.status is Status.SKIPPED:
            skipped += 1
            continue
        judged += 1
        if verdict.scored and verdict.timing is not None:
            speedups.append(verdict.timing.speedup.estimate)
    return Summary(geomean=geometric_mean(speedups), scored=len(speedups), judged=judged, skipped=skipped)


def uncertain(verdict: Verdict) -> bool:
    """Whether a scored speedup says little: a disturbed timing, or an interval that spans more than a factor of two."""
    if verdict.timing is None or not verdict.scored:
        return False
    interval = verdict.timing.speedup
    return verdict.code in DISTURBED or interval.high > WIDEST * interval.low


def by_kernel(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts by kernel label, in order of first appearance, when labels mean methods; otherwise all under "".

    Labels mean methods when there are several and each was judged on two cases or more, as "naive" and "expert" are.
    A mean over kernels that are not comparable would only confuse.
    """
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.label, []).append(verdict)
    if len(groups) > 1 and all(len({verdict.case.id for verdict in group}) > 1 for group in groups.values()):
        return groups
    return {"": list(verdicts)} if verdicts else {}
