"""The interval over all judgements of a kernel against its base, from the starts and pairs of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.records import Interval, Timing, Verdict
from pytest_klineage.records.baseline import Comparison
from pytest_klineage.records.bootstrap import FINAL_RESAMPLES
from pytest_klineage.report.compare import UNPAIRED
from pytest_klineage.report.compare_base import compare_base, undisturbed

CONFIDENCE = 0.995
"""Of every look. A change may be found at two of them, after two judgements and after three, and both together err no
more often than one interval of 99 %."""


def compare_judged(nodeid: str, verdict: Verdict, judged: Sequence[Verdict], *, margin: float) -> Comparison:
    """One kernel with the base's, from all judgements so far; disturbed ones are left out while there are others."""
    timings = [paired.timing for paired in undisturbed(judged) or judged if paired.timing is not None]
    change = pooled_interval(timings) if timings else None
    return compare_base(nodeid, verdict, judged, change, margin=margin)


def pooled_interval(
    timings: Sequence[Timing], *, confidence: float = CONFIDENCE, resamples: int = FINAL_RESAMPLES
) -> Interval:
    """The gate's interval, as though all starts of all timings were of one.

    Policies that time one side after the other have no starts to pool: there the timings have to agree.
    """
    if any(timing.policy in UNPAIRED for timing in timings):
        return _union([timing.speedup for timing in timings])
    reference = [sample for timing in timings for sample in timing.reference_samples_ms]
    candidate = [sample for timing in timings for sample in timing.candidate_samples_ms]
    return paired_interval(
        reference, candidate, confidence=confidence, resamples=resamples, starts=pooled_starts(timings)
    )


def pooled_starts(timings: Sequence[Timing]) -> list[int]:
    """At which of all samples, one timing after the other, both processes were new."""
    begins = accumulate((len(timing.candidate_samples_ms) for timing in timings), initial=0)
    return [begin + start for begin, timing in zip(begins, timings, strict=False) for start in timing.starts]


def _union(intervals: Sequence[Interval]) -> Interval:
    """From the lowest end to the highest."""
    low, high = min(interval.low for interval in intervals), max(interval.high for interval in intervals)
    return Interval(median(interval.estimate for interval in intervals), low, high, intervals[0].confidence)
