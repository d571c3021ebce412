"""The machine-wide lock of a device, by which one process times at once. What is done under it is the judge's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

Waiting = Callable[[], contextlib.AbstractContextManager[None]]
SHARED_FOLDER = Path("/tmp")
"""Everybody's, whatever TMPDIR says: batch systems give every job one of its own. Containers can share it."""


def lock_path(device: str) -> Path:
    """Where the lock of a device lies: "cpu", or the UUID of a GPU."""
    folder = SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return folder / f"klineage-timing-{device}.lock"


class DeviceLock:
    """A device's machine-wide lock: held alone while timing, together with others while building and checking.

    Who waits is served before those who come later, whichever way they want it: a timing waits for no new check.
    """

    def __init__(self, device: str, waiting: Waiting = contextlib.nullcontext) -> None:
        self._waiting = waiting
        self._file = _opened(lock_path(device))
        try:
            self._queue = _opened(lock_path(f"{device}-queue"))
        except OSError:
            os.close(self._file)
            raise
        self._alone = False

    def take(self, *, alone: bool) -> None:
        """Wait for it. What is held is given up first."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        with self._waiting():
            fcntl.flock(self._queue, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            finally:
                fcntl.flock(self._queue, fcntl.LOCK_UN)
        self._alone = alone

    def give_way(self) -> None:
        """Let those who wait go first, between two pieces of work."""
        self.take(alone=self._alone)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold it together with others for a while, and alone again afterwards; an error leaves it as it is then."""
        self.take(alone=False)
        yield
        self.take(alone=True)

    def close(self) -> None:
        """Give it up. The end of the process does, too."""
        os.close(self._file)
        os.close(self._queue)


@contextlib.contextmanager
def machine_lock(
    device: str, *, alone: bool, waiting: Waiting = contextlib.nullcontext
) -> Iterator[DeviceLock]:  # fmt: skip
    """Hold a device's machine-wide lock for a while.

    device: "cpu", where everything disturbs a timing, so nothing is built or checked meanwhile; or a GPU's UUID, whose
    lock everything takes that is judged on this GPU. What is judged on the CPU, or on another GPU, waits for neither.
    A file lock ends with its process, so a killed run leaves nothing locked. What is waited for it lies in `waiting`.
    """
    lock = DeviceLock(device, waiting)
    try:
        lock.take(alone=alone)
        yield lock
    finally:
        lock.close()


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Not with O_CREAT at once: Linux refuses that in /tmp for a file that another user has made.
        file = os.open(path, flags)
    except FileNotFoundError:
        file = os.open(path, flags | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):
        os.fchmod(file, 0o666)
    return file
