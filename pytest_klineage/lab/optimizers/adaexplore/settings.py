"""What can be set about AdaExplore, with the values of its released configuration for KernelBench level 2.

The command line of the release has other defaults; its published results come from this configuration. Nothing is
decided here.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError


class MemoryMode(StrEnum):
    """Where the rules that a model is shown come from."""

    RESET = "reset"
    """Empty at the start of every workload. The released program learns after a search, so no prompt shows a rule."""
    ONLINE = "online"
    """Empty at the start of every workload, and learnt after every failing step. This is not released behaviour."""
    SHARED = "shared"
    """A file of rules from other workloads, as in the publication."""


class AdaExploreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's parameters. Raises UsageError for values that cannot be."""

    total_steps: int = 50
    """Steps after which the search is over; each is one kernel."""
    exploration: float = 0.3
    """Weight c of the exploration term."""
    expand_ratio: float = 1.0
    """The weight for stopping at an inner node, as a share of `exploration`; 0.5 in the configuration for level 3."""
    alpha: float = 0.0
    """Share of the best reward in a node's value; the rest is the mean."""
    p_large: float = 0.2
    """Probability of a large step where a small one is allowed."""
    small_step_limit: int = 2
    """Small steps from one node, after which only large ones are taken."""
    memory_rounds: int = 5
    """How many kernels of its chain a small step is shown."""
    pool_size: int = 5
    """How many kernels a large step is shown."""
    pool_extra: int = 0
    """How many of them may come from branches beside the path."""
    geometric_p: float = 0.6
    softmax_temperature: float = 1.0
    reviewer: bool = True
    """Whether a small step begins with a review, which is a call of its own."""
    force_reviewer: bool = False
    """Review even if every kernel of the chain is wrong."""
    memory: MemoryMode = MemoryMode.RESET
    rules_path: Path | None = None
    """The rule file of the mode `shared`."""
    rule_threshold: float | None = None
    """Count from which on a rule is shown; None for 3, and for 1 in the mode `online`."""
    update_memory: bool = False
    """Learn from the failed steps once the search is over, in the modes `reset` and `shared`."""
    max_output_tokens: int = 16384

    def __post_init__(self) -> None:
        if min(self.total_steps, self.memory_rounds, self.pool_size, self.max_output_tokens) < 1:
            raise UsageError("total_steps, memory_rounds, pool_size and max_output_tokens must be 1 or more")
        if not (0 <= self.alpha <= 1 and 0 <= self.p_large <= 1 and 0 < self.geometric_p <= 1):
            raise UsageError("alpha and p_large lie between 0 and 1, and geometric_p above 0 and up to 1")
        if self.softmax_temperature <= 0:
            raise UsageError(f"softmax_temperature must be positive, got {self.softmax_temperature}")
        if min(self.exploration, self.expand_ratio, self.small_step_limit, self.pool_extra) < 0:
            raise UsageError("exploration, expand_ratio, small_step_limit and pool_extra must not be negative")
        if (self.memory is MemoryMode.SHARED) != (self.rules_path is not None):
            raise UsageError("the memory mode shared needs rules_path, a file of rules, and no other mode has one")

    @property
    def threshold(self) -> float:
        """Count from which on a rule is shown."""
        if self.rule_threshold is not None:
            return self.rule_threshold
        return 1.0 if self.memory is MemoryMode.ONLINE else 3.0
