"""From facts to reasons: how a process ended, what two clocks say, where an interval lies. Pure functions."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from statistics import median

import msgspec

from pytest_klineage.gate.timing.policy import (
    ENOUGH_NOVEL,
    LEAST_NOVEL,
    Measurement,
    Policy,
    Samples,
    known_gain,
    shows_memory,
)
from pytest_klineage.gate.timing.stability import at_best, clearly_fails
from pytest_klineage.gate.timing.statistics import Standing, paired_interval, quantile_of_others, standing
from pytest_klineage.records import Code, Floor, KernelCase, Peaks, Reason, Status
from pytest_klineage.records.bootstrap import quantile
from pytest_klineage.records.messages import CaseOpened
from pytest_klineage.records.template_messages import WorkerExit

CLOCK_SHARE, CLOCK_FLOOR_MS, CLOCK_GAPS = 0.10, 0.5, 2.0
"""The trusted clock may exceed the worker's, beyond what it does for the reference, by this share, by this much, or by
so many allowed gaps: a kernel that pins its thread answers later than others without any lie."""
CLOCK_PAIRS = 18
"""As many as the least timing of a long kernel on a GPU has. With fewer pairs a quartile may be chance: then a kernel
must hide time in every call before it is held to that."""
NOISY_GAIN = 2.0
"""The same, where the reference seems faster on known inputs as well and its times scatter too much to say so."""
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


def how_it_ended(ended: WorkerExit, *, flooded: bool, printed: int) -> Reason:
    """The reason for a candidate whose channel closed before it had answered."""
    if flooded:
        return Reason(code=Code.LOG_FLOOD, message=f"the kernel printed {printed} bytes and was ended")
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name if ended.signal in list(signal.Signals) else str(ended.signal)
        if ended.signal == signal.SIGKILL:
            return Reason(
                code=Code.OUT_OF_MEMORY, message="the process was killed by the system, most likely for memory"
            )
        why = ", as by an instruction that this processor lacks" if ended.signal == signal.SIGILL else ""
        return Reason(
            code=Code.CRASH, message=f"the kernel's process ended by {name}{why}", evidence={"signal": ended.signal}
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


def overhead_corrected(samples: Samples) -> Samples:
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


def overheads_ms(own: Sequence[float], paid: Sequence[float]) -> tuple[float, ...]:
    """What was added to every sample; empty when nothing was added to any."""
    added = tuple(after - before for before, after in zip(own, paid, strict=True))
    return added if any(added) else ()


def clock_reason(samples: Samples) -> Reason | None:
    """A reason when nearly all calls of the candidate hide time from its own clock.

    The lower quartile decides: on a busy machine many answers come late, but a kernel that lies about its time has a
    gap in every call that it lies about. What the system accounts for, because oracle or worker had no processor, is
    no lie. Gaps that are not enough for a reason, and waiting, are still added to its time (`overhead_corrected`).
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
    """A reason when the candidate hides more time from its own clock on new inputs than on transformed old ones.

    An honest worker cannot distinguish them, nor does any machine.
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
    """A reason when the candidate is clearly faster on inputs it has met before, in whatever symmetry transform.

    For overhead-corrected paired samples only: a clock that is bent on new inputs would hide them. Every call computes
    the same amount of work, so remembering is all that can make a difference between new inputs and transformed old
    ones.
    Held against the reference, and for the candidate's times alone: on a busy machine the reference's would hide what
    is plain in the candidate's. Alone it must be faster by more than the reference is, see `asked_alone`.
    """
    reason = faster_when_known(samples.reference, samples.candidate, samples.novel)
    if reason is not None:
        return reason
    alone = [1.0] * len(samples.candidate)
    return faster_when_known(alone, samples.candidate, samples.novel, asked_alone(samples.reference, samples.novel))


def asked_alone(reference: list[float], novel: list[bool]) -> float:
    """How many times as fast a candidate's times alone must be on known inputs, by what the reference's are.

    The reference's median says little where few times scatter over a time slice: it counts where intervals agree.
    """
    alone = [1.0] * len(reference)
    gain = known_gain(alone, reference, novel)
    if gain < MEMORY_GAIN:
        return MEMORY_GAIN
    return MEMORY_GAIN * gain**2 if faster_when_known(alone, reference, novel) else NOISY_GAIN


def faster_when_known(
    reference: list[float], candidate: list[float], novel: list[bool], asked: float = MEMORY_GAIN
) -> Reason | None:  # fmt: skip
    """A reason when intervals of the speedup on known and on new inputs lie apart by the factor `asked`."""
    groups = [
        [(r, c) for r, c, new in zip(reference, candidate, novel, strict=False) if new is kind]
        for kind in (True, False)
    ]
    # An interval holds its estimate: where the estimates lie no further apart, no interval is needed.
    if min(map(len, groups)) < LEAST_NOVEL or known_gain(reference, candidate, novel) <= asked:
        return None
    on_novel, on_known = (
        paired_interval([pair[0] for pair in group], [pair[1] for pair in group], confidence=MEMORY_CONFIDENCE)
        for group in groups
    )
    if on_known.low <= asked * on_novel.high:
        return None
    gain = on_known.estimate / on_novel.estimate
    return Reason(
        code=Code.REPLAY,
        message=f"{gain:.2f} times as fast on transformed inputs that it had met as on new ones",
        evidence={"known_low": on_known.low, "novel_high": on_novel.high, "novel_pairs": len(groups[0])},
    )


TRUSTED_GAIN = 1.5
"""A kernel that is no faster than so many times a trusted reference is not too fast: the floor would be wrong then."""


def floor_of(flops: float, min_bytes: float, peaks: Peaks, product: str = "") -> Floor:
    """The least time that arithmetic and memory take at these peaks, those of a product or of all of a platform's."""
    by_flops, by_bytes = flops / peaks.flops * 1e3, min_bytes / peaks.bytes * 1e3
    return Floor(ms=max(by_flops, by_bytes), limit="flops" if by_flops > by_bytes else "bytes", product=product)


