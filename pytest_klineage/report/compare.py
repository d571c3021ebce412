"""Comparisons of recorded timings: the ratio of two runs with its interval, and what it says.

Compared are speedups over the reference, which was timed in turns with the kernel in either run. What makes a whole
machine faster or slower between the runs moves reference and kernel alike, and cancels. What disturbs a machine for
seconds does not: a whole judgement lies within it, and its interval knows of nothing else. So a change counts only when
every judgement says so, of two that were pinned and two of today. A base is timed in turns: see compare_base.py.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.records import Interval, Status, Timing, Verdict
from pytest_klineage.records.baseline import Baseline, Comparison, ComparisonOutcome, Pin
from pytest_klineage.records.bootstrap import (
    FEW_PAIRS,
    FINAL_RESAMPLES,
    groups_of,
    log_ratios,
    quantile,
    resample,
    start_factor,
    tail_share,
)
from pytest_klineage.records.facts import MEASURED
from pytest_klineage.records.verdict import DISTURBED

MARGIN = 0.03
"""Change of speed that counts, where the user gives none."""
CONFIDENCE = 0.99
"""Of a comparison's interval: a suite makes many comparisons, and one false alarm in twenty is too many."""
UNPAIRED = frozenset({"paper", "do_bench"})
"""Timing policies whose samples of both sides do not belong together."""
SHOWN_DIFFERENCES = 3


def read_tolerance(text: str) -> float:
    """The margin in "slower:3%", as a fraction. Raises UsageError."""
    found = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%", text.strip())
    if found is None or not 0 < float(found[1]) < 100:
        raise UsageError(f"{text!r} is not of the form slower:3%, with a percentage above 0 and below 100")
    return float(found[1]) / 100


def change_interval(
    old: Timing, new: Timing, *, confidence: float = CONFIDENCE, resamples: int = FINAL_RESAMPLES, seed: int = 0
) -> Interval:
    """New speedup over old speedup, with a percentile bootstrap interval from the samples of both runs.

    Above 1 the kernel has become faster against its reference. Each run is resampled by itself, starts of processes
    first and then the pairs of each (see docs/concepts/timing.md), and the logarithms are subtracted. As the gate's
    own interval it is expanded for few samples, of the run that has fewer, and each run for its few starts. `seed`
    makes a record reproducible from its samples.
    """
    draw = random.Random(seed)
    estimate = _middle(new) - _middle(old)
    (old_low, old_high), (new_low, new_high) = _range(old), _range(new)
    low, high = new_low - old_high, new_high - old_low
    if (count := min(_count(old), _count(new))) >= FEW_PAIRS:
        then, now = _deviations(old, resamples, draw), _deviations(new, resamples, draw)
        changes = sorted(estimate + b - a for a, b in zip(then, now, strict=True))
        tail = tail_share(confidence, count)
        low, high = max(low, quantile(changes, tail)), min(high, quantile(changes, 1 - tail))
    return Interval(math.exp(estimate), math.exp(min(low, estimate)), math.exp(max(high, estimate)), confidence)


def classify(change: Interval, margin: float) -> ComparisonOutcome:
    """slower, faster or same when the whole interval says so; unclear when it reaches over the margin.

    The margin is relative and the same in both directions: 1 - margin below, its reciprocal above.
    """
    line = 1 - margin
    if change.high < line:
        return ComparisonOutcome.SLOWER
    if change.low > 1 / line:
        return ComparisonOutcome.FASTER
    return ComparisonOutcome.SAME if change.low >= line and change.high <= 1 / line else ComparisonOutcome.UNCLEAR


def finding(
    nodeid: str, verdict: Verdict, against: str, margin: float, outcome: ComparisonOutcome, message: str,
    advice: str = "", /, **facts: Any,
) -> Comparison:  # fmt: skip
    """What is said of one kernel's verdict of today; `facts` are further fields."""
    new = verdict.timing.speedup if verdict.timing else None
    return Comparison(
        nodeid=nodeid, case=verdict.case.id, kernel=verdict.label, against=against, outcome=outcome, message=message,
        advice=advice, margin=margin, new=new, **facts,
    )  # fmt: skip


def compare(pin: Pin, verdict: Verdict, *, against: str, margin: float, confidence: float = CONFIDENCE) -> Comparison:
    """One kernel's verdict of today with its pin."""
    outcome, message, advice, change = _judged(pin, verdict, against, margin, confidence)
    old = pin.timing.speedup
    made = finding(pin.nodeid, verdict, against, margin, outcome, message, advice, ratio=change, old=old)
    if pin.again is None or verdict.timing is None or change is None or not outcome.change:
        return made
    other = change_interval(pin.again, verdict.timing, confidence=confidence)
    if classify(other, margin) is outcome:
        return msgspec.structs.replace(made, ratios=(change, other))
    message = f"{change_text(change)}, and {change_text(other)} of the second judgement that was pinned: not the same"
    return _unclear(made, message, ratios=(change, other))


