"""An outside optimizer as processes: started in a group of its own, found again wherever they went, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_klineage.errors import UsageError

MARK = "KLINEAGE_RUN"
"""Environment variable by which every descendant is recognised, even one that left the group."""
TERMINATE_S, KILL_S = 5.0, 5.0
POLL_S = 0.05


class Optimizer:
    """One running command with everything that it starts."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mark: str, log: Path, folder: Path
    ) -> None:
        """Start it. Its output goes to `log`, its input is empty. Raises UsageError when it cannot be started."""
        self._mark = mark
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command, env={**environment, MARK: mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise UsageError(f"the command {command[0]!r} cannot be started: {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        """Process id, and that of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """How the command ended: its status, the negative number of a signal; None while it runs."""
        return self._process.poll()

    def others(self) -> list[int]:
        """Processes of the optimizer that still run beside the command itself."""
        marked = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            # A process may end while it is looked at; those of other users cannot be read.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid() and not (pid == self.pid and self.poll() is not None)]

    def end(self) -> int:
        """End every process: asked first, then killed. Returns how many were left besides the command."""
        left = [pid for pid in self.others() if pid != self.pid]
        self._signal(signal.SIGTERM)
        if not self._gone(TERMINATE_S):
            self._signal(signal.SIGKILL)
            self._gone(KILL_S)
        return len(left)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _gone(self, within_s: float) -> bool:
        limit = time.monotonic() + within_s
        while self.poll() is None or self.others():
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_S)
        return True
