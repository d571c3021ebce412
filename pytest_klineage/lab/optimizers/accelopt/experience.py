"""AccelOpt's experience memory: which steps are worth a lesson, the lessons, and which of them are kept.

Pure: the summaries are asked for elsewhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

import msgspec

from pytest_klineage.lab.optimizers.accelopt.beam import Candidate, Sample
from pytest_klineage.lab.optimizers.accelopt.settings import AccelOptSettings
from pytest_klineage.records import KernelSource

NOTHING_FOUND = "No optimization found"
"""What a model answers when two kernels do not differ."""
HEADING = "# Experiences"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two kernels to compare. A step that made a kernel slower is read backwards."""

    id: str
    """The plan it comes from, such as "plan_0_3"."""
    speedup: float
    """Of the child over its parent; below 1 for a failure."""
    slow: KernelSource
    fast: KernelSource


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """A pair and what a model made of it."""

    pair: Pair
    summary: str
    """Empty when it found nothing; such an experience takes a place and is not shown."""
    title: str = ""

    @classmethod
    def of(cls, pair: Pair, reply: str) -> Experience:
        """From a model's reply. The title is the first bold words, their asterisks included."""
        if NOTHING_FOUND.lower() in reply.lower():
            return cls(pair=pair, summary="", title=f"**{NOTHING_FOUND}**")
        bold = re.search(r"\*\*.+?\*\*", reply)
        return cls(pair=pair, summary=reply.strip(), title=bold[0] if bold else "")


def telling_pairs(samples: Iterable[Sample], beam: Sequence[Candidate], settings: AccelOptSettings) -> tuple[Pair, ...]:
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
    samples: Iterable[Sample], beam: Sequence[Candidate]
) -> dict[tuple[int, int], tuple[Sample, float]]:
    """Of every plan the sample that stands for it, with its speedup over the parent; none for one of exactly 1."""
    plans: dict[tuple[int, int], list[tuple[Sample, float]]] = {}
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


def _pair(sample: Sample, parent: Candidate, speedup: float) -> Pair:
    child = sample.kernel or parent.kernel
    slow, fast = (parent.kernel, child) if speedup >= 1 else (child, parent.kernel)
    return Pair(id=f"plan_{sample.row}_{sample.plan}", speedup=speedup, slow=slow, fast=fast)


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
