"""Which processors a process runs on, and how long it has waited for one."""

from __future__ import annotations

import os
from pathlib import Path


class MainThread:
    """The calling thread's processors, which every thread that it starts inherits.

    OpenMP's runtime binds the thread that loads it to the first place. A pool of another kind that is started then
    would have that place alone. So the thread may use all processors while a kernel is loaded and called for the first
    time, when pools are started, and is bound before anything is timed.
    """

    def __init__(self, processors: tuple[int, ...]) -> None:
        self._all = set(processors)
        self._own: set[int] | None = None

    def widen(self) -> None:
        """Allow all processors, and remember the place that OpenMP has bound this thread to."""
        if self._all and (bound := os.sched_getaffinity(0)) < self._all:
            self._own = bound
            os.sched_setaffinity(0, self._all)

    def settle(self) -> None:
        """Go back to that place, unless somebody has chosen another one meanwhile."""
        if self._own is not None and os.sched_getaffinity(0) == self._all:
            os.sched_setaffinity(0, self._own)
        self._own = None


def waited_ns(pid: int) -> int:
    """Nanoseconds that the first thread of a process has been ready to run while no processor was free for it.

    From proc(5), /proc/PID/schedstat, second number, which the system writes and the process cannot. 0 where the system
    keeps no such account, or the process is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) if len(fields) > 1 else 0
