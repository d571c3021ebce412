"""How records become files: readable JSON, written so that a reader never sees half of it. No formats live here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from pytest_klineage.records import to_plain
from pytest_klineage.records.lineage import finite

NUMBERS = re.compile(r"\[\n[-+\d.eE,\s]+\]")
"""A list of numbers as the indenting writer leaves it, one to a line."""


def record_json(record: msgspec.Struct) -> bytes:
    """Indented JSON in which a list of numbers is one line: samples are many, and nobody reads them singly."""
    text = msgspec.json.format(msgspec.json.encode(finite(to_plain(record))), indent=2).decode()
    return (NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n").encode()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
