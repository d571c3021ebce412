"""The run store: one directory per run with run.json and an append-only records.jsonl.

<results>/runs/<UTC time>-<platform>[-name]/
    run.json        RunInfo: settings, machine, command line, versions
    records.jsonl   one Record per line, each one synced write(2): a crash costs at most its own line
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from pathlib import Path
from typing import Any, Self

import msgspec

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.records import SCHEMA_VERSION, Machine, Verdict, from_json
from pytest_klineage.records.codec import finite_json, whole_lines
from pytest_klineage.results.packed import append_line, is_there, read_packed

RUN_FILE = "run.json"
RECORDS_FILE = "records.jsonl"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run store: a verdict and the test that asked for it."""

    nodeid: str
    """The test's pytest id."""
    verdict: Verdict
    recorded_at: str = ""
    """UTC, ISO 8601."""
    schema_version: int = SCHEMA_VERSION


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was: everything that a reader needs beside its records."""

    started_at: str
    """UTC, ISO 8601."""
    platform: str
    name: str = ""
    """What the user called the run."""
    settings: dict[str, Any] = {}
    """The plugin's and the gate's settings in force."""
    machine: Machine | None = None
    argv: tuple[str, ...] = ()
    """Arguments of the command that started the run."""
    versions: dict[str, str] = {}
    schema_version: int = SCHEMA_VERSION


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was read back."""

    path: Path
    info: RunInfo | None
    """None when the file is absent, as in a bare records.jsonl."""
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    """What could not be read, such as a last line that a crash cut short."""


class RunStore:
    """The writer of one run. Make it with `create`; it holds one file descriptor until `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._torn = False

    @classmethod
    def create(cls, root: Path, info: RunInfo) -> Self:
        """Make the run's directory under `root`/runs and write run.json. Raises StoreError."""
        try:
            runs = root / "runs"
            _make_ignored(runs)
            path = _fresh_directory(runs, info)
            _write_synced(path / RUN_FILE, msgspec.json.format(finite_json(info), indent=2) + b"\n")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            return cls(path, os.open(path / RECORDS_FILE, flags, 0o644))
        except OSError as error:
            raise StoreError(f"the run store {root} cannot be written: {_reason(error)}") from error

    def append(self, record: Record) -> None:
        """Write one line and sync it. Raises StoreError, for example when the disk is full."""
        line = finite_json(record) + b"\n"
        if self._torn:
            line = b"\n" + line  # ends the fragment that an earlier failure left, so that this record stays readable
        try:
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise StoreError(f"the run store {self.path} took only part of a record: no space left?")
            os.fsync(self._descriptor)
        except OSError as error:
            raise StoreError(f"the run store {self.path} cannot be written: {_reason(error)}") from error

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_run(path: Path) -> Run:
    """Read a run's directory, or a records.jsonl alone, compressed ones too.

    A cut last line is reported in `warnings` and left out. Raises UsageError when there is nothing to read, BadRecord
    for a line that is damaged elsewhere or has another schema version.
    """
    lines_path = path / RECORDS_FILE if path.is_dir() else path
    info_path = lines_path.parent / RUN_FILE
    try:
        info = from_json(info_path.read_bytes(), RunInfo) if info_path.exists() else None
        data = read_packed(lines_path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not a run: {lines_path.name} is not there") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}") from error
    records, warnings = _decode_lines(data, lines_path)
    return Run(path=path, info=info, records=tuple(records), warnings=tuple(warnings))


def list_runs(root: Path) -> list[Path]:
    """Directories of the runs under `root`/runs, oldest first."""
    runs = root / "runs"
    if not runs.is_dir():
        return []
    return sorted(path for path in runs.iterdir() if is_there(path / RECORDS_FILE))


def append_record(path: Path, nodeid: str, verdict: Verdict) -> None:
    """Add a verdict to a file of records that is no run's. Raises StoreError."""
    append_line(path, Record(nodeid=nodeid, verdict=verdict, recorded_at=now()))


def now() -> str:
    """The present time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _decode_lines(data: bytes, path: Path) -> tuple[list[Record], list[str]]:
    records: list[Record] = []
    warnings: list[str] = []
    lines, cut = whole_lines(data, path.name)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(from_json(line, Record))
        except BadRecord as error:
            if not _is_fragment(line):
                raise BadRecord(f"{path}, line {number}: {error}") from error
            warnings.append(f"line {number} of {path.name} was cut short while it was written and is left out")
    return records, [*warnings, *cut]


def _is_fragment(line: bytes) -> bool:
    """Whether a line is no JSON, as a write that hit a full disk leaves it."""
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line.startswith(b'{"nodeid"')
    return False


def _make_ignored(directory: Path) -> None:
    """Make a directory that version control does not see, wherever it lies."""
    if directory.is_dir():
        return
    directory.mkdir(parents=True, exist_ok=True)
    _write_synced(directory / ".gitignore", b"# Made by pytest-klineage: runs are not for version control.\n*\n")


def _fresh_directory(runs: Path, info: RunInfo) -> Path:
    stamp = re.sub(r"[^0-9TZ]", "", info.started_at)
    parts = [stamp, info.platform, re.sub(r"[^\w.+-]+", "-", info.name).strip("-.")]
    base = "-".join(part for part in parts if part)
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            path = runs / f"{base}{suffix}"
            path.mkdir()
            return path
    raise StoreError(f"{runs / base} and 998 directories like it exist already")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: OSError) -> str:
    """An OSError without its number, for people."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
