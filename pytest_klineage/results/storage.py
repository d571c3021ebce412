"""How records become files: readable JSON, written so that a reader never sees half of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.files import written_beside
from pytest_klineage.records import to_plain
from pytest_klineage.records.codec import finite, finite_json

NUMBERS = re.compile(r"\[\n[-+\d.eE,\s]+\]")
"""A list of numbers as the indenting writer leaves it, one to a line."""


def record_json(record: msgspec.Struct) -> bytes:
    """Indented JSON in which a list of numbers is one line: samples are many, and are not read singly."""
    text = msgspec.json.format(finite_json(record), indent=2).decode()
    return (NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n").encode()


def outlined_json(record: msgspec.Struct, levels: int) -> bytes:
    """JSON that is indented for so many levels; a value below them is one line."""
    return (_outlined(finite(to_plain(record)), levels, "\n") + "\n").encode()


def _outlined(value: Any, levels: int, line: str) -> str:
    if not levels or not value or not isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    inner = f"{line}  "
    if isinstance(value, list):
        return "[" + ",".join(inner + _outlined(item, levels - 1, inner) for item in value) + f"{line}]"
    items = (f"{json.dumps(key)}: {_outlined(item, levels - 1, inner)}" for key, item in value.items())
    return "{" + ",".join(inner + item for item in items) + f"{line}}}"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one. Raises OSError."""
    with written_beside(path, data) as name:
        os.replace(name, path)
