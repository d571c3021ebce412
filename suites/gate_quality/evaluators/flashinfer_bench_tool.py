"""A verdict of flashinfer-bench itself, as pip installs it: its `Benchmark`, with its defaults, on one solution.

One verdict is one `run_all`. The tool makes its baseline in this process: three sets of normal random inputs, outputs
and times of `torch.mm`. Its worker, a process that it keeps, checks the solution on the same sets and times it. It
forgets the baseline after that, so every verdict has one of its own.

Version 0.1.2 times 50 calls on each set, after 10, between CUDA events: on copies of the inputs, after a fill of
256 MiB, from an idle device, so that what the host takes to launch is in the times of both sides. The mean of the
three means is all that it gives: it is a side's only sample here.

The candidate is a Python solution that calls the kernel, built before, on the tensors that the tool passes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
from typing import Any, TypeAlias

import msgspec

from evaluators.problem import Judged, Request, use_library
from evaluators.process import serve
from pytest_klineage.formats.trace_export import definition_of, workload_of
from pytest_klineage.formats.trace_records import BuildSpec, Solution, SolutionFile, Trace, TraceDefinition

DISTRIBUTION = "flashinfer-bench"
CLOCKS = {"0.1.2": "CUDA events"}
"""By version, as its source says."""
REFERENCE = "import torch\n\n\ndef run(a, b):\n    return torch.mm(a, b)\n"
CANDIDATE = """\
import msgspec
from evaluators.problem import Called, Problem, Request

run = Called(Problem(msgspec.json.decode({request!r}, type=Request), {device!r}))
"""
PASSED, FAILED = "PASSED", "RUNTIME_ERROR"
LAST_WORDS = 200
"""Characters of the tool's log that a message keeps."""

Evaluation: TypeAlias = Any
"""The tool's record; its types are not to be had where it is not installed."""


class Tool:
    """The tool with one problem, kept from one verdict to the next. Raises ImportError where it is not installed."""

    def __init__(self, request: Request, device: str = "cuda") -> None:
        use_library(request)
        self._device = device
        self._fib: Any = importlib.import_module("flashinfer_bench")
        self._definition = self._read("TraceDefinition", definition_for(request))
        self._solution = self._read("Solution", solution_for(request, device))
        workload = workload_of(request.case)
        self._workload = self._read("Trace", Trace(definition=self._definition.name, workload=workload))
        self._benchmark: Any = None
        self._alone = ""

    def judge(self) -> Judged:
        """One verdict. Raises what the tool raises."""
        evaluation = self._evaluation()
        version = importlib.metadata.version(DISTRIBUTION)
        clock = CLOCKS.get(version, f"its own of {version}")
        return judged(evaluation, f"{clock}, in one process ({self._alone})" if self._alone else clock)

    def close(self) -> None:
        """End the tool's worker."""
        if self._benchmark is not None:
            self._benchmark.close()
            self._benchmark = None

    def _evaluation(self) -> Evaluation:
        # The worker is lent the baseline's memory, which CUDA cannot do on every machine: then without a worker.
        if not self._alone:
            try:
                evaluation = self._by_benchmark()
            except RuntimeError as error:
                self._alone = last_words(str(error))
            else:
                if evaluation.status.value != FAILED:
                    return evaluation
                self._alone = last_words(evaluation.log)
            sys.stderr.write(f"flashinfer-bench failed with a worker: {self._alone}\n")
            self.close()
        return self._in_this_process()

    def _by_benchmark(self) -> Evaluation:
        name = self._definition.name
        if self._benchmark is None:
            known = self._fib.TraceSet(
                definitions={name: self._definition}, solutions={name: [self._solution]},
                workloads={name: [self._workload]},
            )  # fmt: skip
            self._benchmark = self._fib.Benchmark(known, self._fib.BenchmarkConfig())
        found = self._benchmark.run_all(dump_traces=False).traces.get(name, [])
        if len(found) != 1:
            raise ToolFailure(f"{len(found)} evaluations instead of one; the tool's log has the reason")
        return found[0].evaluation

    def _in_this_process(self) -> Evaluation:
        evaluators: Any = importlib.import_module("flashinfer_bench.bench.evaluators")
        builders: Any = importlib.import_module("flashinfer_bench.compile")
        config = self._fib.BenchmarkConfig()
        device = "cuda:0" if self._device == "cuda" else self._device
        evaluator = evaluators.resolve_evaluator(self._definition)
        baseline = evaluator.build_baseline(self._definition, self._workload.workload, config, device)
        return evaluator.evaluate(
            definition=self._definition,
            sol_runnable=builders.BuilderRegistry.get_instance().build(self._definition, self._solution),
            inputs=baseline.inputs, ref_outputs=baseline.outputs, ref_mean_latency_ms=baseline.mean_latency_ms,
            cfg=config, log_path="", device=device,
        )  # fmt: skip

    def _read(self, kind: str, record: msgspec.Struct) -> Any:
        return getattr(self._fib, kind).model_validate_json(msgspec.json.encode(record))


