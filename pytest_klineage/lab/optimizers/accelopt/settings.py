"""What can be set about AccelOpt, with the values of its released recipe for GPUs. Nothing is decided here."""

from __future__ import annotations

import msgspec

from pytest_klineage.errors import UsageError


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
    fixer_rounds: int = 0
    """F: repairs of an implementation that fails; the recipe has none."""
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
        if min(self.fixer_rounds, self.new_experiences, self.capacity) < 0:
            raise UsageError("fixer_rounds, new_experiences and capacity must not be negative")
        if min(self.success_over, self.failure_over) < 1:
            raise UsageError("success_over and failure_over are factors of 1 or more")
