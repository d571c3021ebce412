"""From facts to reasons: how a process ended, what two clocks say, where an interval lies. Pure functions."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence

import msgspec

from pytest_klineage.gate.timing.policy import Outcome, Samples, known_gain
from pytest_klineage.gate.timing.stability import at_best, clearly_fails
from pytest_klineage.gate.timing.statistics import (
    Standing,
    median,
    paired_interval,
    quantile,
    quantile_of_others,
    standing,
)
from pytest_klineage.records import Code, KernelCase, Reason
from pytest_klineage.records.messages import Ended, Opened

CLOCK_SHARE, CLOCK_FLOOR_MS, CLOCK_GAPS = 0.10, 0.5, 2.0
"""The trusted clock may exceed the worker's, beyond what it does for the reference, by this share, by this much, or by
so many allowed gaps: a kernel that pins its thread answers later than others without any lie."""
CLOCK_PAIRS = 20
"""With fewer pairs a quartile may be chance: then a kernel must hide time in every call before it is held to that."""
LEAST_NOVEL = 8
"""Pairs with new inputs, and pairs with disguised old ones, from which memory may be concluded."""
MEMORY_GAIN, MEMORY_CONFIDENCE = 1.2, 0.99
"""How much faster known inputs must be before it counts, and the confidence of both intervals."""
CLOCK_QUANTILE, CLOCK_MEDIANS = 0.9, 2.0
"""A gap is allowed up to this quantile of the reference's, or so many of its medians: on a busy machine the quantile is
as long as a time slice, and a whole kernel would hide in it."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
COMMAND = re.compile(r"^(\s*:)(?=:)|(##)(?=\[)", re.M)
"""Where a line would be a command to GitHub's runner, which skips leading space and finds "##[" anywhere."""


def clean(text: str, limit: int = 4000) -> str:
    """Text of a candidate, made harmless for terminals and CI logs."""
    text = COMMAND.sub(r"\g<0> ", CONTROL.sub(" ", text))
    return text if len(text) <= limit else text[:limit] + f"\n... {len(text) - limit} more characters"


def how_it_ended(ended: Ended, *, flooded: bool, printed: int) -> Reason:
    """The reason for a candidate whose channel closed before it had answered."""
    if flooded:
        return Reason(code=Code.LOG_FLOOD, message=f"the kernel printed {printed} bytes and was ended")
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name if ended.signal in list(signal.Signals) else str(ended.signal)
        if ended.signal == signal.SIGKILL:
            return Reason(
                code=Code.OUT_OF_MEMORY, message="the process was killed by the system, most likely for memory"
            )
        return Reason(
            code=Code.CRASH, message=f"the kernel's process ended by {name}", evidence={"signal": ended.signal}
        )
    if ended.exit_code == 0:
        return Reason(code=Code.EARLY_EXIT, message="the kernel's process ended with status 0 before it had answered")
    if ended.exit_code is not None:
        message = f"the kernel's process ended with status {ended.exit_code} before it had answered"
        return Reason(code=Code.EXITED, message=message, evidence={"exit_code": ended.exit_code})
    return Reason(code=Code.FORGED_REPLY, message="the kernel closed the channel on which it was to answer")


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """What two clocks say: per call, the trusted clock minus the worker's own, in ms."""

    candidate_gaps: tuple[float, ...]
    reference_gaps: tuple[float, ...]
    one_block: bool = False
    """Whether all gaps of a side are one: of how much they differ, nothing is known."""

    @property
    def allowed_ms(self) -> float:
        """The gap that an honest worker has at times: request, answer and being scheduled, seen at the reference."""
        most = CLOCK_MEDIANS * median(self.reference_gaps)
        return most if self.one_block else min(quantile(sorted(self.reference_gaps), CLOCK_QUANTILE), most)

    def allowed_reference_ms(self) -> list[float]:
        """The same for every gap of the reference, by all others: else it alone would be measured by itself."""
        if self.one_block:
            return [self.allowed_ms] * len(self.reference_gaps)
        often = quantile_of_others(self.reference_gaps, CLOCK_QUANTILE)
        middle = quantile_of_others(self.reference_gaps, 0.5)
        return [min(most, CLOCK_MEDIANS * half) for most, half in zip(often, middle, strict=True)]


def clocks_of(samples: Samples) -> Clocks:
    """Gaps of both sides."""
    return Clocks(
        candidate_gaps=tuple(wall - own for wall, own in zip(samples.candidate_wall, samples.candidate, strict=True)),
        reference_gaps=tuple(wall - own for wall, own in zip(samples.reference_wall, samples.reference, strict=True)),
        one_block=samples.one_block,
    )


