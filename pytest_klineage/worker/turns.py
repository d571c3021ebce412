"""Which worker's turn it is, and which inputs come next: what the oracle's work on a CPU and on a GPU share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pytest_klineage.worker.comparison import View
from pytest_klineage.worker.problems import (
    PERTURBED,
    Plain,
    Problem,
    ProblemSet,
    TransformedProblem,
)
from pytest_klineage.worker.redrawn import LEAST_AMONG
from pytest_klineage.worker.rounds import WorkerHandle

NOVEL_EVERY, NOVEL_EVERY_AT_FIRST, FIRST_NOVEL = 4, 2, 12
"""One of so many pairs gets inputs that were made for it alone: who answers from memory is slower there. More of the
first ones do, until there were so many, warm-up included: eight must be left for a short timing."""
PERTURBED_SHARE = 0.125
"""Share of timed repetitions whose inputs differ from the previous ones in a single element."""

CHECK_EVERY, FIRST_CHECK = 16, 6
"""One pair of so many, on average, gives the candidate a check instead; the first comes within so many pairs, which is
as many as the shortest timing has."""
CHECKS_SHARE = 0.125
"""Of a timing, what checks may take: a kernel may be slow where inputs are sorted or denormal. Two come anyhow."""


class TimedPair(NamedTuple):
    """What the two sides of a pair are given, one after the other."""

    view: View
    slot: int
    novel: bool = False
    """Whether no kernel has met the problem before, in whatever symmetry transform."""
    check: Problem | None = None
    """What the candidate gets instead of the view. It and the other side go through the same motions, untimed."""

    def of(self, role: str) -> View:
        """The inputs of one side."""
        return self.view if self.check is None or role != "candidate" else Plain(self.check)


class Turns:
    """The workers of an open case, its problems, and the order of both."""

    def __init__(self) -> None:
        self.problems: ProblemSet | None = None
        self.handles: dict[str, WorkerHandle] = {}
        self.current = "candidate"
        self.threads = 1
        self.schedule = Schedule()

    @contextlib.contextmanager
    def all_threads(self) -> Iterator[None]:
        """Let the oracle use every thread. Between two timed calls one is enough: a pool that wakes and sleeps would
        disturb what comes next."""
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def give_turn(self, role: str) -> None:
        """Let one worker run and freeze all others."""
        self.freeze_others(role)
        self.handles[role].freeze(False)

    def freeze_others(self, role: str) -> None:
        """Freeze every worker but one. Raises WorkerProblem when one that was frozen has gone on by itself."""
        for name, handle in self.handles.items():
            if name != role:
                handle.freeze(True)
                handle.hold_still()

    def next_pair(self, problems: ProblemSet, *, fresh: bool, timed: bool, checks: bool) -> TimedPair:
        """The next pair. A check takes the place of any but a twin or what a twin follows, after as long a pause.

        So no kernel can tell by when it is called that this call is not timed.
        """
        view, slot = self.next_view(problems, fresh=fresh, timed=timed)
        replaceable = checks and not self.schedule.twin_is_next and view.problem.input_distribution != PERTURBED
        check = self.schedule.check_if_due(problems.among) if replaceable else None
        if check is not None and any(view.problem is one for one in problems.stock):
            self.schedule.novel_drawn -= 1
        met = any(view.problem is one for one in (*problems.timed, *problems.twins))
        return TimedPair(view, slot, not met, check)

    def next_view(self, problems: ProblemSet, *, fresh: bool, timed: bool = True) -> tuple[View, int]:
        """Inputs for the next pair and the slot they go to. Calls that warm up take nothing from the stock.

        New ones are transformed as well: a kernel may be faster on numbers of some size, which is no memory.
        """
        made = timed and self.schedule.novel_drawn < len(problems.stock)
        due = not problems.has_symmetry or ((problems.novel_is_cheap or made) and self.schedule.novel_is_due())
        if not (fresh and due):
            return self.schedule.next(problems, fresh=fresh)
        with self.all_threads():
            problem = problems.stock[self.schedule.novel_drawn - 1] if made else problems.novel()
        view = TransformedProblem(problem, self.schedule.key()) if problems.has_symmetry else Plain(problem)
        return view, self.schedule.slot(fresh=True)

    def problem_set(self) -> ProblemSet:
        """The problems of the open case. Raises ValueError before one is open."""
        if self.problems is None:
            raise ValueError("no case is open")
        return self.problems


class Schedule:
    """Which problem, symmetry transform and slot comes next. Drawn from the system's randomness: no kernel can foresee
    it."""

    def __init__(self) -> None:
        self.random = random.SystemRandom()
        self.last_slot = 0
        self.perturbed_key: str | None = None
        self.until_novel = self.novel_drawn = self.until_check = self.checks_drawn = 0
        self.checks_left: list[Problem] = []
        self.pairs_s = self.checks_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Another judgement: its new problems, and its checks, begin to be counted."""
        self.until_novel, self.novel_drawn = self.random.randrange(NOVEL_EVERY_AT_FIRST), 0
        self.until_check, self.checks_drawn, self.checks_left = self.random.randrange(FIRST_CHECK), 0, []
        self.pairs_s = self.checks_s = 0.0

    def spend(self, seconds: float, *, on_check: bool) -> None:
        """Count what a call of a pair took."""
        self.pairs_s += seconds
        self.checks_s += seconds if on_check else 0.0

    @property
    def twin_is_next(self) -> bool:
        """Whether the next inputs differ from the last ones in a single element."""
        return self.perturbed_key is not None

    def check_if_due(self, among: list[Problem]) -> Problem | None:
        """One of these checks, each as often as any other, at a place that no kernel can foresee; None elsewhere."""
        self.until_check -= 1
        affordable = self.checks_drawn < LEAST_AMONG or self.checks_s <= CHECKS_SHARE * self.pairs_s
        if self.until_check >= 0 or not among or not affordable:
            return None
        self.checks_drawn += 1
        self.until_check = self.random.randrange(2 * CHECK_EVERY - 1)
        self.checks_left = self.checks_left or self.random.sample(among, len(among))
        return self.checks_left.pop()

    def novel_is_due(self) -> bool:
        """True once in every few calls, at a place that no kernel can foresee."""
        if self.twin_is_next:
            return False
        self.until_novel -= 1
        if self.until_novel >= 0:
            return False
        self.novel_drawn += 1
        every = NOVEL_EVERY_AT_FIRST if self.novel_drawn < FIRST_NOVEL else NOVEL_EVERY
        self.until_novel = every - 1 + self.random.randrange(-1, 2)
        return True

    def key(self) -> str:
        """What a symmetry transform is drawn from."""
        return f"{self.random.getrandbits(128):x}"

    def slot(self, *, fresh: bool) -> int:
        """A slot: sometimes the same address with new content, sometimes a new address."""
        self.last_slot = self.random.randrange(2) if fresh else 0
        return self.last_slot

    def next(self, problems: ProblemSet, *, fresh: bool) -> tuple[View, int]:
        """The next repetition's inputs and where they lie."""
        if not fresh:
            return Plain(problems.timed[0]), self.slot(fresh=False)
        if self.perturbed_key is not None:
            key, self.perturbed_key = self.perturbed_key, None
            return TransformedProblem(self.random.choice(problems.twins), key), self.last_slot
        key = self.key()
        index = self.random.randrange(len(problems.timed))
        if self.random.random() < PERTURBED_SHARE:
            index, self.perturbed_key = 0, key
        return TransformedProblem(problems.timed[index], key), self.slot(fresh=True)
