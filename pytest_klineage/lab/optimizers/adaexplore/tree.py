"""AdaExplore's tree of kernels: rewards, selection, back-propagation, and which kernels a step is shown.

Pure: the same settings, random numbers and grades make the same tree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.records import KernelSource

NOT_COMPILED, NOT_CORRECT = 0.0, 0.05
"""Rewards of kernels without a speedup."""
MIN_REWARD, MAX_REWARD = 0.4, 1.6
MIN_SPEEDUP, MAX_SPEEDUP = 0.1, 10.0
"""Speedups are clipped to this range, which the rewards cover linearly."""


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
    p_large: float = 0.2
    """Probability of a large step where a small one is allowed."""
    small_step_limit: int = 2
    """Small steps from one node, after which only large ones are taken."""
    memory_rounds: int = 5
    """How many kernels of its chain a small step is shown."""
    pool_size: int = 5
    """How many kernels a large step is shown."""
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
        if not 0 <= self.p_large <= 1:
            raise UsageError(f"p_large lies between 0 and 1, got {self.p_large}")
        if min(self.exploration, self.expand_ratio, self.small_step_limit) < 0:
            raise UsageError("exploration, expand_ratio and small_step_limit must not be negative")
        if (self.memory is MemoryMode.SHARED) != (self.rules_path is not None):
            raise UsageError("the memory mode shared needs rules_path, a file of rules, and no other mode has one")

    @property
    def threshold(self) -> float:
        """Count from which on a rule is shown."""
        if self.rule_threshold is not None:
            return self.rule_threshold
        return 1.0 if self.memory is MemoryMode.ONLINE else 3.0


class Grade(msgspec.Struct, frozen=True):
    """What the search learns about a kernel. The speedup is 0 unless the kernel is right."""

    compiled: bool = False
    correct: bool = False
    speedup: float = 0.0

    @property
    def score(self) -> tuple[int, int, float]:
        """Compared from left to right; larger is better."""
        if not self.compiled:
            return (0, 0, 0.0)
        return (1, 1, self.speedup) if self.correct else (1, 0, 0.0)

    @property
    def reward(self) -> float:
        """From 0 to 1.6."""
        compiled, correct, speedup = self.score
        if not compiled:
            return NOT_COMPILED
        if not correct:
            return NOT_CORRECT
        clipped = min(max(speedup, MIN_SPEEDUP), MAX_SPEEDUP)
        share = (clipped - MIN_SPEEDUP) / (MAX_SPEEDUP - MIN_SPEEDUP)
        return MIN_REWARD + (MAX_REWARD - MIN_REWARD) * share


class NodeOrigin(StrEnum):
    """What made a node."""

    ROOT = "root"
    LARGE = "large"
    SMALL = "small"


@dataclass(eq=False)
class Node:
    """One kernel of the tree; the root has no kernel."""

    number: int
    """Order of creation; the root's is 0."""
    origin: NodeOrigin
    parent: Node | None = None
    kernel: KernelSource | None = None
    """None for the root, and for a reply that held no kernel."""
    grade: Grade = field(default_factory=Grade)
    feedback: str = ""
    shown: tuple[int, ...] = ()
    """Numbers of the nodes that its prompt showed."""
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    total_reward: float = 0.0

    @property
    def path(self) -> tuple[Node, ...]:
        """From the root to this node."""
        node: Node | None = self
        path: list[Node] = []
        while node is not None:
            path.append(node)
            node = node.parent
        return tuple(reversed(path))

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Action:
    """The next step: where its kernel will hang, how it is made, and which kernels the model is shown."""

    at: Node
    origin: NodeOrigin
    shown: tuple[Node, ...]
    """Of a large step, the pool; of a small one, the chain, oldest first, whose last kernel is edited."""


