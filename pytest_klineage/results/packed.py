"""Files of lines, one record each. A published one may be kept as .jsonl.gz; who reads it names the .jsonl."""

from __future__ import annotations

import fcntl
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from pytest_klineage.errors import BadRecord, StoreError
from pytest_klineage.records import from_json
from pytest_klineage.records.codec import finite_json

T = TypeVar("T")
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


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """The records of a file, none where there is no file. Raises BadRecord for a line that does not decode.

    A last line that was cut short while it was written, which has no end, is left out.
    """
    if not is_there(path):
        return []
    try:
        return [from_json(line, kind) for line in read_packed(path).split(b"\n")[:-1]]
    except (OSError, BadRecord) as error:
        raise BadRecord(f"{path}: {error}") from error


def append_line(path: Path, record: msgspec.Struct) -> None:
    """Add a record to a file, unpacking it first; a last line that was cut short is taken away. Raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unpack(path)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # what another process is writing is not cut short
            file.truncate(_whole_bytes(file))
            file.write(finite_json(record) + b"\n")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _whole_bytes(file: BinaryIO) -> int:
    """Length of a file up to the end of its last whole line."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return end
    file.seek(0)
    return file.read().rfind(b"\n") + 1
