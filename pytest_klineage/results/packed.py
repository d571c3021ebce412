"""Published files of lines may be kept as .jsonl.gz; who reads them names the .jsonl. Nothing is written here but an
unpacked copy.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

LINES, PACKED = ".jsonl", ".gz"


def packed(path: Path) -> Path:
    """The compressed file in the place of a file."""
    return path.with_name(path.name + PACKED)


def is_there(path: Path) -> bool:
    """Whether there is a file, as it is or compressed."""
    return path.is_file() or packed(path).is_file()


def read_packed(path: Path) -> bytes:
    """The bytes of a file, or of the compressed one in its place. Raises OSError, FileNotFoundError without either."""
    if not path.is_file() and packed(path).is_file():
        return gzip.decompress(packed(path).read_bytes())
    return path.read_bytes()


def unpack(path: Path) -> None:
    """Write the file where only the compressed one is: a trajectory that is gone on with. Raises OSError."""
    if not path.exists() and packed(path).is_file():
        path.write_bytes(read_packed(path))


def line_files(folder: Path, pattern: str = "**/*") -> Iterator[Path]:
    """Files of lines below a folder in the order of their names, compressed ones without their .gz."""
    found = {*folder.glob(pattern + LINES)}
    found |= {path.with_name(path.name.removesuffix(PACKED)) for path in folder.glob(pattern + LINES + PACKED)}
    yield from sorted(found)
