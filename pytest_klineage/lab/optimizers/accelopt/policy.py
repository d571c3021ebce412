"""AccelOpt's policy: its parameters, the beam, and the memory of experiences. Pure."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.records import KernelSource

NOTHING_FOUND = "No optimization found"
"""What a model answers when two kernels do not differ."""
HEADING = "# Experiences"


class Candidate(msgspec.Struct, frozen=True):
    """A kernel of the beam, with the latency that it was measured at."""

    kernel: KernelSource
    latency: float
    """In any unit that is the same for all candidates of a search."""
    profile: str = ""
    """What a planner is shown about its speed."""


class PlanSample(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation of one plan for one candidate."""

    row: int
    """The candidate's place in the beam, from 0."""
    plan: int
    """The plan's number among those for this candidate, from 0."""
    kernel: KernelSource | None
    """None when the reply held no code; such a sample counts as never made."""
    latency: float | None = None
    """None when the kernel failed."""
    profile: str = ""

    def speedup(self, parent: Candidate) -> float | None:
        """Over the candidate that it was made from; None when the kernel failed."""
        return None if self.latency is None else parent.latency / self.latency


def selected(samples: Iterable[PlanSample], beam: Sequence[Candidate], width: int) -> tuple[Candidate, ...]:
    """The next beam: of every plan its fastest kernel, fastest first, and last the parent where a plan failed.

    Parents do not compete with their children, so the next beam can be slower than the last one. Where no reply held
    any code there is nothing to choose from, and the beam stays.
    """
    groups: dict[tuple[int, int], tuple[float, Candidate]] = {}
    for sample in samples:
        if sample.kernel is None:
            continue
        if sample.latency is None:
            entry = (math.inf, beam[sample.row])
        else:
            entry = (sample.latency, Candidate(sample.kernel, sample.latency, sample.profile))
        group = (sample.row, sample.plan)
        if group not in groups or entry[0] < groups[group][0]:
            groups[group] = entry
    ranked = sorted(groups.values(), key=lambda entry: entry[0])
    return tuple(candidate for _, candidate in ranked[:width]) or tuple(beam)


class AccelOptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's parameters. Raises UsageError for values that cannot be."""

    iterations: int = 16
    """All iterations, the first one included."""
    beam: int = 2
    """B: kernels that an iteration starts from; the first starts from the root alone."""
    plans: int = 4
    """N: plans for each of them."""
    samples: int = 2
    """K: implementations of each plan."""
    new_experiences: int = 8
    """Experiences that an iteration adds at most; half of them successes at most."""
    capacity: int = 16
    """Experiences that a planner is shown at most, unless an iteration alone adds more."""
    success_over: float = 1.04
    """A step is a success when it is faster than its parent by more than this factor."""
    failure_over: float = 1.15
    """A step is a failure when it is slower than its parent by more than this factor."""
    max_output_tokens: int = 20000

    def __post_init__(self) -> None:
        if min(self.iterations, self.beam, self.plans, self.samples, self.max_output_tokens) < 1:
            raise UsageError("iterations, beam, plans, samples and max_output_tokens must be 1 or more")
        if min(self.new_experiences, self.capacity) < 0:
            raise UsageError("new_experiences and capacity must not be negative")
        if min(self.success_over, self.failure_over) < 1:
            raise UsageError("success_over and failure_over are factors of 1 or more")

    def kernels(self, iterations: int) -> int:
        """Kernels of so many iterations: the first starts from the root alone, every other one from a full beam."""
        return self.plans * self.samples * (1 + (iterations - 1) * self.beam)


class ExperiencePair(msgspec.Struct, frozen=True, kw_only=True):
    """Two kernels to compare. A step that made a kernel slower is read backwards."""

    id: str
    """The plan it comes from, such as "plan_0_3"."""
    speedup: float
    """Of the child over its parent; below 1 for a failure."""
    slow: KernelSource
    fast: KernelSource


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """A pair and what a model made of it."""

    pair: ExperiencePair
    summary: str
    """Empty when it found nothing; such an experience takes a place and is not shown."""
    title: str = ""

    @classmethod
    def of(cls, pair: ExperiencePair, reply: str) -> Experience:
        """From a model's reply. The title is the first bold words, their asterisks included."""
        if NOTHING_FOUND.lower() in reply.lower():
            return cls(pair=pair, summary="", title=f"**{NOTHING_FOUND}**")
        bold = re.search(r"\*\*.+?\*\*", reply)
        return cls(pair=pair, summary=reply.strip(), title=bold[0] if bold else "")


def telling_pairs(
    samples: Iterable[PlanSample], beam: Sequence[Candidate], settings: AccelOptSettings
) -> tuple[ExperiencePair, ...]:
    """The steps of an iteration that are worth a lesson, by candidate; of each, successes and then failures, by rank.

    A plan is represented by its fastest sample; by its slowest one, when all of its samples were slower than the
    parent. Successes come first in choosing and are half of all at most; failures may fill what they leave.
    """
    steps = tuple(_representatives(samples, beam).values())
    successes = sorted((step for step in steps if step[1] > 1), key=lambda step: -step[1])
    failures = sorted((step for step in steps if step[1] <= 1), key=lambda step: step[1])
    kept = [step for step in successes if step[1] > settings.success_over][: settings.new_experiences // 2]
    slower = [step for step in failures if step[1] < 1 / settings.failure_over]
    kept += slower[: settings.new_experiences - len(kept)]
    rows = list(dict.fromkeys(step[0].row for step in steps))
    kept.sort(key=lambda step: rows.index(step[0].row))
    return tuple(_pair(sample, beam[sample.row], speedup) for sample, speedup in kept)


def _representatives(
    samples: Iterable[PlanSample], beam: Sequence[Candidate]
) -> dict[tuple[int, int], tuple[PlanSample, float]]:
    """One representative per plan, with its speedup over the parent; plans with speedup exactly 1 are omitted."""
    plans: dict[tuple[int, int], list[tuple[PlanSample, float]]] = {}
    for sample in samples:
        speedup = sample.speedup(beam[sample.row])
        if sample.kernel is not None and speedup is not None:
            plans.setdefault((sample.row, sample.plan), []).append((sample, speedup))
    chosen = {}
    for plan, measured in plans.items():
        fastest = max(measured, key=lambda entry: entry[1])
        if fastest[1] > 1:
            chosen[plan] = fastest
        elif fastest[1] < 1:
            chosen[plan] = min(measured, key=lambda entry: entry[1])
    return chosen


def _pair(sample: PlanSample, parent: Candidate, speedup: float) -> ExperiencePair:
    child = sample.kernel or parent.kernel
    slow, fast = (parent.kernel, child) if speedup >= 1 else (child, parent.kernel)
    return ExperiencePair(id=f"plan_{sample.row}_{sample.plan}", speedup=speedup, slow=slow, fast=fast)


def kept(
    new: Sequence[Experience], old: Sequence[Experience], capacity: int, rng: random.Random
) -> tuple[Experience, ...]:
    """All new experiences, and a uniform sample of the old ones in the places that are left."""
    room = max(0, min(capacity - len(new), len(old)))
    return (*new, *rng.sample(list(old), room))


def rendered(experiences: Iterable[Experience]) -> str:
    """What a planner is shown; empty when there is nothing to show."""
    summaries = [experience.summary for experience in experiences if experience.summary]
    return "\n\n".join((HEADING, *summaries)) if summaries else ""