def compare_with(
    baseline: Baseline, nodeid: str, verdict: Verdict, *, number: int = 0, margin: float, confidence: float = CONFIDENCE
) -> Comparison:
    """The same with the pin that a baseline has of this kernel; `new` when it has none."""
    key = (nodeid, verdict.case.id, verdict.label, number)
    for pin in baseline.pins:
        if pin.key == key:
            return compare(pin, verdict, against=baseline.name, margin=margin, confidence=confidence)
    if verdict.status is Status.SKIPPED:
        return finding(nodeid, verdict, baseline.name, margin, ComparisonOutcome.SKIPPED, "it was not judged")
    message, advice = f"baseline {baseline.name!r} has no pin of it", f"--klineage-save={baseline.name} adds it"
    return finding(nodeid, verdict, baseline.name, margin, ComparisonOutcome.NEW, message, advice)


def confirmed(first: Comparison, second: Comparison, again: Verdict) -> Comparison:
    """A change of speed that was judged twice, `again` being the second judgement: unclear unless both agree.

    A kernel that is broken, or cannot be compared, in the second judgement is that.
    """
    if second.ratio is None or first.ratio is None:
        return msgspec.structs.replace(second, again=again)
    ratios = (*(first.ratios or (first.ratio,)), *(second.ratios or (second.ratio,)))
    both = msgspec.structs.replace(first, ratios=ratios, again=again)
    if second.outcome is first.outcome:
        message = f"{first.message}; judged once more {change_text(second.ratio)}"
        return msgspec.structs.replace(both, message=message)
    message = f"{change_text(first.ratio)}, not confirmed; judged once more {second.message}"
    return _unclear(both, message)


def missing(nodeid: str, verdict: Verdict, name: str, others: Sequence[Baseline], *, margin: float) -> Comparison:
    """What to say of a kernel when its device has no baseline of that name; `others` are those of other devices."""
    machine = verdict.machine
    here = f"{machine.device} ({machine.platform})" if machine is not None else "this machine"
    there = ", ".join(sorted({f"{other.device} ({other.platform})" for other in others}))
    outcome, message = ComparisonOutcome.NO_BASELINE, f"there is no baseline {name!r}"
    if others:
        outcome = ComparisonOutcome.OTHER_DEVICE
        message = f"baseline {name!r} was pinned on {there}; this is {here}, and speeds of two devices do not compare"
    advice = f"pin it where the reviewed code is, on {here}: pytest --klineage-save={name}"
    return finding(nodeid, verdict, name, margin, outcome, message, advice)


