"""Stopping another process with all its threads, and seeing that it stays stopped.

By a cgroup of its own where one can be made: no process inside can undo that. SIGSTOP everywhere else, which a SIGCONT
undoes that the process has arranged for; so what a stopped process is and has used is read from /proc, both ways.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

STOP_LIMIT_S = 2.0
"""Longest time for all threads of a process to stop; one that is busy in the system's kernel takes a moment."""
AWAKE_NS = 1_000_000
"""CPU time above which a process that only a signal has stopped has run meanwhile."""
STOPPED = frozenset("TtZXx")
"""States of a thread that executes nothing, from proc(5)."""


class Stopper:
    """Holds one process, by its number and its pidfd. `close` lets it go."""

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.group = own_group(pid)
        """Folder of a cgroup with this process alone; None where there can be none."""
        self._used_ns = 0
        self.stopped = False

    def stop(self) -> int:
        """Stop every thread and wait until they are. Returns for how long they still worked, in ns.

        No signal ends what the system does for a thread, such as clearing memory. 0 up to AWAKE_NS: threads that spin
        until they are stopped do no work.
        """
        began, used = time.monotonic_ns(), used_ns(self.pid)
        self._signal(signal.SIGSTOP)
        self._freeze("1")
        ends = time.monotonic() + STOP_LIMIT_S
        while not self._stands_still() and time.monotonic() < ends:
            time.sleep(0)
        self.stopped, self._used_ns = True, used_ns(self.pid)
        worked = min(self._used_ns - used, time.monotonic_ns() - began)
        return worked if worked > AWAKE_NS else 0

    def go_on(self) -> None:
        """Let every thread run again."""
        self._freeze("0")
        self._signal(signal.SIGCONT)
        self.stopped = False

    def broke_out(self) -> str:
        """How a process that is to stand still has shown that it does not; empty when it stands still.

        Nothing inside a frozen cgroup can run, so its processor time is not asked for.
        """
        if not self.stopped or (self.group is not None and frozen(self.group)):
            return ""
        used = used_ns(self.pid) - self._used_ns
        if used > AWAKE_NS:
            return f"it used {used / 1e6:.1f} ms of processor time while it was stopped"
        return "" if all_stopped(self.pid) else "it runs although it was stopped"

    def close(self) -> None:
        """Let go of the process; it runs on."""
        if self.stopped:
            self.go_on()
        os.close(self.pidfd)
        if self.group is not None:
            remove_group(self.group)

    def _stands_still(self) -> bool:
        """Whether no thread runs any more.

        A stopped thread is shown as stopped a moment before it leaves its processor, and a virtual machine may be
        halted in that moment for milliseconds. The clock of a process counts what runs now, so two equal readings
        after the states say that nothing does.
        """
        if self.group is not None and not frozen(self.group):
            return False
        before = used_ns(self.pid)
        return (self.group is not None or all_stopped(self.pid)) and used_ns(self.pid) == before

    def _freeze(self, value: str) -> None:
        """Freeze the process's own cgroup, or thaw it."""
        if self.group is not None:
            with contextlib.suppress(OSError):
                (self.group / "cgroup.freeze").write_text(value)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


def thread_states(pid: int) -> set[str]:
    """Letters for the states of a process's threads, from /proc/PID/task/TID/stat; empty when it is gone."""
    found = set()
    for line in each_thread(pid, "stat"):
        found.add(line.rpartition(")")[2].split()[0])
    return found


def all_stopped(pid: int) -> bool:
    """Whether no thread can execute anything."""
    return thread_states(pid) <= STOPPED


def used_ns(pid: int) -> int:
    """Processor time of all threads that a process has and had, in ns, up to now; 0 for one that is gone.

    By clock_getcpuclockid(3): the number of a process's clock is made of its own number. Unlike /proc/PID/schedstat it
    includes what a running thread has used since the scheduler's last tick.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0


def frozen(group: Path) -> bool:
    """Whether the system says that every process of a cgroup is frozen."""
    try:
        return "frozen 1" in (group / "cgroup.events").read_text().splitlines()
    except OSError:
        return False


def each_thread(pid: int, name: str) -> list[str]:
    """One file of every thread of a process. Threads that end meanwhile are left out."""
    texts = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                texts.append(Path(f"/proc/{pid}/task/{thread}/{name}").read_text())
    return texts


def own_group(pid: int) -> Path | None:
    """A new cgroup (version 2) with this process in it, beside that of the caller; None where that is not allowed."""
    root = unified_root()
    if root is None:
        return None
    forget_empty_groups(root)
    group = root / f"klineage-{os.getpid()}-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        if not (group / "cgroup.freeze").exists():
            raise OSError("no freezer")
    except OSError:
        remove_group(group)
        return None
    return group


def unified_root() -> Path | None:
    """The folder of the caller's own cgroup of version 2."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    mount_points = [line.split()[1] for line in mounts if line.split()[2] == "cgroup2"]
    own = [line.removeprefix("0::") for line in groups if line.startswith("0::")]
    return Path(mount_points[0] + own[0]) if mount_points and own else None


def forget_empty_groups(root: Path) -> None:
    """Remove what this process and ended ones have left behind; a cgroup with a process in it cannot be removed."""
    for left in root.glob("klineage-*-*"):
        maker = left.name.split("-")[1]
        if maker == str(os.getpid()) or not Path(f"/proc/{maker}").exists():
            remove_group(left)


def remove_group(group: Path) -> None:
    """Remove a cgroup if it is empty."""
    with contextlib.suppress(OSError):
        group.rmdir()