def charged(samples: Samples) -> Samples:
    """Samples with every gap beyond the allowed one added to the call it belongs to, on both sides alike.

    A worker that stops its own clock early gains nothing: what it leaves out, the trusted clock puts back.
    """
    clocks = clocks_of(samples)
    allowed = clocks.allowed_ms
    return Samples(
        reference=[
            own + max(0.0, gap - least)
            for own, gap, least in zip(
                samples.reference, clocks.reference_gaps, clocks.allowed_reference_ms(), strict=True
            )
        ],
        candidate=[
            own + max(0.0, gap - allowed) for own, gap in zip(samples.candidate, clocks.candidate_gaps, strict=True)
        ],
        reference_wall=samples.reference_wall,
        candidate_wall=samples.candidate_wall,
        candidate_waited=samples.candidate_waited,
        novel=samples.novel,
        starts=samples.starts,
        calls_per_sample=samples.calls_per_sample,
        one_block=samples.one_block,
    )


def charges(own: Sequence[float], paid: Sequence[float]) -> tuple[float, ...]:
    """What was added to every sample; nothing at all when nothing was added to any."""
    added = tuple(after - before for before, after in zip(own, paid, strict=True))
    return added if any(added) else ()


def clock_reason(samples: Samples) -> Reason | None:
    """A reason when nearly all calls of the candidate hide time from its own clock.

    The lower quartile decides: on a busy machine many answers come late, but a kernel that lies about its time has a
    gap in every call that it lies about. What the system accounts for, because oracle or worker had no processor, is
    no lie. Calls that are not enough for a reason, and waiting, are still charged (see `charged`).
    """
    clocks, own = clocks_of(samples), median(samples.candidate)
    enough = len(samples.candidate) >= CLOCK_PAIRS
    waited = samples.candidate_waited or [0.0] * len(samples.candidate)
    unexplained = sorted(gap - lost for gap, lost in zip(clocks.candidate_gaps, waited, strict=True))
    excess = quantile(unexplained, 0.25 if enough else 0.0) - clocks.allowed_ms
    if excess <= max(CLOCK_SHARE * own, CLOCK_FLOOR_MS, CLOCK_GAPS * clocks.allowed_ms):
        return None
    return Reason(
        code=Code.CLOCK,
        message=f"the worker's clock says {own:.3f} ms, the trusted clock saw at least {own + excess:.3f} ms",
        evidence={"own_ms": own, "hidden_ms": excess, "allowed_gap_ms": clocks.allowed_ms},
    )


def novel_clock_reason(samples: Samples) -> Reason | None:
    """A reason when the candidate hides more time from its own clock on new inputs than on disguised old ones.

    An honest worker cannot tell them apart, and no machine does.
    """
    waited = samples.candidate_waited or [0.0] * len(samples.candidate)
    gaps = [gap - lost for gap, lost in zip(clocks_of(samples).candidate_gaps, waited, strict=True)]
    novel = sorted(gap for gap, new in zip(gaps, samples.novel, strict=False) if new)
    known = sorted(gap for gap, new in zip(gaps, samples.novel, strict=False) if not new)
    if min(len(novel), len(known)) < LEAST_NOVEL:
        return None
    own, allowed = median(samples.candidate), clocks_of(samples).allowed_ms
    excess = quantile(novel, 0.25) - quantile(known, 0.75)
    if excess <= max(CLOCK_SHARE * own, CLOCK_FLOOR_MS, CLOCK_GAPS * allowed):
        return None
    return Reason(
        code=Code.CLOCK,
        message=f"the worker's clock leaves out {excess:.3f} ms more of calls with new inputs than of all others",
        evidence={"own_ms": own, "hidden_ms": excess, "novel_pairs": len(novel)},
    )


def memory_reason(samples: Samples) -> Reason | None:
    """A reason when the candidate is clearly faster on inputs it has met before, in whatever disguise.

    For paired samples only, with their charges: a clock that is bent on new inputs would hide them. Every call computes
    the same amount of work, so remembering is all that can make a difference between new inputs and disguised old ones.
    Held against the reference, and, where that takes equally long on both, for the candidate's times alone: on a busy
    machine the reference's would hide what is plain in the candidate's.
    """
    alone = [1.0] * len(samples.candidate)
    reason = faster_when_known(samples.reference, samples.candidate, samples.novel)
    if reason is None and known_gain(alone, samples.reference, samples.novel) < MEMORY_GAIN:
        reason = faster_when_known(alone, samples.candidate, samples.novel)
    return reason


