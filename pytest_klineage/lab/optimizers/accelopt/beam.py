"""AccelOpt's beam: what was sampled from which plan, and who is planned for next. Pure; nothing is asked or judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pytest_klineage.records import KernelSource


class Candidate(msgspec.Struct, frozen=True):
    """A kernel of the beam, with the latency that it was measured at."""

    kernel: KernelSource
    latency: float
    """In any unit that is the same for all candidates of a search."""
    profile: str = ""
    """What a planner is told about its speed."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
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


def selected(samples: Iterable[Sample], beam: Sequence[Candidate], width: int) -> tuple[Candidate, ...]:
    """The next beam: of every plan its fastest kernel, fastest first, and the parent behind all where a plan failed.

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
