"""When both sides of a paired timing are restarted: by time on a CPU, by count on a GPU.

Two processes that run one program differ for as long as they live: by a percent or two on a CPU, by some tenths of a
microsecond a call on a GPU. An interval from one start of each side would not say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from pytest_klineage.gate.timing.policy import RestartPolicy, Samples

CPU_STARTS = 4
"""Pairs of processes before sampling on a CPU may stop because it is precise."""
RESTARTS = 6
LEAST_BETWEEN_RESTARTS_S, MOST_BETWEEN_RESTARTS_S = 0.33, 1.0
"""A restart on a CPU takes about 0.15 s, and as long again to warm both sides up."""
SHORT_MS = 0.1


class RestartPlan(NamedTuple):
    """How many pairs of processes there are on a GPU, and how many pairs of blocks each has."""

    starts: int
    """Before sampling may stop because it is precise."""
    pairs: int
    """Of each start, an even number: a round is two."""
    most: int
    """Starts where the least number is not precise enough. One that went on instead would outweigh all others."""


GPU_SHORT, GPU_LONG = RestartPlan(starts=8, pairs=4, most=16), RestartPlan(starts=3, pairs=6, most=8)
"""For kernels below and above SHORT_MS: tenths of a microsecond matter to short ones. Three starts
of six pairs: results/gate_quality/policy-replay-sm90.md."""
COARSE = 0.02
"""From this wanted precision on short kernels are timed as long ones: a tenth of a microsecond is 2 % of 5 us, and an
interval that it makes wider than was asked for has more starts."""
GPU_LEAST_TIME_S = 2.0
"""A shorter time limit on a GPU has no room for restarts."""


class TimedRestarts(RestartPolicy):
    """New processes whenever so many seconds have passed, until the time limit has.

    Pairs that are taken later serve the comparison of new problems with known ones: another start would spend their
    time on warming up. A start ends by the clock, whatever it has.
    """

    def __init__(self, every_s: float, start: Callable[[], None], time_is_up: Callable[[], bool]) -> None:
        self._every_s, self._start, self._is_up = min(every_s, MOST_BETWEEN_RESTARTS_S), start, time_is_up
        self._last = time.monotonic()

    def restart(self, samples: Samples) -> bool:
        if self._is_up() or time.monotonic() - self._last < self._every_s:
            return False
        self._start()
        return True

    def warmed(self) -> None:
        # A kernel that is slow to warm up would else be started again after every few pairs.
        self._last = time.monotonic()

    def full(self, samples: Samples) -> bool:
        return False

    def enough(self, samples: Samples) -> bool:
        return len(samples.starts) >= CPU_STARTS

    def exhausted(self, samples: Samples) -> bool:
        return False


class CountedRestarts(RestartPolicy):
    """New processes after so many pairs, the same number from each of them."""

    def __init__(
        self, start: Callable[[], None], *, long: RestartPlan = GPU_LONG, short: RestartPlan = GPU_SHORT
    ) -> None:
        self._start, self._long, self._short = start, long, short

    def restart(self, samples: Samples) -> bool:
        if not self.full(samples) or self.exhausted(samples):
            return False
        self._start()
        return True

    def warmed(self) -> None:
        """Nothing: pairs are counted, not seconds."""

    def full(self, samples: Samples) -> bool:
        return len(samples.candidate) - samples.starts[-1] >= self._plan(samples).pairs

    def enough(self, samples: Samples) -> bool:
        return len(samples.starts) >= self._plan(samples).starts and self.full(samples)

    def exhausted(self, samples: Samples) -> bool:
        return len(samples.starts) >= self._plan(samples).most and self.full(samples)

    def _plan(self, samples: Samples) -> RestartPlan:
        return self._short if is_short(samples) else self._long


def restart_policy_for(
    device: str, time_limit_s: float, precision: float, start: Callable[[], None], time_is_up: Callable[[], bool]
) -> RestartPolicy | None:  # fmt: skip
    """How both sides are restarted on "cpu" or "cuda"; None where the time limit has no room for it."""
    if device != "cpu":
        short = GPU_LONG if precision >= COARSE else GPU_SHORT
        return CountedRestarts(start, short=short) if time_limit_s >= GPU_LEAST_TIME_S else None
    every_s = time_limit_s / RESTARTS
    return TimedRestarts(every_s, start, time_is_up) if every_s >= LEAST_BETWEEN_RESTARTS_S else None


def is_short(samples: Samples) -> bool:
    """Whether the faster side takes less than SHORT_MS."""
    return min(median(samples.reference), median(samples.candidate)) < SHORT_MS