def floor_reason(
    opened: CaseOpened, candidate_ms: float, peaks: Peaks, trusted_ms: float | None = None
) -> Reason | None:
    """A reason when a time is below what arithmetic or memory could do on any such machine.

    `trusted_ms` is what a reference took that is no candidate; None without one.
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


def timing_reason(case: KernelCase, outcome: Measurement, margin: float) -> Reason:
    """Accepted, slower or inconclusive, in one sentence with the figures."""
    interval = outcome.interval
    narrower = "a longer --klineage-time-limit narrows the interval"
    if outcome.stopped == "precise":
        narrower = "it is as narrow as --klineage-precision asks: the kernel is just about at what is required"
    relation = standing(interval, at_least=case.at_least, margin=margin)
    shown = f"{interval.estimate:.3f}x [{interval.low:.3f}, {interval.high:.3f}]"
    target = target_words(interval.estimate, case.at_least, margin)
    faster = "faster than the reference" + (f", {target}" if interval.estimate < case.at_least else "")
    evidence: dict[str, float | int | str | bool]
    evidence = {"speedup": interval.estimate, "low": interval.low, "high": interval.high, "at_least": case.at_least,
                "at_best": at_best(outcome.samples)}  # fmt: skip
    codes = {
        Standing.FASTER: (Code.ACCEPTED_FASTER, f"{faster}: {shown}"),
        Standing.SAME: (Code.ACCEPTED_SAME, f"as fast as the reference: {shown}"),
        Standing.MEETS: (Code.ACCEPTED_MEETS_TARGET, f"{target}: {shown}"),
        Standing.SLOWER: (Code.SLOWER_THAN_REQUIRED, f"required {case.at_least:g}x, measured {shown}"),
        Standing.INCONCLUSIVE: (
            Code.INCONCLUSIVE_INTERVAL,
            f"required {case.at_least:g}x, measured {shown}; {narrower}",
        ),
    }
    code, message = codes[relation]
    return Reason(code=code, message=message, evidence=evidence)


def target_words(estimate: float, at_least: float, margin: float) -> str:
    """How the measured speedup of an accepted kernel stands to the required one."""
    return f"{'reaches' if estimate >= at_least else f'within {100 * margin:.3g} % of'} the required {at_least:g}x"


def compared_reason(timed: Reason, outcome: Measurement) -> Reason:
    """The reason of a timing on new and known problems, made inconclusive where time was up before there were enough.

    A kernel that answers from memory would be accepted by the pairs on problems that it has met.
    """
    if timed.code.status is not Status.ACCEPTED or outcome.stopped != "time limit" or shows_memory(outcome.samples):
        return timed
    new = sum(outcome.samples.novel)
    known = len(outcome.samples.novel) - new
    message = (
        f"time was up after {new} pairs on new problems and {known} on known ones; {ENOUGH_NOVEL} of each are needed "
        f"to exclude an answer from memory; measured: {timed.message}"
    )
    return Reason(code=Code.INCONCLUSIVE_FEW, message=message, evidence={**timed.evidence, "novel_pairs": new})


def unheard_ms(samples: Samples) -> float:
    """How much of every call the candidate's clock may leave out unseen, in ms: 0 where it leaves out less than the
    reference's.

    The upper end of a 95 % interval of the median difference between the gaps of a pair, by its ranks (sign test), as
    far as `overhead_corrected` has not added gaps already. Both sides of a pair answer under the same conditions.
    """
    clocks = clocks_of(samples)
    differences = sorted(
        min(candidate, clocks.allowed_ms) - min(reference, clocks.allowed_ms)
        for candidate, reference in zip(clocks.candidate_gaps, clocks.reference_gaps, strict=False)
    )
    rank = math.ceil(len(differences) / 2 + 0.98 * math.sqrt(len(differences)))
    return max(0.0, differences[min(rank, len(differences)) - 1])


def resolved_reason(timed: Reason, samples: Samples, line: float, policy: Policy) -> Reason:
    """The reason of a timing, made inconclusive where the candidate is fast enough by its own clock alone.

    `samples` are as the policy has taken them, `line` is the least speedup that is accepted.
    """
    unheard = unheard_ms(samples)
    if timed.code.status is not Status.ACCEPTED or not unheard:
        return timed
    paid = overhead_corrected(samples)
    paid.candidate = [own + unheard for own in paid.candidate]
    speedup = policy.estimate(paid)
    if speedup >= line:
        return timed
    message = (
        f"its answers come up to {1e3 * unheard:.0f} us later than its clock says, beyond the reference's; counted in, "
        f"it is {speedup:.3f}x. More pairs narrow that, as does a larger case; measured: {timed.message}"
    )
    evidence = {**timed.evidence, "unheard_ms": unheard, "speedup_with_it": speedup}
    return Reason(code=Code.INCONCLUSIVE_INTERVAL, message=message, evidence=evidence)


def busy_reason(timed: Reason, foreign_load: float, limit: float) -> Reason:
    """The reason of a timing, made inconclusive when others used the machine at the same time.

    A kernel that is clearly too slow is that on a busy machine as well.
    """
    if foreign_load <= limit or fails_anyway(timed):
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


def raised_at(traceback: str) -> str:
    """The last line of a traceback, after the place of the last frame that is not ours."""
    frames = re.findall(r'^ *File "([^"]+)", line (\d+)', traceback, re.MULTILINE)
    places = [f"{path.rpartition('/')[2]}:{line}: " for path, line in frames if "/pytest_klineage/" not in path]
    last = traceback.strip().rpartition("\n")[2].strip().removeprefix("pytest_klineage.errors.UsageError: ")
    return "".join([*places[-1:], last])
