"""The clocks of flashinfer-bench: what CUPTI says the device did, else CUDA events. Written again from its description.

With CUPTI each call starts from an idle device whose L2 has been flushed. Its time is from the first start to the last
end of the work that it launched, known by the correlation of launches whose host time lies in the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from evaluators.problem import Clock, Run

SPARE_FLUSH_BYTES = 256 << 20
"""Where torch does not say how large the L2 is."""
BUFFER_BYTES = 8 << 20
FLUSH_FORCED = 1
"""CUPTI hands out records of unfinished buffers too."""


class ClockFailure(RuntimeError):
    """A clock saw nothing, or something else every time."""


class Launch(NamedTuple):
    """A call of CUDA by the host."""

    start_ns: int
    correlation: int


class Work(NamedTuple):
    """A kernel, copy or fill on the device."""

    name: str
    start_ns: int
    end_ns: int
    correlation: int


class CuptiClock:
    """Reads activity records. Raises ImportError without cupti-python, ClockFailure for an error of CUPTI."""

    name = "CUPTI"

    def __init__(self) -> None:
        from cupti import cupti

        kinds: Any = cupti.ActivityKind
        self._cupti: Any = cupti
        self._launching = (kinds.RUNTIME, kinds.DRIVER)
        self._working = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._launches: list[Launch] = []
        self._work: list[Work] = []
        self._flush = flush_buffer()
        self._call("activity_register_callbacks", requested, self._completed)

    def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
        """Milliseconds. Raises ClockFailure when no work is seen, or different kernels in different calls."""
        import torch

        for _ in range(warmup):
            run()
        torch.cuda.synchronize()
        self._launches.clear()
        self._work.clear()
        for kind in (*self._launching, *self._working):
            self._call("activity_enable", kind)
        windows = []
        for _ in range(count):
            self._flush.zero_()
            torch.cuda.synchronize()
            begin = self._call("get_timestamp")
            run()
            windows.append((begin, self._call("get_timestamp")))
            torch.cuda.synchronize()
        self._call("activity_flush_all", FLUSH_FORCED)
        for kind in (*self._launching, *self._working):
            self._call("activity_disable", kind)
        return spans_ms(windows, self._launches, self._work)

    def _completed(self, activities: list[Any]) -> None:
        # The buffer behind the records is CUPTI's again when this returns.
        for item in activities:
            if item.kind in self._launching:
                self._launches.append(Launch(item.start, item.correlation_id))
            elif item.kind in self._working:
                name = getattr(item, "name", "") or f"kind {int(item.kind)}"
                self._work.append(Work(name, item.start, item.end, item.correlation_id))

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._cupti, function)(*arguments)
        except self._cupti.cuptiError as error:
            raise ClockFailure(f"{function}: {error}") from error


class QueuedClock:
    """Flush, start, call, stop for all calls, then one wait: what is left where CUPTI cannot be had."""

    def __init__(self, why: str) -> None:
        self.name = f"CUDA events ({why})"
        self._flush = flush_buffer()

    def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
        """Milliseconds."""
        import torch

        new_event: Any = torch.cuda.Event
        for _ in range(warmup):
            run()
        torch.cuda.synchronize()
        pairs = [(new_event(enable_timing=True), new_event(enable_timing=True)) for _ in range(count)]
        for start, stop in pairs:
            self._flush.zero_()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(stop)) for start, stop in pairs]


def best_clock() -> Clock:
    """CUPTI where it works on a first try, else events, whose name says why."""
    try:
        clock = CuptiClock()
        probe = flush_buffer()
        clock.samples(probe.zero_, warmup=1, count=2)
    except (ImportError, RuntimeError) as error:
        return QueuedClock(f"{type(error).__name__}: {error}"[:200])
    return clock


def flush_buffer() -> Any:
    """Twice the L2, on the device."""
    import torch

    found = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
    return torch.empty(2 * found or SPARE_FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def requested() -> tuple[int, int]:
    """Size of a buffer for records, and no limit to their number."""
    return BUFFER_BYTES, 0


def spans_ms(windows: Sequence[tuple[int, int]], launches: Sequence[Launch], work: Sequence[Work]) -> list[float]:
    """For every window of the host's time, the span of the work that was launched in it, in milliseconds.

    Raises ClockFailure without one, or when other kernels ran than in the window before.
    """
    by_launch: dict[int, list[Work]] = {}
    for item in work:
        by_launch.setdefault(item.correlation, []).append(item)
    spans: list[float] = []
    first: set[str] | None = None
    for begin, end in windows:
        launched = {launch.correlation for launch in launches if begin <= launch.start_ns <= end}
        found = [item for correlation in launched for item in by_launch.get(correlation, ())]
        if not found:
            raise ClockFailure("a call launched no work that CUPTI saw")
        names = {item.name for item in found}
        first = first or names
        if names != first:
            raise ClockFailure(f"a call ran {sorted(names)}, the first one {sorted(first)}")
        spans.append((max(item.end_ns for item in found) - min(item.start_ns for item in found)) / 1e6)
    return spans
