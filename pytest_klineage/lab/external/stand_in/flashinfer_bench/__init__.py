"""A stand-in for flashinfer-bench: the part that AccelOpt uses, with every benchmark asked of the evaluation server.

It is put first on PYTHONPATH of another program, so it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

URL = "KLINEAGE_URL"
DEADLINE_S = 1800.0


class SupportedLanguages(Enum):
    """Languages of a solution."""

    PYTHON = "python"
    TRITON = "triton"
    CUDA = "cuda"
    CPP = "cpp"


class EvaluationStatus(Enum):
    """What a benchmark can find."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"


STATUSES = {
    "accepted": EvaluationStatus.PASSED,
    "slower": EvaluationStatus.PASSED,
    "inconclusive": EvaluationStatus.PASSED,
    "wrong_shape": EvaluationStatus.INCORRECT_SHAPE,
    "wrong_dtype": EvaluationStatus.INCORRECT_DTYPE,
    "wrong_value": EvaluationStatus.INCORRECT_NUMERICAL,
    "cheat": EvaluationStatus.INCORRECT_NUMERICAL,
    "wrapper": EvaluationStatus.INCORRECT_NUMERICAL,
    "build_error": EvaluationStatus.COMPILE_ERROR,
    "runtime_error": EvaluationStatus.RUNTIME_ERROR,
    "timeout": EvaluationStatus.TIMEOUT,
}
"""By status of a verdict. "skipped" is missing: nothing was evaluated then, which no status says."""


class Part:
    """A piece of JSON with its fields as attributes. Fields that its kind has and the JSON has not are defaults."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        for name, value in {**self.DEFAULTS, **fields}.items():
            setattr(self, name, value)

    @classmethod
    def from_plain(cls, data: Any) -> Any:
        """From what JSON holds; None stays None."""
        return None if data is None else cls(**cls.read(dict(data)))

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields with their own kinds."""
        return fields

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {name: _plain(value) for name, value in vars(self).items()}


class Axis(Part):
    """One axis; a constant one has a value, and only that."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"description": None}


class TensorSpec(Part):
    """Shape by names of axes, and data type."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"description": None}


class Definition(Part):
    """What is computed."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"constraints": [], "tags": [], "description": ""}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields["axes"] = {name: Axis.from_plain(axis) for name, axis in fields["axes"].items()}
        for side in ("inputs", "outputs"):
            fields[side] = {name: TensorSpec.from_plain(spec) for name, spec in fields[side].items()}
        return fields


class SourceFile(Part):
    """One file: path and content."""


class BuildSpec(Part):
    """Language, hardware and entry point."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"dependencies": []}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields["language"] = SupportedLanguages(fields["language"])
        return fields


class Solution(Part):
    """A kernel."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"description": ""}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields["spec"] = BuildSpec.from_plain(fields["spec"])
        fields["sources"] = [SourceFile.from_plain(source) for source in fields["sources"]]
        return fields


class Workload(Part):
    """Sizes and inputs of one case."""


class Performance(Part):
    """Times in ms, and their ratio."""


class Correctness(Part):
    """Largest errors."""


class Evaluation(Part):
    """What a benchmark found."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "log": "",
        "correctness": None,
        "performance": None,
        "environment": {},
        "timestamp": "",
    }

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields["status"] = EvaluationStatus(fields["status"])
        fields["performance"] = Performance.from_plain(fields.get("performance"))
        fields["correctness"] = Correctness.from_plain(fields.get("correctness"))
        return fields


class Trace(Part):
    """A workload, and what a solution came to on it."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"solution": None, "evaluation": None}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields["workload"] = Workload.from_plain(fields["workload"])
        fields["evaluation"] = Evaluation.from_plain(fields.get("evaluation"))
        return fields


class TraceSet:
    """Definitions, solutions and traces below a folder."""

    def __init__(
        self,
        root: Any = None,
        definitions: Any = None,
        solutions: Any = None,
        workloads: Any = None,
        traces: Any = None,
    ) -> None:
        self.root = Path(root) if root is not None else None
        self.definitions, self.solutions = definitions or {}, solutions or {}
        self.workloads, self.traces = workloads or {}, traces or {}

    @classmethod
    def from_path(cls, path: Any = None) -> TraceSet:
        """A set whose files are read when they are asked for by name."""
        return cls(root=path)


class BenchmarkConfig:
    """Settings of a benchmark; the evaluation server has its own."""

    def __init__(self, **settings: Any) -> None:
        self.use_isolated_runner, self.profile_baseline, self.timeout_seconds = True, True, DEADLINE_S
        vars(self).update(settings)


class Benchmark:
    """Asks the evaluation server about every solution of a set."""

    def __init__(self, trace_set: TraceSet, config: BenchmarkConfig | None = None) -> None:
        self.trace_set, self.config = trace_set, config or BenchmarkConfig()

    def run_all(self, *_: Any, **__: Any) -> TraceSet:
        """A set with one trace for every pair of solution and workload. Raises RuntimeError when nothing is judged."""
        given = self.trace_set
        traces = {
            name: [
                Trace(
                    definition=name, workload=workload.workload, solution=solution.name, evaluation=evaluate(solution)
                )
                for solution in solutions
                for workload in given.workloads.get(name, [])
            ]
            for name, solutions in given.solutions.items()
        }
        return TraceSet(given.root, given.definitions, given.solutions, given.workloads, traces)


def evaluate(solution: Any) -> Evaluation:
    """The evaluation server's verdict. Raises RuntimeError when it judges nothing more."""
    path, _, entry = solution.spec.entry_point.partition("::")
    sources = sorted(solution.sources, key=lambda source: bool(source.path != path))
    body = {
        "files": [{"name": Path(source.path).name, "text": source.content} for source in sources],
        "entry": entry or "run", "note": solution.description[:80],
    }  # fmt: skip
    found = ask(body)
    if found["status"] not in STATUSES:
        raise RuntimeError(f"nothing was judged: {found['feedback']}")
    performance = None
    if found["candidate_ms"] is not None:
        performance = Performance(
            latency_ms=found["candidate_ms"], reference_latency_ms=found["reference_ms"],
            speedup_factor=found["speedup"],
        )  # fmt: skip
    verdict = found["verdict"]
    device = (verdict.get("machine") or {}).get("device", "")
    return Evaluation(
        status=STATUSES[found["status"]], log=found["feedback"], performance=performance,
        correctness=None, environment={"hardware": device, "libs": {}}, timestamp=verdict.get("judged_at", ""),
    )  # fmt: skip


def ask(body: dict[str, Any]) -> dict[str, Any]:
    """One submission. Raises RuntimeError with the server's own words."""
    if URL not in os.environ:
        raise RuntimeError(
            f"{URL} is not set: start this program with `pytest-klineage external run --stand-in -- ...`"
        )
    request = urllib.request.Request(
        f"{os.environ[URL]}/v1/judge", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=DEADLINE_S) as reply:
            found: dict[str, Any] = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(f"the evaluation server refuses: {error.read().decode(errors='replace')}") from error
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_plain()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
