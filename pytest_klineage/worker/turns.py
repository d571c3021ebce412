"""Which worker's turn it is, and which inputs come next: what the oracle's work on a CPU and on a GPU share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch

from pytest_klineage.worker.comparison import View
from pytest_klineage.worker.problems import Plain, ProblemSet, TransformedProblem
from pytest_klineage.worker.rounds import WorkerHandle

NOVEL_EVERY, NOVEL_EVERY_AT_FIRST, FIRST_NOVEL = 4, 2, 12
"""One of so many pairs gets inputs that were made for it alone: who answers from memory is slower there. More of the
first ones do, until there were so many, warm-up included: eight must be left for a short timing."""
PERTURBED_SHARE = 0.125
"""Share of timed repetitions whose inputs differ from the previous ones in a single element."""


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

    def next_view(self, problems: ProblemSet, *, fresh: bool, timed: bool = True) -> tuple[View, int]:
        """Inputs for the next pair and the slot they go to. Calls that warm up take nothing from the stock."""
        made = timed and self.schedule.novel_drawn < len(problems.stock)
        due = not problems.has_symmetry or ((problems.novel_is_cheap or made) and self.schedule.novel_is_due())
        if not (fresh and due):
            return self.schedule.next(problems, fresh=fresh)
        if made:
            return Plain(problems.stock[self.schedule.novel_drawn - 1]), self.schedule.slot(fresh=True)
        with self.all_threads():
            view = Plain(problems.novel())
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
        self.until_novel = self.novel_drawn = 0
        self.begin()

    def begin(self) -> None:
        """Another judgement: its new problems begin to be counted."""
        self.until_novel, self.novel_drawn = self.random.randrange(NOVEL_EVERY_AT_FIRST), 0

    def novel_is_due(self) -> bool:
        """True once in every few calls, at a place that no kernel can foresee."""
        if self.perturbed_key is not None:
            return False
        self.until_novel -= 1
        if self.until_novel >= 0:
            return False
        self.novel_drawn += 1
        every = NOVEL_EVERY_AT_FIRST if self.novel_drawn < FIRST_NOVEL else NOVEL_EVERY
        self.until_novel = every - 1 + self.random.randrange(-1, 2)
        return True

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
            return TransformedProblem(problems.perturbed_problem, key), self.last_slot
        key = f"{self.random.getrandbits(128):x}"
        index = self.random.randrange(len(problems.timed))
        if self.random.random() < PERTURBED_SHARE:
            index, self.perturbed_key = 0, key
        return TransformedProblem(problems.timed[index], key), self.slot(fresh=True)
