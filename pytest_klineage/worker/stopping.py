"""Stopping another process with all its threads, and seeing that it stays stopped. Knows Linux and nothing of kernels.

By a cgroup of its own where one can be made: nobody inside can undo that. SIGSTOP everywhere else, which a SIGCONT
undoes that the process has arranged for; so what a stopped process is and has used is read from /proc, both ways.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

STOP_LIMIT_S = 0.25
"""Longest time for all threads of a process to stop; one that is busy in the system's kernel takes a moment."""
AWAKE_NS = 1_000_000
"""CPU time that a stopped process may seem to have used: the system counts a thread's last moments late."""
STOPPED = frozenset("TtZXx")
"""States of a thread that executes nothing, from proc(5)."""
FROZEN_WAITS = frozenset("SDI")
"""How the threads of a frozen cgroup are shown."""


class Stopper:
    """Holds one process, by its number and its pidfd. `close` lets it go."""

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.group = own_group(pid)
        """Folder of a cgroup with this process alone; None where there can be none."""
        self._used_ns = 0
        self.stopped = False

    def stop(self) -> None:
        """Stop every thread and wait until they are."""
        self._signal(signal.SIGSTOP)
        ends = time.monotonic() + STOP_LIMIT_S
        while not all_stopped(self.pid) and time.monotonic() < ends:
            time.sleep(0)
        # From here on a SIGCONT changes nothing.
        self._freeze("1")
        self.stopped, self._used_ns = True, used_ns(self.pid)

    def go_on(self) -> None:
        """Let every thread run again."""
        self._freeze("0")
        self._signal(signal.SIGCONT)
        self.stopped = False

    def broke_out(self) -> str:
        """How a process that is to stand still has shown that it does not; empty when it stands still."""
        if not self.stopped:
            return ""
        used = used_ns(self.pid) - self._used_ns
        if used > AWAKE_NS:
            return f"it used {used / 1e6:.1f} ms of processor time while it was stopped"
        states = thread_states(self.pid)
        if not states <= (STOPPED | FROZEN_WAITS if self.group is not None else STOPPED):
            return "it runs although it was stopped"
        return ""

    def close(self) -> None:
        """Let go of the process; it runs on."""
        if self.stopped:
            self.go_on()
        os.close(self.pidfd)
        if self.group is not None:
            remove_group(self.group)

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
    """Processor time of all threads that a process has, in ns, from /proc/PID/task/TID/schedstat; 0 where untold."""
    return sum(int(line.split()[0]) for line in each_thread(pid, "schedstat") if line.split())


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
    places = [line.split()[1] for line in mounts if line.split()[2] == "cgroup2"]
    own = [line.removeprefix("0::") for line in groups if line.startswith("0::")]
    return Path(places[0] + own[0]) if places and own else None


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
