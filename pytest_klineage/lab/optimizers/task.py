"""What is to be optimized, what is proposed and what is said of it, how far a run is: records without behaviour."""

from __future__ import annotations

import msgspec

from pytest_klineage.records import KernelCase, KernelSource, Surface, Verdict


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be optimized."""

    case: KernelCase
    platform: str
    surface: Surface
    root: KernelSource | None
    """The root submission: a naive kernel, a partial attempt, the best of before. None for nothing."""
    instructions: str
    """The target's contract as text: ABI, shapes, data type, layout, tolerance, flags, what is forbidden."""
    seed: int = 0
    """For methods that draw random numbers."""
    submitted: Observation | None = None
    """What the gate said of the root: set by the loop before the method begins, None without a root."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a method: a kernel for the gate, or a reply that held none."""

    source: KernelSource | None
    """None when the reply was malformed."""
    call: int = 0
    """Number of the model call that it came from; 0 for none."""
    parent: str = ""
    """Digest of the source that it was derived from."""
    note: str = ""
    """What the method wants shown beside the step, such as "card: cpp-pack-b"."""
    malformed: str = ""
    """Why there is no source."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a method is shown about its proposal."""

    step: int
    """From 1; 0 is the root."""
    proposal: Proposal
    verdict: Verdict | None
    """Without samples, as the trajectory keeps it; None when there was nothing to judge."""
    feedback: str
    """Text for a model."""
    speedup: float | None
    """Reference time over candidate time; None unless scored."""
    is_best: bool
    """Whether no step before was as fast."""
    best_speedup: float | None
    """The best so far, this one included."""
    repeats: int | None = None
    """The earlier step with the very same source, whose verdict this is; it was not judged again."""


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an optimization after one step."""

    observation: Observation
    max_steps: int
    spent_usd: float
    limit_usd: float

    @property
    def line(self) -> str:
        """One line, such as "step 3/10, $0.42 of $10.00, best 0.87x; this one 0.61x (slower.than_required)"."""
        seen = self.observation
        best = "none yet" if seen.best_speedup is None else f"{seen.best_speedup:.2f}x"
        return (
            f"step {seen.step}/{self.max_steps}, ${self.spent_usd:.2f} of ${self.limit_usd:.2f}, best {best}; "
            f"{_this(seen)}"
        )


def _this(seen: Observation) -> str:
    if seen.verdict is None:
        return "no kernel in the reply"
    speed = "" if seen.speedup is None else f"{seen.speedup:.2f}x "
    again = "" if seen.repeats is None else f", the same as step {seen.repeats}"
    return f"this one {speed}({seen.verdict.code.value}{again})"
