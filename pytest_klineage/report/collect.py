"""What a report is about: runs, trajectories, lineages and cards, read from files. What cannot be read is named, and
the rest stays readable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.records import Lineage, SkillCard, TrajectoryLine, Verdict, from_json
from pytest_klineage.records.trajectory import Event
from pytest_klineage.report.document import UnreadableInput
from pytest_klineage.results.packed import PACKED, is_there, read_packed
from pytest_klineage.results.retimed import read_retimed, with_effects
from pytest_klineage.results.runs import RECORDS_FILE, RUN_FILE, Record, Run, RunInfo

LINEAGE_FILE, CARD_FILE, LINES_SUFFIX = "lineage.json", "card.json", ".jsonl"
LOCAL_RUNS = "runs"
"""Where the plugin stores every run; only read when it is asked for by name."""
VERDICTS_SUFFIX = "verdicts.jsonl"
"""Verdicts from the making of a lineage or a card; only read when they are asked for by name."""
CUT_SHORT = "its last line was cut short while it was written and is left out"
TELLING: dict[str, type[msgspec.Struct]] = {"event": TrajectoryLine, "nodeid": Record, "reasons": Verdict}
"""By a key that only its lines have: what a file of lines holds."""
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ReadTrajectory:
    """The events of one optimization."""

    path: Path
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class ReadLineage:
    """A lineage and the folder in which its files lie."""

    path: Path
    record: Lineage


@dataclass(slots=True)
class Material:
    """Everything that was read."""

    runs: list[Run] = field(default_factory=list)
    trajectories: list[ReadTrajectory] = field(default_factory=list)
    lineages: list[ReadLineage] = field(default_factory=list)
    cards: list[SkillCard] = field(default_factory=list)
    problems: list[UnreadableInput] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing could be read."""
        return not (self.runs or self.trajectories or self.lineages or self.cards)

    def report(self, where: object, what: str, next_step: str) -> None:
        """Keep what is wrong with a file."""
        self.problems.append(UnreadableInput(str(where), what, next_step))


def collect(paths: Sequence[Path]) -> Material:
    """Read runs, trajectories, lineages and cards below some files and folders.

    Raises UsageError for a path that is not there, and when nothing can be read below any of them.
    """
    material = Material()
    for path in paths:
        if not path.exists() and not is_there(path):
            raise UsageError(f"{path} is not there; give a run's directory, its records.jsonl, or: latest")
        for file in _files(path):
            _read(file, material, asked_for=not path.is_dir())
    if material.empty:
        if material.problems:
            first = material.problems[0]
            raise BadRecord(f"{first.where}: {first.what}; {first.next_step}")
        names = ", ".join(map(str, paths))
        raise UsageError(f"{names}: no {RECORDS_FILE}, trajectory, {LINEAGE_FILE} or {CARD_FILE} is there")
    return material


def _files(path: Path) -> Iterator[Path]:
    """Files below a path that a report may be about, in the order of their names."""
    if is_there(path):
        yield path.with_name(path.name.removesuffix(PACKED))
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != LOCAL_RUNS)
        if records := [name for name in (LINEAGE_FILE, CARD_FILE) if name in names]:
            # What lies with them is how they came about: a walk's or a trial's own calls and verdicts.
            folders.clear()
            yield from (Path(folder, name) for name in records)
            continue
        for name in sorted({name.removesuffix(PACKED) for name in names}):
            if name.endswith(LINES_SUFFIX) and not name.endswith(VERDICTS_SUFFIX):
                yield Path(folder, name)


def _read(file: Path, material: Material, *, asked_for: bool) -> None:
    try:
        data = read_packed(file)
    except OSError as error:
        material.report(file, f"cannot be read: {error.strerror or error}", "look at its permissions")
        return
    if file.name == LINEAGE_FILE:
        _read_lineage(file, data, material)
    elif file.name == CARD_FILE:
        material.cards += _record(file, data, SkillCard, material)
    else:
        _read_lines(file, data, material, asked_for=asked_for)


def _read_lineage(file: Path, data: bytes, material: Material) -> None:
    """The lineage with the effects that count."""
    try:
        again = read_retimed(file.parent)
    except BadRecord as error:
        material.report(file.parent, str(error), "remove the file, or its bad line")
        again = {}
    for lineage in _record(file, data, Lineage, material):
        material.lineages.append(ReadLineage(file.parent, with_effects(lineage, again)))


def _read_lines(file: Path, data: bytes, material: Material, *, asked_for: bool) -> None:
    kind = _kind_of(data)
    if file.name == RECORDS_FILE or kind is Record:
        records = _lines(file, data, Record, material)
    elif kind is Verdict:
        found = _lines(file, data, Verdict, material)
        records = [Record(nodeid=f"{file.stem}:{position}", verdict=one) for position, one in enumerate(found, start=1)]
    elif kind is TrajectoryLine:
        if lines := _lines(file, data, TrajectoryLine, material):
            material.trajectories.append(ReadTrajectory(file, tuple(line.event for line in lines)))
        return
    else:
        if asked_for:
            what = "is neither a run, a trajectory, a lineage nor a card"
            material.report(file, what, "give the folder of a run: results/runs/...")
        return
    if records or not data.strip():
        path = file.parent if file.name == RECORDS_FILE else file
        material.runs.append(Run(path=path, info=_run_info(file, material), records=tuple(records)))


def _run_info(file: Path, material: Material) -> RunInfo | None:
    path = file.parent / RUN_FILE
    if file.name != RECORDS_FILE or not path.is_file():
        return None
    return next(iter(_record(path, path.read_bytes(), RunInfo, material)), None)


def _kind_of(data: bytes) -> type[msgspec.Struct] | None:
    """What the first line that is JSON is."""
    for line in data.splitlines():
        try:
            keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            continue
        return next((kind for key, kind in TELLING.items() if key in keys), None)
    return None


def _record(file: Path, data: bytes, kind: type[T], material: Material) -> list[T]:
    """The record of a file; nothing, and a problem, where it cannot be read."""
    try:
        return [from_json(data, kind)]
    except BadRecord as error:
        material.report(file, str(error), "restore it from version control, or make it again")
        return []


def _lines(file: Path, data: bytes, kind: type[T], material: Material) -> list[T]:
    """Every line that can be read; one problem for each way in which others cannot."""
    lines = data.split(b"\n")
    found: list[T] = []
    wrong: dict[str, list[int]] = {}
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            found.append(from_json(line, kind))
        except BadRecord as error:
            wrong.setdefault(str(error), []).append(number)
    for message, numbers in wrong.items():
        where = f"{file}, line{'s' if len(numbers) > 1 else ''} {_numbers(numbers)}"
        material.report(where, message, "the other lines are in this report")
    if lines[-1].strip():
        material.report(file, CUT_SHORT, "judge that kernel again if it is missing below")
    return found


def _numbers(numbers: Sequence[int], shown: int = 5) -> str:
    text = ", ".join(map(str, numbers[:shown]))
    return text if len(numbers) <= shown else f"{text} and {len(numbers) - shown} more"
