"""Whether the times of a side are one population, and what is sure where they are not. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from pytest_klineage.gate.timing.policy import SIDES, Samples
from pytest_klineage.gate.timing.statistics import chance_of_as_many
from pytest_klineage.records import Code, Reason, Status
from pytest_klineage.records.bootstrap import quantile

GROUPS_APART = 1.5
"""Factor between the medians of two groups above which a message distinguishes them."""
SMALLEST_GROUP = 0.1
"""Share of the samples that a group has at least."""
HOPELESS = 0.5
"""Share of the required speedup below which a kernel fails whatever disturbed its timing."""
SLOW, UNLIKELY = (30.0, 8.0, 3.0, 2.0), 1e-3
"""A sample, of a call or on a GPU of a block of them, is slow that takes longer than so many medians of its side, the
first of these by which some are the candidate's own; and how unlikely it is that so many more of its samples are. Where
a busy machine makes many of the reference's calls twice as long, those of 30 medians are still the candidate's."""


class Groups(msgspec.Struct, frozen=True):
    """Two populations of times."""

    low_ms: float
    high_ms: float
    low_count: int
    high_count: int


def quartiles(samples_ms: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile. Raises ValueError when empty."""
    ordered = sorted(samples_ms)
    return quantile(ordered, 0.25), quantile(ordered, 0.75)


def is_unstable(samples_ms: Sequence[float], limit: float) -> bool:
    """Whether the quartiles differ by more than a factor: the median says which population had a few samples more."""
    low, high = quartiles(samples_ms)
    return high > limit * low


def two_groups(samples_ms: Sequence[float]) -> Groups | None:
    """The split of the sorted times whose groups scatter least, as logarithms; None where they are not apart."""
    ordered = sorted(samples_ms)
    logs = [math.log(value) for value in ordered]
    least = max(1, math.ceil(SMALLEST_GROUP * len(logs)))
    splits = range(least, len(logs) - least + 1)
    if not splits:
        return None
    sums = [0.0]
    for value in logs:
        sums.append(sums[-1] + value)
    total, count = sums[-1], len(logs)
    # The squares within both groups are least where those between them are most.
    at = max(splits, key=lambda n: sums[n] ** 2 / n + (total - sums[n]) ** 2 / (count - n))
    low, high = median(ordered[:at]), median(ordered[at:])
    return Groups(low, high, at, count - at) if high > GROUPS_APART * low else None


def at_best(samples: Samples) -> float:
    """The speedup of the candidate's fast quarter over the reference's slow quarter."""
    return quartiles(samples.reference)[1] / quartiles(samples.candidate)[0]


def clearly_fails(high: float, best: float, at_least: float) -> bool:
    """Whether an interval that ends at `high` lies wholly below half of what is asked, and the `best` case as well."""
    return max(high, best) < HOPELESS * at_least


class SlowCalls(msgspec.Struct, frozen=True):
    """Samples of the candidate that take much longer than most, and what the speedup is with them."""

    medians: float
    """How many medians they all exceed."""
    count: int
    samples: int
    by_sums: float
    """By the mean of all samples of each side, of which do_bench has not equally many."""


def own_slow_calls(samples: Samples) -> SlowCalls | None:
    """The candidate's slow calls, where they are its own; None where they may be the machine's."""
    return next((found for medians in SLOW if (found := calls_beyond(samples, medians))), None)


def calls_beyond(samples: Samples, medians: float) -> SlowCalls | None:
    """Those of more than so many medians, where they are the candidate's own.

    More of its calls than of the reference's are slow, in medians of each side. And more last longer by half as much
    as its slow ones do in the median: what the machine adds to a short call it adds to a long one as well.
    """
    reference, candidate = samples.reference, samples.candidate
    middle, usual = median(candidate), median(reference)
    slow = [value - middle for value in candidate if value > medians * middle]
    if not slow:
        return None
    longer = median(slow) / 2
    counts = (
        (len(slow), sum(value > medians * usual for value in reference)),
        (sum(value - middle > longer for value in candidate), sum(value - usual > longer for value in reference)),
    )
    if max(chance_of_as_many(own, len(candidate), other, len(reference)) for own, other in counts) >= UNLIKELY:
        return None
    return SlowCalls(medians, len(slow), len(candidate), fmean(reference) / fmean(candidate))


def steady_reason(timed: Reason, samples: Samples, *, at_least: float, line: float, limit: float) -> Reason:
    """The reason of a timing, made inconclusive where its times do not allow a hard verdict.

    That is where a side's quartiles differ by more than a factor of `limit`; and for `slower`, where the interval's
    ends do. A kernel that clearly fails is slower all the same, and so is one that alone scatters and is below the
    least speedup that is accepted, the `line`, at its best: no disturbance that the reference has not seen excuses it.
    Medians and quartiles do not see a few slow calls: where these are the candidate's own and put the speedup of all
    calls below the line, it is not accepted.
    """
    unstable = [side for side in SIDES if is_unstable(getattr(samples, side), limit)]
    if not unstable and timed.code.status is Status.ACCEPTED and (slow := own_slow_calls(samples)):
        return timed if slow.by_sums >= line else by_sums_reason(timed, slow, line)
    low, high = (float(timed.evidence[end]) for end in ("low", "high"))
    too_wide = timed.code is Code.SLOWER_THAN_REQUIRED and high > limit * low
    if not (unstable or too_wide):
        return timed
    if timed.code is Code.SLOWER_THAN_REQUIRED:
        alone = unstable == ["candidate"]
        if clearly_fails(high, at_best(samples), at_least) or (alone and max(high, at_best(samples)) < line):
            return timed
    seen = [what_was_seen(side, getattr(samples, side)) for side in unstable]
    seen += [] if unstable else [f"the interval's ends differ by a factor of {high / low:.1f}"]
    message = f"{'; '.join(seen)}: no speed of the kernel follows from that; measured: {timed.message}"
    return Reason(
        code=Code.INCONCLUSIVE_UNSTABLE, message=message, evidence={**timed.evidence, "unstable": ", ".join(unstable)}
    )


def by_sums_reason(timed: Reason, slow: SlowCalls, line: float) -> Reason:
    """Why a kernel that its median would accept is not."""
    message = (
        f"{slow.count} of {slow.samples} samples of the candidate took over {slow.medians:g} times its median, far "
        f"more than of the reference: {slow.by_sums:.3g}x by the means of all samples, below {line:.3g}x; measured: "
        f"{timed.message}"
    )
    evidence = {**timed.evidence, "unstable": "candidate", "slow_calls": slow.count, "by_sums": slow.by_sums}
    return Reason(code=Code.INCONCLUSIVE_UNSTABLE, message=message, evidence=evidence)


def what_was_seen(side: str, samples_ms: Sequence[float]) -> str:
    """The times of an unstable side in words."""
    groups = two_groups(samples_ms)
    if groups is None:
        low, high = quartiles(samples_ms)
        return f"the {side}'s times scatter, a quarter below {low:.4g} ms and a quarter above {high:.4g} ms"
    return (
        f"the {side}'s times are two populations, {groups.low_count} samples around {groups.low_ms:.4g} ms and "
        f"{groups.high_count} around {groups.high_ms:.4g} ms"
    )
