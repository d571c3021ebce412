"""The objects of FlashInfer-Trace as records: definitions, workloads, solutions, traces, and a folder of them.

The schema is flashinfer-bench's (Apache 2.0): a definition has named axes, tensors over them and a reference in Python;
a trace without a solution is a workload. Fields that are not known here are passed over. Nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_klineage.errors import BadRecord, UsageError

T = TypeVar("T", bound=msgspec.Struct)


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named size: fixed ("const") or given by the workload ("var")."""

    type: str
    value: int | None = None
    description: str | None = None


class TraceTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor over axes by name; a scalar where the shape is null."""

    shape: tuple[str, ...] | None
    dtype: str
    description: str | None = None


class TraceDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is computed."""

    name: str
    axes: dict[str, Axis]
    inputs: dict[str, TraceTensor]
    outputs: dict[str, TraceTensor]
    reference: str
    """Python source with a function `run`."""
    op_type: str = ""
    type: str = ""
    """What older files call op_type."""
    tags: tuple[str, ...] | None = None
    description: str | None = None
    constraints: tuple[str, ...] | None = None


class WorkloadInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one input comes from: "random", "scalar" with a value, or "safetensors" with a path."""

    type: str
    value: int | float | bool | None = None
    path: str | None = None
    tensor_key: str | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a definition's axes, and its inputs."""

    axes: dict[str, int]
    inputs: dict[str, WorkloadInput]
    uuid: str


class BuildSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a solution is built and called."""

    language: str
    target_hardware: tuple[str, ...]
    entry_point: str
    """File and function, as in "main.py::run"."""
    dependencies: tuple[str, ...] | None = None
    destination_passing_style: bool | None = None
    """Whether outputs are passed after the inputs; None where a file does not say, which means True today."""
    binding: str | None = None


class SolutionFile(msgspec.Struct, frozen=True):
    """One file of a solution."""

    path: str
    content: str


class Solution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel for a definition."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: tuple[SolutionFile, ...]
    description: str | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a solution on a workload. Its parts are as open as those who write them."""

    status: str
    environment: dict[str, Any]
    timestamp: str
    log: str = ""
    correctness: dict[str, Any] | None = None
    performance: dict[str, Any] | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a file of traces: a workload, or what came of a solution on it."""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None


class TraceSet(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of all that."""

    definitions: dict[str, TraceDefinition]
    workloads: tuple[Trace, ...]
    """Traces without a solution."""
    solutions: tuple[Solution, ...]
    traces: tuple[Trace, ...]
    problems: tuple[str, ...] = ()
    """Files and lines that could not be read; the rest is here."""


def read_trace_set(root: Path) -> TraceSet:
    """Read definitions/, workloads/, solutions/ and traces/ below a folder.

    What cannot be read is named in `problems`. Raises UsageError for a folder without definitions.
    """
    if not (root / "definitions").is_dir():
        raise UsageError(f"{root} is no folder of FlashInfer-Trace: definitions/ is not there")
    problems: list[str] = []
    definitions = {item.name: item for item in _files(root / "definitions", TraceDefinition, problems)}
    solutions = tuple(_files(root / "solutions", Solution, problems))
    lines = [*_lines(root / "workloads", problems), *_lines(root / "traces", problems)]
    return TraceSet(
        definitions=definitions, solutions=solutions, problems=tuple(problems),
        workloads=tuple(trace for trace in lines if trace.solution is None),
        traces=tuple(trace for trace in lines if trace.solution is not None),
    )  # fmt: skip


def decoded(data: bytes | str, kind: type[T], name: str) -> T:
    """A record from JSON. Raises BadRecord, which names the file and what is wrong in it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadRecord(f"{name} is no {kind.__name__} of FlashInfer-Trace: {error}") from error


def _files(folder: Path, kind: type[T], problems: list[str]) -> Iterator[T]:
    for path in sorted(folder.rglob("*.json")):
        try:
            yield decoded(path.read_bytes(), kind, str(path))
        except (BadRecord, OSError) as error:
            problems.append(str(error))


def _lines(folder: Path, problems: list[str]) -> Iterator[Trace]:
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            problems.append(str(error))
            continue
        for number, line in enumerate(lines, start=1):
            try:
                yield decoded(line, Trace, f"{path}, line {number}")
            except BadRecord as error:
                problems.append(str(error))
