"""When both sides of a paired timing are started anew: by time on a CPU, by count on a GPU; not how that is done.

Two processes that run one program differ for as long as they live: by a percent or two on a CPU, by some tenths of a
microsecond a call on a GPU. An interval from one start of each side would not say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pytest_klineage.gate.timing.policy import PAIRED_WARMUP, Renewal, Samples
from pytest_klineage.gate.timing.statistics import median

CPU_STARTS = 4
"""Pairs of processes before sampling on a CPU may stop because it is precise."""
RENEWALS = 6
LEAST_BETWEEN_RENEWALS_S, MOST_BETWEEN_RENEWALS_S = 0.33, 1.0
"""A renewal on a CPU takes about 0.15 s, and as long again to warm both sides up."""
SHORT_MS = 0.1
GPU_STARTS_SHORT, GPU_STARTS = 8, 4
"""Pairs of processes for kernels below and above SHORT_MS: tenths of a microsecond matter to short ones."""
GPU_PAIRS_SHORT, GPU_PAIRS = 4, 6
"""Pairs of blocks from each of them."""
GPU_LEAST_TIME_S = 2.0
"""A shorter time limit on a GPU has no room for renewals."""
GPU_MOST = 2
"""Where the least number of starts is not precise enough there are more, up to so many times as many: a start that went
on instead would outweigh all others."""


class TimedRenewal:
    """New processes whenever so many seconds have passed."""

    warmup = PAIRED_WARMUP

    def __init__(self, every_s: float, start: Callable[[], None]) -> None:
        self._every_s, self._start = min(every_s, MOST_BETWEEN_RENEWALS_S), start
        self._last = time.monotonic()

    def renew(self, samples: Samples) -> bool:
        """Renew both sides when it is time, and say whether that was done."""
        if time.monotonic() - self._last < self._every_s:
            return False
        self._start()
        self._last = time.monotonic()
        return True

    def full(self, samples: Samples) -> bool:
        """Whether the last start has all its pairs: it ends by the clock, whatever it has."""
        return False

    def enough(self, samples: Samples) -> bool:
        """Whether there were starts enough for an interval."""
        return len(samples.starts) >= CPU_STARTS

    def exhausted(self, samples: Samples) -> bool:
        """Whether there are no more starts."""
        return False


class CountedRenewal:
    """New processes after so many pairs, the same number from each of them."""

    warmup = PAIRED_WARMUP
    """Blocks of each side, of many calls each."""

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start

    def renew(self, samples: Samples) -> bool:
        """Renew both sides when it is their time, and say whether that was done."""
        if not self.full(samples) or self.exhausted(samples):
            return False
        self._start()
        return True

    def full(self, samples: Samples) -> bool:
        """Whether the last start has all its pairs."""
        pairs = GPU_PAIRS_SHORT if is_short(samples) else GPU_PAIRS
        return len(samples.candidate) - samples.starts[-1] >= pairs

    def enough(self, samples: Samples) -> bool:
        """Whether there were starts enough for an interval, and all of them are full."""
        return len(samples.starts) >= self._least(samples) and self.full(samples)

    def exhausted(self, samples: Samples) -> bool:
        """Whether all starts that there may be are full."""
        return len(samples.starts) >= GPU_MOST * self._least(samples) and self.full(samples)

    def _least(self, samples: Samples) -> int:
        return GPU_STARTS_SHORT if is_short(samples) else GPU_STARTS


def renewal_for(device: str, time_limit_s: float, start: Callable[[], None]) -> Renewal | None:
    """How both sides are renewed on "cpu" or "cuda"; None where the time limit has no room for it."""
    if device != "cpu":
        return CountedRenewal(start) if time_limit_s >= GPU_LEAST_TIME_S else None
    every_s = time_limit_s / RENEWALS
    return TimedRenewal(every_s, start) if every_s >= LEAST_BETWEEN_RENEWALS_S else None


def is_short(samples: Samples) -> bool:
    """Whether the faster side takes less than SHORT_MS."""
    return min(median(samples.reference), median(samples.candidate)) < SHORT_MS