def faster_when_known(reference: list[float], candidate: list[float], novel: list[bool]) -> Reason | None:
    """A reason when intervals of the speedup on known and on new inputs lie clearly apart."""
    groups = [
        [(r, c) for r, c, new in zip(reference, candidate, novel, strict=False) if new is kind]
        for kind in (True, False)
    ]
    if min(map(len, groups)) < LEAST_NOVEL:
        return None
    on_novel, on_known = (
        paired_interval([pair[0] for pair in group], [pair[1] for pair in group], confidence=MEMORY_CONFIDENCE)
        for group in groups
    )
    if on_known.low <= MEMORY_GAIN * on_novel.high:
        return None
    gain = on_known.estimate / on_novel.estimate
    return Reason(
        code=Code.REPLAY,
        message=f"{gain:.2f} times as fast on disguised inputs that it had met as on new ones",
        evidence={"known_low": on_known.low, "novel_high": on_novel.high, "novel_pairs": len(groups[0])},
    )


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """What no machine of a kind exceeds."""

    flops: float
    """Floating-point operations per second."""
    bytes: float
    """Bytes read and written per second."""


TRUSTED_GAIN = 1.5
"""A kernel that is no faster than so many times a trusted reference is not too fast: the floor would be wrong then."""


def floor_reason(opened: Opened, candidate_ms: float, peaks: Peaks, trusted_ms: float | None = None) -> Reason | None:
    """A reason when a time is below what arithmetic or memory could do on any such machine.

    `trusted_ms` is what a reference took that is no candidate; None where there is none.
    """
    if trusted_ms is not None and trusted_ms <= TRUSTED_GAIN * candidate_ms:
        return None
    by_flops = opened.flops / peaks.flops * 1e3
    by_bytes = opened.min_bytes / peaks.bytes * 1e3
    floor = max(by_flops, by_bytes)
    if candidate_ms >= floor:
        return None
    return Reason(
        code=Code.TOO_FAST,
        message=f"{candidate_ms:.4f} ms is below the physical floor of {floor:.4f} ms",
        evidence={"floor_flops_ms": by_flops, "floor_bytes_ms": by_bytes},
    )


def timing_reason(case: KernelCase, outcome: Outcome, margin: float) -> Reason:
    """Accepted, slower or inconclusive, in one sentence with the figures."""
    interval = outcome.interval
    narrower = "a longer --klineage-time-limit narrows the interval"
    if outcome.stopped == "precise":
        narrower = "it is as narrow as --klineage-precision asks: the kernel is just about at what is required"
    place = standing(interval, at_least=case.at_least, margin=margin)
    shown = f"{interval.estimate:.3f}x [{interval.low:.3f}, {interval.high:.3f}]"
    evidence: dict[str, float | int | str | bool]
    evidence = {"speedup": interval.estimate, "low": interval.low, "high": interval.high, "at_least": case.at_least,
                "at_best": at_best(outcome.samples)}  # fmt: skip
    codes = {
        Standing.FASTER: (Code.ACCEPTED_FASTER, f"faster than the reference: {shown}"),
        Standing.SAME: (Code.ACCEPTED_SAME, f"as fast as the reference: {shown}"),
        Standing.MEETS: (Code.ACCEPTED_MEETS_TARGET, f"reaches the required {case.at_least:g}x: {shown}"),
        Standing.SLOWER: (Code.SLOWER_THAN_REQUIRED, f"required {case.at_least:g}x, measured {shown}"),
        Standing.INCONCLUSIVE: (
            Code.INCONCLUSIVE_INTERVAL,
            f"required {case.at_least:g}x, measured {shown}; {narrower}",
        ),
    }
    code, message = codes[place]
    return Reason(code=code, message=message, evidence=evidence)


def busy_reason(timed: Reason, foreign_load: float, limit: float) -> Reason:
    """The reason of a timing, made inconclusive when others used the machine at the same time.

    A kernel that is clearly too slow is that on a busy machine as well.
    """
    if foreign_load <= limit or timed.code is Code.INCONCLUSIVE_INTERVAL or fails_anyway(timed):
        return timed
    message = (
        f"other processes used {100 * foreign_load:.0f} % of the machine while it was timed, {100 * limit:.0f} % are "
        f"allowed; measured: {timed.message}. Time it on an idle machine, or raise --klineage-busy-limit"
    )
    evidence = {**timed.evidence, "foreign_load": foreign_load}
    return Reason(code=Code.INCONCLUSIVE_BUSY, message=message, evidence=evidence)


def fails_anyway(timed: Reason) -> bool:
    """Whether a timing says `slower` so clearly that no disturbance explains it."""
    if timed.code is not Code.SLOWER_THAN_REQUIRED:
        return False
    high, best, asked = (float(timed.evidence.get(name, math.inf)) for name in ("high", "at_best", "at_least"))
    return math.isfinite(asked) and clearly_fails(high, best, asked)


def library_reason(libraries: tuple[str, ...]) -> Reason | None:
    """A reason when a library that does a kernel's work was loaded by the candidate."""
    if not libraries:
        return None
    return Reason(code=Code.WRAPPER_LIBRARY, message=f"the kernel loaded {', '.join(libraries)}")
