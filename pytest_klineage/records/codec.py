"""Records to JSON and back, with the schema version checked, and their JSON Schema."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import msgspec

from pytest_klineage.errors import BadRecord
from pytest_klineage.records.verdict import SCHEMA_VERSION

LARGEST_DOUBLE = sys.float_info.max
T = TypeVar("T")


class _Versioned(msgspec.Struct):
    schema_version: int | None = None


def to_json(record: msgspec.Struct) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(record)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode a record. Raises BadRecord with the reason, or with both schema versions when they differ."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version is not None and version != SCHEMA_VERSION:
            raise BadRecord(
                f"this {kind.__name__} has schema version {version}; this pytest-klineage reads {SCHEMA_VERSION}. "
                "Read it with the version that wrote it."
            )
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadRecord(f"not a valid {kind.__name__}: {error}") from error


def whole_lines(data: bytes, name: str) -> tuple[list[bytes], tuple[str, ...]]:
    """The lines of a file that is appended to, and a warning where its last one has no end, which is left out."""
    *lines, rest = data.split(b"\n")
    cut = f"the last line of {name} was cut short while it was written and is left out"
    return lines, (cut,) if rest.strip() else ()


def to_plain(record: msgspec.Struct) -> Any:
    """Dicts, lists and scalars only, for xdist and for JUnit."""
    return msgspec.to_builtins(record)


def finite(value: Any) -> Any:
    """Plain data in which infinities are the largest double of their sign, as JSON has none; NaN counts as positive."""
    if isinstance(value, float) and not math.isfinite(value):
        return -LARGEST_DOUBLE if value < 0 else LARGEST_DOUBLE
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Samples are most of a record: a number that stays as it is costs no call.
        return [item if type(item) is float and math.isfinite(item) else finite(item) for item in value]
    return value


def finite_json(record: msgspec.Struct) -> bytes:
    """One line of JSON, infinities as the largest double."""
    return msgspec.json.encode(finite(to_plain(record)))


def from_plain(data: Any, kind: type[T]) -> T:
    """The inverse of to_plain. Raises BadRecord."""
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        raise BadRecord(f"not a valid {kind.__name__}: {error}") from error


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema (2020-12) of a record."""
    return msgspec.json.schema(kind)
