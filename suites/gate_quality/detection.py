"""What the PR gate finds: kernels slowed by a busy loop against the same kernels without one, by the pair.

A trial is what `--klineage-base` does with a changed kernel: the base's version takes the reference's place, and where
that judgement says that the speed has changed, the next judgement of the same two kernels has to confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.records import Code, Interval, KernelSource, SourceFile, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.compare import compare_base, confirmed

UNCHANGED = 0.0
SPIN_CPU = """
#include <chrono>

extern "C" int run(const klineage_call *call) {
    const int status = work(call);
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(AMOUNT);
    while (std::chrono::steady_clock::now() < end) {
    }
    return status;
}
"""
SPIN_GPU = """
__device__ __forceinline__ void spin_for(long long cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {
    }
}

"""
CPU_ENTRY, GPU_FIRST_LINE = 'extern "C" int run(const klineage_call *call) {', "    extern __shared__ uint8_t smem[];\n"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement of a kernel against its base."""

    operator: str
    slower_by: float
    """How long its busy loop takes, as a share of the kernel's own time; 0 without one."""
    number: int
    verdict: Verdict


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the trials of one slowdown came to."""

    trials: int
    slower: int
    changed: int
    """Slower or faster."""

    @property
    def share(self) -> float:
        """Share that was found slower."""
        return self.slower / self.trials if self.trials else 0.0


def slowed_on_cpu(source: KernelSource, nanoseconds: float) -> KernelSource:
    """The kernel with a busy loop of so many nanoseconds behind its work, in the thread that calls it."""
    main = source.files[0]
    if main.text.count(CPU_ENTRY) != 1:
        raise ValueError(f"{main.name} has no entry of the form that is looked for")
    text = main.text.replace(CPU_ENTRY, "static int work(const klineage_call *call) {")
    text += SPIN_CPU.replace("AMOUNT", str(round(nanoseconds)))
    return with_text(source, text)


def slowed_on_gpu(source: KernelSource, kernel: str, cycles: float, first_wave: int) -> KernelSource:
    """The kernel with a busy loop of so many clock cycles at the start of every block of its first wave."""
    main = source.files[0]
    at = main.text.index(f"\n{kernel}(")
    head = main.text.rindex("__global__", 0, at)
    body = main.text.index(GPU_FIRST_LINE, at) + len(GPU_FIRST_LINE)
    block = "(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x"
    spin = f"    if ({block} < {first_wave}) spin_for({round(cycles)});\n"
    return with_text(source, main.text[:head] + SPIN_GPU + main.text[head:body] + spin + main.text[body:])


def with_text(source: KernelSource, text: str) -> KernelSource:
    """The same source with another text of its main file."""
    files = (SourceFile(source.files[0].name, text), *source.files[1:])
    return msgspec.structs.replace(source, files=files)


def bare(verdict: Verdict) -> Verdict:
    """The verdict with its times and without what a comparison does not need."""
    return msgspec.structs.replace(verdict, checks=(), kernels=(), reference_kernels=(), build=None, log="")


def trials_of(judged: Sequence[Judged], margin: float) -> list[Comparison]:
    """Every judgement of one kernel and slowdown, with the one after it to confirm a change; the last has the first."""
    verdicts = [one.verdict for one in judged]
    return [trial(first, verdicts[(n + 1) % len(verdicts)], margin) for n, first in enumerate(verdicts)]


def trial(first: Verdict, second: Verdict, margin: float) -> Comparison:
    """As the plugin compares with the base."""
    found = compare_base("detection", first, first, margin=margin)
    if not found.outcome.change:
        return found
    return confirmed(found, compare_base("detection", second, second, margin=margin), second)


def count(comparisons: Sequence[Comparison]) -> Found:
    """What some trials came to."""
    return Found(
        trials=len(comparisons), slower=sum(item.outcome is ComparisonOutcome.SLOWER for item in comparisons),
        changed=sum(item.outcome.change for item in comparisons),
    )  # fmt: skip


def grouped(judged: Sequence[Judged], slower_by: float, operator: str | None = None) -> list[list[Judged]]:
    """Judgements of one slowdown by what can confirm one another: of one operator on one device."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in judged:
        if one.slower_by == slower_by and operator in (None, one.operator):
            machine = one.verdict.machine
            groups.setdefault((one.operator, machine.device_uuid if machine else ""), []).append(one)
    return [group for group in groups.values() if len(group) > 1]


def found_of(judged: Sequence[Judged], slower_by: float, margin: float, operator: str | None = None) -> Found:
    """What the trials of one slowdown came to, of one operator or of all."""
    groups = grouped(judged, slower_by, operator)
    return count([comparison for group in groups for comparison in trials_of(group, margin)])


