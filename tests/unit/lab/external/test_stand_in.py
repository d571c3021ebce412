"""The stand-in for flashinfer-bench, used as AccelOpt's wrapper uses it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.problems import write_trace_set
from pytest_klineage.lab.external.runner import ExternalRun
from pytest_klineage.records import Judged, KernelSource, SourceFile, Surface

pytest.importorskip("httpx", reason="needs the extra external")
pytest.importorskip("starlette", reason="needs the extra external")

PROGRAM = """\
import csv, os, sys
from flashinfer_bench import (Benchmark, BenchmarkConfig, BuildSpec, Definition, EvaluationStatus, Solution, SourceFile,
                              SupportedLanguages, Trace, TraceSet)
from flashinfer_bench.data import load_json_file, save_json_file

row = next(csv.DictReader(open(sys.argv[1])))
definition = load_json_file(Definition, row["definition_path"])
workload = load_json_file(Trace, row["workload_path"])
baseline = load_json_file(Trace, row["trace_path"])
assert abs(baseline.evaluation.performance.latency_ms - 4.0) < 1e-9
assert load_json_file(Solution, row["solution_path"]).sources[0].content == "speed 0.5"
assert [definition.axes[name].value for name in definition.inputs["a"].shape] == [4, 16]
assert definition.inputs["a"].description and not definition.constraints
traceset = TraceSet.from_path(os.path.dirname(sys.argv[1]))
for text in sys.argv[2:]:
    solution = Solution(
        name="mine", definition=definition.name, author="x", description="a plan",
        spec=BuildSpec(language=SupportedLanguages.TRITON, target_hardware=["H100"], entry_point="main.py::run"),
        sources=[SourceFile(path="main.py", content=text)])
    path = traceset.root / "solutions" / "mine.json"
    save_json_file(solution, path)
    solution = load_json_file(Solution, path)
    assert not hasattr(solution.spec, "destination_passing_style")
    name = definition.name
    some = TraceSet(root=traceset.root, definitions={name: definition}, solutions={name: [solution]},
                    workloads={name: [workload]}, traces={name: []})
    config = BenchmarkConfig()
    config.timeout_seconds = 100
    (trace,) = Benchmark(some, config).run_all().traces[definition.name]
    save_json_file(trace, traceset.root / "traces" / "x" / "mine.json")
    trace = load_json_file(Trace, traceset.root / "traces" / "x" / "mine.json")
    found = trace.evaluation
    latency = found.performance.latency_ms if found.status == EvaluationStatus.PASSED else found.log
    print(trace.solution, found.status.value, latency)
"""


@pytest.fixture
def traced(target: EvaluationTarget, judge: Any, tmp_path: Path) -> tuple[EvaluationTarget, Path]:
    """A target with a root, and the start file of its trace set."""
    root = KernelSource(surface=Surface.PYTHON, files=(SourceFile("main.py", "speed 0.5"),), entry="run")
    given = msgspec.structs.replace(target, surface=Surface.PYTHON, root=root)
    return given, write_trace_set(given, judge(given.case, root), tmp_path / "set")


def bench(run: ExternalRun, start: Path, *texts: str) -> subprocess.CompletedProcess[str]:
    environment = run.environment({"PATH": "/usr/bin:/bin"})
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(start), *texts],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


def test_it_does_what_the_wrapper_needs(
    make_run: Callable[..., ExternalRun], traced: Any, judge: Any, events: Any
) -> None:
    target, start = traced
    run = make_run(target=target, stand_in=True)
    done = bench(run, start, "speed 2.0", "wrong_value.mismatch", "build_error.compile", "timeout.run", "cheat.clock",
                 "wrong_dtype.dtype", "runtime_error.crash", "wrong_shape.count")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("mine")] == [
        "mine PASSED 1.0",
        "mine INCORRECT_NUMERICAL Verdict: wrong_value (wrong_value.mismatch)",
        "mine COMPILE_ERROR Verdict: build_error (build_error.compile)",
        "mine TIMEOUT Verdict: timeout (timeout.run)",
        "mine INCORRECT_NUMERICAL Verdict: cheat (cheat.clock)",
        "mine INCORRECT_DTYPE Verdict: wrong_dtype (wrong_dtype.dtype)",
        "mine RUNTIME_ERROR Verdict: runtime_error (runtime_error.crash)",
        "mine INCORRECT_SHAPE Verdict: wrong_shape (wrong_shape.count)",
    ]
    assert len(events(run, Judged)) == 8
    assert judge.judged[-1].entry == "run"


def test_the_end_of_the_run_is_an_error(make_run: Callable[..., ExternalRun], traced: Any) -> None:
    target, start = traced
    run = make_run(target=target, stand_in=True)
    done = bench(run, start, "skipped.platform")
    assert done.returncode == 1
    assert "nothing was judged" in done.stderr
    run.evaluator.close("over")
    done = bench(run, start, "speed 1.0")
    assert done.returncode == 1
    assert "the run has ended: over" in done.stderr
