"""Export of our samples through pytest-benchmark, when a test also uses its fixture. It is never the clock.

pytest-benchmark reads its timer before and after a call. A timer that answers 0 and then the next sample makes it
record exactly the samples that the gate took, so --benchmark-json, -autosave and -compare work on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_klineage.records import Verdict

FIXTURE = "benchmark"


class ReplayTimer:
    """A clock that answers 0.0 when a round starts and the next sample, in seconds, when it stops."""

    def __init__(self) -> None:
        self._samples: Iterator[float] = iter(())
        self._running = False
        self.loaded = False

    def load(self, samples_s: Iterable[float]) -> None:
        """Replay these from now on."""
        self._samples, self._running, self.loaded = iter(samples_s), False, True

    def __call__(self) -> float:
        self._running = not self._running
        return 0.0 if self._running else next(self._samples)


TIMER_KEY = pytest.StashKey[ReplayTimer]()


def install_timers(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Give each test that uses both fixtures a timer of its own, unless the user chose one."""
    if not config.pluginmanager.hasplugin(FIXTURE):
        return
    for item in items:
        if not {"kernel_gate", FIXTURE} <= set(getattr(item, "fixturenames", ())):
            continue
        mark = item.get_closest_marker(FIXTURE)
        given = dict(mark.kwargs) if mark else {}
        if "timer" in given:
            continue
        timer = item.stash[TIMER_KEY] = ReplayTimer()
        # In front of the user's own marker, whose arguments it repeats: pytest-benchmark reads only the nearest one.
        item.add_marker(pytest.mark.benchmark(**given, timer=timer), append=False)


def export(request: pytest.FixtureRequest, verdict: Verdict) -> None:
    """Hand the kernel's samples to pytest-benchmark. Its fixture takes one measurement a test: the first verdict's."""
    timer = request.node.stash.get(TIMER_KEY, None)
    if timer is None or timer.loaded or verdict.timing is None:
        return
    samples = [sample / 1e3 for sample in verdict.timing.candidate_samples_ms]
    if not samples:
        return
    timer.load(samples)
    interval = verdict.timing.speedup
    benchmark = request.getfixturevalue(FIXTURE)
    benchmark.extra_info.update(
        klineage_case=verdict.case.id,
        klineage_status=verdict.status.value,
        klineage_reference=verdict.case.reference,
        klineage_reference_ms=verdict.timing.reference_ms,
        klineage_speedup=interval.estimate,
        klineage_speedup_low=interval.low,
        klineage_speedup_high=interval.high,
    )
    benchmark.pedantic(_nothing, rounds=len(samples), iterations=1)


def _nothing() -> None:
    """What pytest-benchmark calls between two readings of the replaying clock."""
