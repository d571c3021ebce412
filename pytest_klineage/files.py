"""Files that appear whole: a reader sees all of what is written, or what was there before."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path, data: bytes, *, synced: bool = False, shared: bool = False) -> Iterator[str]:
    """A hidden file in the same folder with this content, to be linked or renamed to `path`; otherwise it goes.

    synced: whether the content has to survive the machine. shared: whether every user of the machine may read it,
    whatever the umask; a file system that keeps no rights may refuse that. What a killed process leaves is a hidden
    file that is not read. Raises OSError.
    """
    descriptor, name = _hidden(path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        if shared:
            with contextlib.suppress(PermissionError):
                os.chmod(name, 0o644)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _hidden(folder: Path) -> tuple[int, str]:
    """A new open file, with the rights that the umask leaves: those of tempfile are for its owner alone."""
    name = str(folder / f".{secrets.token_hex(8)}.part")
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name
