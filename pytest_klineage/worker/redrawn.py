"""Which of the planned checks come among and after the timing with other inputs of the same kind: a kernel could know
those that it was checked with before by their bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

REDRAWN_S = 0.25
"""What redrawing them may take for every kernel. Most cases redraw all in less."""
LEAST_AMONG = 2
"""So many that may come among timed pairs are redrawn even if it takes longer, once for all kernels of a case."""
SLOW_S = 5.0
"""One that takes longer is redrawn only where it would have to be made once more anyway, being large."""

T = TypeVar("T")


class Redrawn(Generic[T]):
    """The redrawn checks of a case, by the places of those that they stand for."""

    def __init__(self, redraw: Callable[[int], T]) -> None:
        self._redraw = redraw
        self.checks: dict[int, T] = {}
        self._slow: dict[int, T] = {}
        """Those that are kept for the case's next kernels, which have not seen them either."""

    def draw(self, among: Collection[int], others: Collection[int], large: Collection[int], seconds: float) -> None:
        """Redraw for another kernel, first those that may come among timed pairs, as many as the time allows.

        `large` are those that are not kept; one of the default distribution takes `seconds` to make.
        """
        drawn = random.SystemRandom()
        self.checks, ends, longest_s = dict(self._slow), time.monotonic() + REDRAWN_S, seconds
        for place in (*drawn.sample([*among], len(among)), *drawn.sample([*others], len(others))):
            started = time.monotonic()
            if started + longest_s > ends:
                break
            self.checks[place] = self._redraw(place)
            longest_s = max(longest_s, time.monotonic() - started)
        self._draw_slow([place for place in among if place in large or seconds <= SLOW_S], large)

    def _draw_slow(self, among: list[int], large: Collection[int]) -> None:
        """Redraw what is missing of LEAST_AMONG, large ones first."""
        missing = [place for place in among if place not in self.checks]
        random.SystemRandom().shuffle(missing)
        missing.sort(key=lambda place: place not in large)
        for place in missing[: max(0, LEAST_AMONG - len(self.checks))]:
            self.checks[place] = self._slow[place] = self._redraw(place)
