"""Without a GPU: flashinfer-bench as the suite drives it. Where it is installed it really runs, on CPU tensors."""

from __future__ import annotations

import importlib.metadata
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_gemm import CASE, built
from evaluators import flashinfer_bench_tool as tool
from evaluators.problem import Called, Judged, Problem, Request, Run
from evaluators.process import Process

from pytest_klineage.operators import paper_case

ON_A_CPU = """
import time
import flashinfer_bench.bench.timing
import flashinfer_bench.utils
import torch
from evaluators.flashinfer_bench_tool import main

class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)

torch.cuda.Event = Event
torch.cuda.synchronize = torch.cuda.set_device = lambda *device, **named: None
flashinfer_bench.bench.timing._clear_cache = lambda cache: None
flashinfer_bench.utils.list_cuda_devices = lambda: {devices}

if __name__ == "__main__":
    main("cpu")
"""
"""The tool with a clock of the host and no L2 to clear, in its worker too, which imports this module again."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, built."""
    return built(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def ask(artifact: Path) -> Callable[[str], Request]:
    """A request about one of the kernels."""
    return lambda entry: Request(case=CASE, surface="cpp", artifact=str(artifact), entry=entry)


@pytest.fixture
def on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    """Starts the tool's process; skips where the tool is not installed."""
    try:
        importlib.metadata.version(tool.DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashinfer-bench is not installed: pip install flashinfer-bench==0.1.2")

    def start(*devices: str) -> Process:
        (tmp_path / "tool_on_a_cpu.py").write_text(ON_A_CPU.format(devices=list(devices)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Process("tool_on_a_cpu", {"TMPDIR": str(tmp_path)})

    return start


# --- what the tool is given -------------------------------------------------------------------------------------------


def test_definition_is_the_case_and_reference_the_library() -> None:
    case = paper_case("gemm", "gpu", "cublas")
    request = Request(case=case, surface="cuda", artifact="kernel.so", entry="run")
    definition = tool.definition_for(request)
    sizes = {name: axis.value for name, axis in definition.axes.items()}
    assert sizes == case.shape
    assert {spec.dtype for spec in (*definition.inputs.values(), *definition.outputs.values())} == {"bfloat16"}
    assert [spec.shape for spec in definition.inputs.values()] == [("M", "K"), ("K", "N")]
    scope: dict[str, Any] = {}
    exec(definition.reference, scope)
    a, b = torch.rand(2, 3), torch.rand(3, 4)
    assert torch.equal(scope["run"](a, b), torch.mm(a, b))


def test_solution_calls_the_built_kernel_on_given_tensors(ask: Callable[[str], Request]) -> None:
    solution = tool.solution_for(ask("right"), "cpu")
    assert solution.spec.destination_passing_style
    assert solution.definition == tool.definition_for(ask("right")).name
    path, entry = solution.spec.entry_point.split("::")
    scope: dict[str, Any] = {}
    exec({file.path: file.content for file in solution.sources}[path], scope)
    m, n, k = CASE.shape.values()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
        c = torch.empty(m, n)
        scope[entry](a, b, c)
        torch.testing.assert_close(c, torch.mm(a, b))


def test_a_call_is_bound_once_for_the_same_addresses(
    ask: Callable[[str], Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(ask("right"), "cpu")
    bindings: list[int] = []
    bind = problem.bound

    def counted(inputs: Any, output: torch.Tensor, stream: int) -> Run:
        bindings.append(stream)
        return bind(inputs, output, stream)

    monkeypatch.setattr(problem, "bound", counted)
    called, inputs = Called(problem), problem.inputs(0)
    first, second = problem.output(), problem.output()
    for output in (first, first, second, first):
        called(inputs["a"], inputs["b"], output)
    assert bindings == [0, 0]
    assert torch.equal(first, second)


# --- what is made of its answer ---------------------------------------------------------------------------------------


def evaluation(status: str, *, log: str = "", **parts: Any) -> Any:
    """As much of the tool's record as is read."""
    found = {"correctness": None, "performance": None, **parts}
    return types.SimpleNamespace(status=types.SimpleNamespace(value=status), log=log, **found)


RIGHT = evaluation(
    "PASSED",
    performance=types.SimpleNamespace(reference_latency_ms=3.0, latency_ms=2.0, speedup_factor=1.5),
)


def test_passed_evaluation_is_a_verdict_with_two_means() -> None:
    verdict = tool.judged(RIGHT, "CUDA events")
    assert verdict == Judged(
        correct=True, clock="CUDA events", reference_ms=3.0, candidate_ms=2.0, speedup=1.5,
        reference_samples_ms=(3.0,), candidate_samples_ms=(2.0,),
    )  # fmt: skip


def test_any_other_evaluation_is_a_refusal_that_says_why() -> None:
    errors = types.SimpleNamespace(max_absolute_error=0.5, max_relative_error=0.25)
    verdict = tool.judged(evaluation("INCORRECT_NUMERICAL", correctness=errors), "CUDA events")
    assert (verdict.correct, verdict.candidate_samples_ms) == (False, ())
    assert verdict.why == "INCORRECT_NUMERICAL: errors of up to 0.5, relative 0.25"
    assert tool.judged(evaluation("COMPILE_ERROR", log="Traceback\n  ImportError: no\n"), "").why.endswith(
        "COMPILE_ERROR: ImportError: no"
    )
    assert tool.judged(evaluation("TIMEOUT"), "").why == "TIMEOUT: it said nothing"


class FakeTool(tool.Tool):
    """The order of things, without the tool: what its worker says, then what this process says."""

    def __init__(self, *said: Any) -> None:
        self.said, self.alone, self.closed = iter(said), 0, 0
        self._alone = ""

    def _by_benchmark(self) -> Any:
        found = next(self.said)
        if isinstance(found, Exception):
            raise found
        return found

    def _in_this_process(self) -> Any:
        self.alone += 1
        return RIGHT

    def close(self) -> None:
        self.closed += 1


def test_a_worker_that_answers_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.2")
    fake = FakeTool(RIGHT, evaluation("INCORRECT_SHAPE"))
    assert (fake.judge().clock, fake.judge().correct) == ("CUDA events", False)
    assert (fake.alone, fake.closed) == (0, 0)


@pytest.mark.parametrize("failure", [RuntimeError("no worker"), evaluation("RUNTIME_ERROR", log="x\nno worker\n")])
def test_without_a_worker_the_tool_judges_in_process(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    fake = FakeTool(failure)
    clocks = {fake.judge().clock, fake.judge().clock}
    assert clocks == {"its own of 9.9, in one process (no worker)"}
    assert (fake.alone, fake.closed) == (2, 1)


def test_a_tool_is_kept_until_another_request(ask: Callable[[str], Request], monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Recorded:
        def __init__(self, request: Request, device: str) -> None:
            self.entry = request.entry
            events.append(f"{device} {self.entry}")

        def judge(self) -> Judged:
            return Judged(correct=True, clock=self.entry)

        def close(self) -> None:
            events.append(f"end {self.entry}")

    monkeypatch.setattr(tool, "Tool", Recorded)
    judge = tool.Judge()
    assert [judge.answer(ask(entry)).clock for entry in ("right", "right", "wrong")] == ["right", "right", "wrong"]
    judge.close()
    judge.close()
    assert events == ["cuda right", "end right", "cuda wrong", "end wrong"]


# --- the tool itself --------------------------------------------------------------------------------------------------


def test_the_tool_judges_with_its_worker(on_a_cpu: Callable[..., Process], ask: Callable[[str], Request]) -> None:
    with on_a_cpu("cpu:0") as process:
        first, second = (process.ask(ask("right"), Judged) for _ in range(2))
        wrong, infinite = (process.ask(ask(entry), Judged) for entry in ("wrong", "infinite"))
    assert first.correct, first.why
    assert (first.clock, second.clock) == ("CUDA events", "CUDA events")
    assert first.speedup == pytest.approx(first.reference_ms / first.candidate_ms)
    assert first.reference_ms != second.reference_ms
    assert wrong.why.startswith("INCORRECT_NUMERICAL: errors of up to")
    assert infinite.why == "INCORRECT_NUMERICAL: errors of up to inf, relative inf"


def test_the_tool_judges_without_a_worker_and_leaves_nothing(
    on_a_cpu: Callable[..., Process], ask: Callable[[str], Request], tmp_path: Path
) -> None:
    with on_a_cpu() as process:
        right, wrong = process.ask(ask("right"), Judged), process.ask(ask("wrong"), Judged)
    assert right.clock == "CUDA events, in one process (No CUDA devices available)"
    assert right.correct
    assert right.speedup > 0
    assert wrong.why.startswith("INCORRECT_NUMERICAL")
    assert os.listdir(tmp_path) == ["tool_on_a_cpu.py"]