class SearchTree:
    """The search. Take `next_action`, make a kernel of it, and `record` what became of it."""

    def __init__(self, settings: AdaExploreSettings, rng: random.Random) -> None:
        self.settings, self._rng = settings, rng
        self.root = Node(0, NodeOrigin.ROOT)
        self.best = self.root
        self.nodes = [self.root]

    def next_action(self) -> Action:
        """Select a node and choose a step from it."""
        node = self.select()
        if self.choose(node) is NodeOrigin.SMALL and (chain := self.chain(node)):
            return Action(node, NodeOrigin.SMALL, chain)
        return Action(node, NodeOrigin.LARGE, self.pool(node))

    def record(self, action: Action, kernel: KernelSource | None, grade: Grade, feedback: str = "") -> Node:
        """Hang a kernel into the tree and carry its reward up to the root."""
        shown = tuple(node.number for node in action.shown)
        node = Node(len(self.nodes), action.origin, action.at, kernel, grade, feedback, shown)
        action.at.children.append(node)
        self.nodes.append(node)
        for above in node.path:
            above.visits += 1
            above.total_reward += grade.reward
        if grade.score > self.best.grade.score:
            self.best = node
        return node

    def value(self, node: Node) -> float:
        """Q: the mean reward below a node. The release can blend in the best one, and its configuration does not."""
        return node.total_reward / node.visits if node.visits else 0.0

    def child_score(self, child: Node) -> float:
        """U: how much a descent into a child is worth."""
        if child.visits == 0:
            return math.inf
        above = child.parent.visits if child.parent else 0
        if above == 0:
            return self.value(child)
        return self.value(child) + self.settings.exploration * math.sqrt(math.log(above) / child.visits)

    def expand_score(self, node: Node) -> float:
        """E: how much another child of a node with children is worth. The number of children counts squared."""
        weight = self.settings.exploration * self.settings.expand_ratio
        if weight <= 0:
            return -math.inf
        best = max(self.value(child) for child in node.children)
        if node.visits == 0:
            return best
        return best + weight * math.sqrt(math.log(node.visits) / len(node.children) ** 2)

    def select(self) -> Node:
        """Descend from the root; stop at a leaf, or where another child promises more than any there is."""
        node = self.root
        while node.children:
            favourite = max(node.children, key=self.child_score)
            if self.expand_score(node) > self.child_score(favourite):
                break
            node = favourite
        return node

    def choose(self, node: Node) -> NodeOrigin:
        """Large from the root and where the small steps are used up; otherwise large at random."""
        small = sum(child.origin is NodeOrigin.SMALL for child in node.children)
        if node.origin is NodeOrigin.ROOT or small >= self.settings.small_step_limit:
            return NodeOrigin.LARGE
        return NodeOrigin.LARGE if self._rng.random() < self.settings.p_large else NodeOrigin.SMALL

    def chain(self, node: Node) -> tuple[Node, ...]:
        """What a small step is shown: the last kernels since the large step above, oldest first."""
        chain: list[Node] = []
        for above in reversed(node.path):
            chain.insert(0, above)
            if above.origin is not NodeOrigin.SMALL:
                break
        return tuple(node for node in chain[-self.settings.memory_rounds :] if node.kernel is not None)

    def pool(self, node: Node) -> tuple[Node, ...]:
        """What a large step is shown: the best right kernel of every component on the path."""
        pool = best_of_components(above for above in node.path if above.origin is NodeOrigin.LARGE)
        size = self.settings.pool_size
        return tuple(self._rng.sample(pool, size) if len(pool) > size else pool)


def component(head: Node) -> Iterator[Node]:
    """A node and all that small steps alone have made of it."""
    waiting = [head]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += (child for child in node.children if child.origin is NodeOrigin.SMALL)


def best_of_components(heads: Iterable[Node]) -> list[Node]:
    """The best right kernel of each component; the earliest of equals. A component without one adds nothing."""
    best = []
    for head in heads:
        right = sorted((node for node in component(head) if node.grade.correct), key=lambda node: node.number)
        if right:
            best.append(max(right, key=lambda node: node.grade.score))
    return best