class ToolFailure(RuntimeError):
    """The tool has said nothing about the solution."""


def definition_for(request: Request) -> TraceDefinition:
    """The request's case in the tool's format, with the call of the gate's reference `cublas` as its reference."""
    return msgspec.structs.replace(definition_of(request.case), reference=REFERENCE)


def solution_for(request: Request, device: str) -> Solution:
    """The request's kernel as a Python solution that writes to the output it is given."""
    text = CANDIDATE.format(request=msgspec.json.encode(request).decode(), device=device)
    return Solution(
        name="candidate", definition=definition_of(request.case).name, author="pytest-klineage",
        spec=BuildSpec(
            language="python", target_hardware=("cuda",), entry_point="main.py::run", destination_passing_style=True
        ),
        sources=(SolutionFile("main.py", text),),
    )  # fmt: skip


def judged(evaluation: Evaluation, clock: str) -> Judged:
    """The tool's evaluation as a verdict."""
    status, performance = evaluation.status.value, evaluation.performance
    if status != PASSED:
        return Judged(correct=False, why=f"{status}: {objection(evaluation)}", clock=clock)
    reference_ms, candidate_ms = performance.reference_latency_ms, performance.latency_ms
    return Judged(
        correct=True, clock=clock, reference_ms=reference_ms, candidate_ms=candidate_ms,
        speedup=performance.speedup_factor, reference_samples_ms=(reference_ms,), candidate_samples_ms=(candidate_ms,),
    )  # fmt: skip


def objection(evaluation: Evaluation) -> str:
    """What the tool has against a solution: its errors where it measured them, else the end of its log."""
    found = evaluation.correctness
    if found is None:
        return last_words(evaluation.log)
    return f"errors of up to {found.max_absolute_error:g}, relative {found.max_relative_error:g}"


def last_words(log: str) -> str:
    """The last line of a log, shortened."""
    lines = log.strip().splitlines()
    return lines[-1].strip()[:LAST_WORDS] if lines else "it said nothing"


class Judge:
    """Answers requests; the tool of the last one is kept for the next."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._request: Request | None = None
        self._tool: Tool | None = None

    def answer(self, request: Request) -> Judged:
        """Judge with the tool."""
        if self._tool is None or request != self._request:
            self.close()
            self._tool, self._request = Tool(request, self._device), request
        return self._tool.judge()

    def close(self) -> None:
        """End the tool's worker, if there is one."""
        if self._tool is not None:
            self._tool.close()
            self._tool = None


def main(device: str = "cuda") -> None:
    """Answer until nothing more is asked; what the tool writes goes to a folder that is removed."""
    judge = Judge(device)
    with tempfile.TemporaryDirectory(prefix="flashinfer-bench-", ignore_cleanup_errors=True) as folder:
        # Before the import: the tool's worker, and its caches, take it from the environment.
        os.environ.update(FIB_CACHE_PATH=folder, FIB_DATASET_PATH=folder)
        try:
            serve(Request, judge.answer)
        finally:
            judge.close()


if __name__ == "__main__":
    main()
