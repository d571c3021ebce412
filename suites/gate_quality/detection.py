"""What the PR gate finds: kernels slowed by a busy loop against the same kernels without one, by the pair.

A trial is what `--klineage-base` does with a changed kernel: the base's version takes the reference's place, and the
same two kernels are judged until all judgements together are clear, three times at most. No judgement is in two trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.plugin.comparison.pooling import compare_judged
from pytest_klineage.records import Code, KernelSource, SourceFile, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.compare_base import judge_again

UNCHANGED = 0.0
SPIN_CPU = """
#include <chrono>

extern "C" int run(const klineage_call *call) {
    const auto begin = std::chrono::steady_clock::now();
    const int status = work(call);
    const auto end = std::chrono::steady_clock::now();
    const std::chrono::duration<double> loop = SHARE * (end - begin);
    while (std::chrono::steady_clock::now() - end < loop) {
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
    """Of the trial on a CPU, of the round on a GPU."""
    verdict: Verdict


Trials = dict[tuple[str, float], list[Comparison]]
"""What the trials came to, by operator and slowdown."""


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


def slowed_on_cpu(source: KernelSource, by: float) -> KernelSource:
    """The kernel with a busy loop behind its work that takes this share of the same call's own time."""
    main = source.files[0]
    if main.text.count(CPU_ENTRY) != 1:
        raise ValueError(f"{main.name} has no entry of the form that is looked for")
    text = main.text.replace(CPU_ENTRY, "static int work(const klineage_call *call) {")
    return with_text(source, text + SPIN_CPU.replace("SHARE", repr(float(by))))


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


def trial(judged: Sequence[Judged], margin: float) -> Comparison:
    """As the plugin compares with the base."""
    verdicts = [one.verdict for one in judged]
    return compare_judged("detection", verdicts[0], verdicts, margin=margin)


def trials_of(judged: Sequence[Judged], margin: float) -> list[Comparison]:
    """Judgements of one kernel and slowdown in their order: each trial takes as many as it needs; the last may lack
    some, and is left out."""
    found, taken = [], list[Judged]()
    for one in judged:
        taken.append(one)
        made = trial(taken, margin)
        if not judge_again(made):
            found.append(made)
            taken = []
    return found


def all_trials(judged: Sequence[Judged], margin: float) -> Trials:
    """The trials of every operator and slowdown; those of one device are made of its own judgements."""
    streams: dict[tuple[str, float, str], list[Judged]] = {}
    for one in judged:
        machine = one.verdict.machine
        device = machine.device_uuid if machine else ""
        streams.setdefault((one.operator, one.slower_by, device), []).append(one)
    trials: Trials = {}
    for (operator, by, _), stream in streams.items():
        trials.setdefault((operator, by), []).extend(trials_of(stream, margin))
    return trials


def chosen(trials: Trials, by: float, operator: str | None = None) -> list[Comparison]:
    """The trials of one slowdown, of one operator or of all."""
    return [one for key, found in trials.items() if key[1] == by and operator in (None, key[0]) for one in found]


def count(comparisons: Sequence[Comparison]) -> Found:
    """What some trials came to."""
    return Found(
        trials=len(comparisons), slower=sum(item.outcome is ComparisonOutcome.SLOWER for item in comparisons),
        changed=sum(item.outcome.change for item in comparisons),
    )  # fmt: skip


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


def slowdown(comparisons: Sequence[Comparison]) -> list[float]:
    """By how much longer the head's kernel took in each trial, in percent."""
    return [100 * (1 / item.ratio.estimate - 1) for item in comparisons if item.ratio]


def half_width(comparisons: Sequence[Comparison]) -> float:
    """The median half-width of the pooled intervals in percent; of no trial, NaN."""
    widths = [100 * item.ratio.half_width for item in comparisons if item.ratio]
    return median(widths) if widths else float("nan")


def judgements(comparisons: Sequence[Comparison]) -> int:
    """How many judgements some trials took."""
    return sum(1 + len(item.more) for item in comparisons)


def table(trials: Trials, levels: Sequence[float], targets: Sequence[float], operators: Sequence[str]) -> list[str]:
    """One row per operator and slowdown, one for each slowdown over all; `targets` are shares for these."""
    lines = [
        "| kernel | busy loop | measured slowdown (median, range) | median half-width | trials | judgements | "
        "found slower | asked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for by, target in zip((UNCHANGED, *levels), (UNCHANGED, *targets), strict=True):
        for operator in (*operators, None):
            found = chosen(trials, by, operator)
            if found:
                asked = "" if operator else ("0" if by == UNCHANGED else f">= {100 * target:.0f} %")
                lines.append(_row(operator or "**all**", by, found, asked))
    return lines


def _row(name: str, by: float, comparisons: Sequence[Comparison], asked: str) -> str:
    found, longer = count(comparisons), slowdown(comparisons)
    cells = (
        name, f"{100 * by:g} %", f"{median(longer):.2f} % ({min(longer):.2f} to {max(longer):.2f})",
        f"{half_width(comparisons):.2f} %", found.trials, judgements(comparisons),
        f"{found.slower} ({100 * found.share:.0f} %)", asked,
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def scaled_table(judged: Sequence[Judged], levels: Sequence[float], margin: float) -> list[str]:
    """What would be found in the judgements of unchanged kernels, had the candidate's times been longer."""
    lines = ["| candidate's times longer by | trials | found slower |", "|---|---|---|"]
    for by in (UNCHANGED, *levels):
        found = count(chosen(all_trials(scaled(judged, by), margin), by))
        lines.append(f"| {100 * by:g} % | {found.trials} | {found.slower} ({100 * found.share:.1f} %) |")
    return lines


def run_round(
    judge: Callable[[float], Verdict], levels: Sequence[float], operator: str, number: int,
    keep: Callable[[Judged], None], margin: float,
) -> None:  # fmt: skip
    """One trial of every slowdown, and before each of them one of the unchanged kernel; judgements are kept at once."""
    for by in (step for level in levels for step in (UNCHANGED, level)):
        taken: list[Judged] = []
        while not taken or judge_again(trial(taken, margin)):
            verdict = judge(by)
            if not verdict.scored:
                raise AssertionError(f"{operator} slowed by {by:g}: {verdict.code}: {verdict.reasons[0].message}")
            taken.append(Judged(operator=operator, slower_by=by, number=number, verdict=bare(verdict)))
            keep(taken[-1])


def short_of(trials: Trials, levels: Sequence[float], targets: Sequence[float]) -> list[str]:
    """What is not reached: shares below what is asked, and false alarms."""
    short = []
    for by, target in zip(levels, targets, strict=True):
        found = count(chosen(trials, by))
        if found.share < target:
            short.append(f"{100 * by:g} % slower: {found.slower} of {found.trials} found, {100 * target:.0f} % asked")
    false = count(chosen(trials, UNCHANGED))
    if false.changed:
        short.append(f"{false.changed} false alarms in {false.trials}")
    return short


def was_disturbed(judged: Sequence[Judged]) -> int:
    """How many judgements say little because others used the machine or times were unstable."""
    return sum(one.verdict.code in (Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE) for one in judged)
