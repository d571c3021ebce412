"""The machine-wide lock of a device, by which one process times at once. What is done under it is the judge's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_FOLDER = Path("/tmp")
"""Everybody's, whatever TMPDIR says: batch systems give every job one of its own. Containers can share it."""


def lock_path(device: str) -> Path:
    """Where the lock of a device lies: "cpu", or the UUID of a GPU."""
    folder = SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return folder / f"klineage-timing-{device}.lock"


@contextlib.contextmanager
def machine_lock(device: str, *, alone: bool) -> Iterator[None]:
    """Hold a device's machine-wide lock: alone while timing, together with others while building and checking.

    device: "cpu", where everything disturbs a timing, so nothing is built or checked meanwhile; or a GPU's UUID, whose
    lock everything takes that is judged on this GPU. What is judged on the CPU, or on another GPU, waits for neither.
    A file lock ends with its process, so a killed run leaves nothing locked.
    """
    path = lock_path(device)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Not with O_CREAT at once: Linux refuses that in /tmp for a file that another user has made.
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)
