"""Files that appear whole: a reader sees all of what is written, or what was there before."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path, data: bytes, *, synced: bool = False) -> Iterator[str]:
    """A hidden file in the same folder with this content, to be linked or renamed to `path`; otherwise it goes.

    synced: whether the content has to survive the machine. What a killed process leaves is a hidden file that is not
    read. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