def reference_differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What is said of both references and differs: versions, flags, threads, the variant that was chosen."""
    shared = [name for name in old if name in new and not name.startswith(MEASURED)]
    return [f"{name} {old[name]} then, {new[name]} now" for name in shared if old[name] != new[name]]


def setup_differences(old: Timing, new: Timing) -> list[str]:
    """What two timings were taken under and differs: the flush, and on a CPU threads and where they were bound."""
    pairs = (
        ("flush", _mebibytes(old.flush_bytes), _mebibytes(new.flush_bytes)),
        ("threads", str(old.threads or "not recorded"), str(new.threads or "not recorded")),
        ("binding", old.binding or "not recorded", new.binding or "not recorded"),
    )
    return [f"{name} {then} then, {now} now" for name, then, now in pairs if then != now]


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:g} MiB"


def _judged(
    pin: Pin, verdict: Verdict, against: str, margin: float, confidence: float
) -> tuple[ComparisonOutcome, str, str, Interval | None]:
    """Outcome, sentence, next step and ratio of one comparison with a pin."""
    if verdict.status is Status.SKIPPED:
        return ComparisonOutcome.SKIPPED, f"it was not judged: {first_line(verdict.reasons[0].message)}", "", None
    if verdict.timing is None or not verdict.scored:
        message = f"it was timed when it was pinned, and is {verdict.code.value} now"
        return ComparisonOutcome.BROKEN, message, "see the verdict of its test", None
    again = f"pin it again, from the reviewed code: pytest --klineage-save={against}"
    if pin.machine.device != (device := verdict.machine.device if verdict.machine else ""):
        message = f"it was pinned on {pin.machine.device}; this is {device or 'an unknown device'}"
        return ComparisonOutcome.OTHER_DEVICE, message, again, None
    if pin.case.definition != verdict.case.definition:
        message = "the definition of its operator has changed since it was pinned"
        return ComparisonOutcome.OTHER_DEFINITION, message, again, None
    differences = reference_differences(pin.reference, verdict.reference)
    if pin.case.reference != verdict.case.reference:
        differences.insert(0, f"reference {pin.case.reference} then, {verdict.case.reference} now")
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        message = "; ".join(differences[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        return ComparisonOutcome.OTHER_REFERENCE, message, again, None
    if differences := setup_differences(pin.timing, verdict.timing):
        message = f"it was timed otherwise: {'; '.join(differences)}"
        return ComparisonOutcome.OTHER_SETUP, message, again, None
    if pin.timing.policy != verdict.timing.policy:
        message = f"it was pinned with the timing policy {pin.timing.policy}; this is {verdict.timing.policy}"
        return ComparisonOutcome.OTHER_POLICY, message, f"--klineage-policy={pin.timing.policy}, or {again}", None
    change = change_interval(pin.timing, verdict.timing, confidence=confidence)
    outcome = ComparisonOutcome.UNCLEAR if verdict.code in DISTURBED else classify(change, margin)
    return outcome, _figures(outcome, change, f"baseline {against!r}", margin), advice_for(outcome, against), change


def _unclear(said: Comparison, message: str, **facts: Any) -> Comparison:
    outcome = ComparisonOutcome.UNCLEAR
    return msgspec.structs.replace(said, outcome=outcome, message=message, advice=advice_for(outcome, ""), **facts)


def where_it_lies(change: Interval, margin: float) -> str:
    """Where an interval lies against the margin, in words with figures."""
    words = {ComparisonOutcome.SLOWER: "all of it below", ComparisonOutcome.FASTER: "all of it above",
             ComparisonOutcome.SAME: "all of it within"}  # fmt: skip
    return f"{words.get(classify(change, margin), 'reaching over')} {_limits(margin)}"


def _limits(margin: float) -> str:
    return f"{1 - margin:.3g} to {1 / (1 - margin):.3g}"


def _figures(outcome: ComparisonOutcome, change: Interval, whom: str, margin: float) -> str:
    figure = f"{change_text(change)} of the speed of the {whom}"
    if outcome is ComparisonOutcome.UNCLEAR:
        return f"{figure}: the interval reaches over {_limits(margin)}, or the timing was disturbed"
    return f"{figure}, {where_it_lies(change, margin)}"


def change_text(change: Interval) -> str:
    """A change with its interval, such as "0.941x [0.930, 0.952]"; a margin of 3 % needs the third digit."""
    return f"{change.estimate:.3f}x [{change.low:.3f}, {change.high:.3f}]"


def advice_for(outcome: ComparisonOutcome, baseline: str) -> str:
    """The next step after a comparison with a baseline; an empty name stands for the base."""
    if outcome is ComparisonOutcome.SLOWER:
        return "profile the kernel, or say in the review why it may be slower"
    if outcome is ComparisonOutcome.FASTER and baseline:
        return f"the baseline is outdated; once this is merged, pin it again: pytest --klineage-save={baseline}"
    if outcome is ComparisonOutcome.UNCLEAR:
        return "quieten the machine, raise --klineage-time-limit, or allow more"
    return ""


def first_line(message: str) -> str:
    """The first line of a message, without blanks around it."""
    return (message.strip().splitlines() or [""])[0].strip()


def _ratios(timing: Timing) -> list[float]:
    """Logarithm of every pair's speedup."""
    return log_ratios(timing.reference_samples_ms, timing.candidate_samples_ms)


def _middle(timing: Timing) -> float:
    """The estimate's logarithm: of the median pair, or of the ratio of medians."""
    if timing.policy not in UNPAIRED:
        return statistics.median(_ratios(timing))
    reference, candidate = timing.reference_samples_ms, timing.candidate_samples_ms
    return math.log(statistics.median(reference) / statistics.median(candidate))


def _count(timing: Timing) -> int:
    """Samples of the side that has fewer."""
    return min(len(timing.reference_samples_ms), len(timing.candidate_samples_ms))


def _range(timing: Timing) -> tuple[float, float]:
    """Smallest and largest logarithm that the samples allow."""
    if timing.policy not in UNPAIRED:
        return min(found := _ratios(timing)), max(found)
    reference, candidate = timing.reference_samples_ms, timing.candidate_samples_ms
    return math.log(min(reference) / max(candidate)), math.log(max(reference) / min(candidate))


def _deviations(timing: Timing, resamples: int, draw: random.Random) -> list[float]:
    """By how much bootstrap replicates of `_middle` differ from it, wider for few starts as the gate's interval is."""
    middle = _middle(timing)
    if timing.policy in UNPAIRED:
        sides = (timing.reference_samples_ms, timing.candidate_samples_ms)
        middles = [[statistics.median(draw.choices(side, k=len(side))) for side in sides] for _ in range(resamples)]
        return [math.log(reference / candidate) - middle for reference, candidate in middles]
    groups = groups_of(_ratios(timing), timing.starts)
    wider = start_factor(len(groups))
    return [wider * (statistics.median(resample(groups, draw)) - middle) for _ in range(resamples)]