def scaled(judged: Sequence[Judged], slower_by: float) -> list[Judged]:
    """Judgements of unchanged kernels, had the candidate taken so much longer in every call."""
    return [
        msgspec.structs.replace(one, slower_by=slower_by, verdict=_longer(one.verdict, slower_by))
        for one in judged
        if one.slower_by == UNCHANGED
    ]


def _longer(verdict: Verdict, by: float) -> Verdict:
    timing = verdict.timing
    if timing is None:
        return verdict
    samples = tuple(sample * (1 + by) for sample in timing.candidate_samples_ms)
    interval = paired_interval(
        timing.reference_samples_ms, samples, confidence=timing.speedup.confidence, starts=timing.starts
    )
    return msgspec.structs.replace(
        verdict, timing=msgspec.structs.replace(timing, candidate_samples_ms=samples, speedup=interval)
    )  # fmt: skip


def measured_slowdown(judged: Sequence[Judged]) -> float:
    """The median of how much longer the head's kernel took, in percent; of no judgement, NaN."""
    ratios = [100 * (1 / one.verdict.timing.speedup.estimate - 1) for one in judged if one.verdict.timing]
    return median(ratios) if ratios else float("nan")


def half_width(judged: Sequence[Judged]) -> float:
    """The median half-width in percent."""
    widths = [100 * _interval(one.verdict).half_width for one in judged if one.verdict.timing]
    return median(widths) if widths else float("nan")


def _interval(verdict: Verdict) -> Interval:
    if verdict.timing is None:
        raise ValueError("not timed")
    return verdict.timing.speedup


def table(
    judged: Sequence[Judged], levels: Sequence[float], targets: Sequence[float], margin: float,
    operators: Sequence[str],
) -> list[str]:  # fmt: skip
    """One row per operator and slowdown, one for each slowdown over all; `targets` are shares for these."""
    lines = [
        "| kernel | busy loop | measured slowdown (median) | median half-width | judgements | trials | found slower | "
        "asked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for by, target in zip((UNCHANGED, *levels), (UNCHANGED, *targets), strict=True):
        for operator in (*operators, None):
            chosen = [one for one in judged if one.slower_by == by and operator in (None, one.operator)]
            found = found_of(judged, by, margin, operator)
            if not found.trials:
                continue
            asked = "" if operator else ("0" if by == UNCHANGED else f">= {100 * target:.0f} %")
            cells = (
                operator or "**all**", f"{100 * by:g} %", f"{measured_slowdown(chosen):.2f} %",
                f"{half_width(chosen):.2f} %", len(chosen), found.trials,
                f"{found.slower} ({100 * found.share:.0f} %)", asked,
            )  # fmt: skip
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def scaled_table(judged: Sequence[Judged], levels: Sequence[float], margin: float) -> list[str]:
    """What would be found in the judgements of unchanged kernels, had the candidate's times been longer."""
    lines = ["| candidate's times longer by | trials | found slower |", "|---|---|---|"]
    for by in (UNCHANGED, *levels):
        found = found_of(scaled(judged, by), by, margin)
        lines.append(f"| {100 * by:g} % | {found.trials} | {found.slower} ({100 * found.share:.1f} %) |")
    return lines


def run_round(
    judge: Callable[[float], Verdict], levels: Sequence[float], operator: str, number: int,
    keep: Callable[[Judged], None],
) -> None:  # fmt: skip
    """One judgement of every slowdown, and before each of them one of the unchanged kernel; each kept at once."""
    for by in (step for level in levels for step in (UNCHANGED, level)):
        verdict = judge(by)
        if not verdict.scored:
            raise AssertionError(f"{operator} slowed by {by:g}: {verdict.code}: {verdict.reasons[0].message}")
        keep(Judged(operator=operator, slower_by=by, number=number, verdict=bare(verdict)))


def short_of(judged: Sequence[Judged], levels: Sequence[float], targets: Sequence[float], margin: float) -> list[str]:
    """What is not reached: shares below what is asked, and false alarms."""
    short = []
    for by, target in zip(levels, targets, strict=True):
        found = found_of(judged, by, margin)
        if found.share < target:
            short.append(f"{100 * by:g} % slower: {found.slower} of {found.trials} found, {100 * target:.0f} % asked")
    false = found_of(judged, UNCHANGED, margin)
    if false.slower:
        short.append(f"{false.slower} false alarms in {false.trials}")
    return short


def was_disturbed(judged: Sequence[Judged]) -> int:
    """How many judgements say little because others used the machine or times were unstable."""
    return sum(one.verdict.code in (Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE) for one in judged)
