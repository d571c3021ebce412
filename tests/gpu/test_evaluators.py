"""Without a GPU: the evaluators of suites/gate_quality on CPU kernels with clocks of the test, and their tables."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_gpu_evaluators as suite
import torch
from cpu_gemm import CASE, built
from evaluators import flashinfer_bench, flashinfer_bench_tool, kernelbench
from evaluators.clocks import ClockFailure
from evaluators.problem import Judged, Problem, Request, Run
from evaluators.process import Process, ProcessEnded

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import Code, Interval, Reason, Surface, Timing, Verdict

SUITE = Path(suite.__file__).parent
ECHO = """
import os, sys, time
import msgspec
from evaluators.process import serve

class Word(msgspec.Struct):
    text: str

def answer(word):
    print("noise on the standard output", flush=True)
    os.system("echo more of it")
    if word.text == "crash":
        raise ValueError("it went wrong")
    if word.text == "sleep":
        time.sleep(60)
    return Word(text=word.text * 2)

if __name__ == "__main__":
    serve(Word, answer)
"""


class Word(msgspec.Struct):
    """A question and an answer."""

    text: str


class FakeClock:
    """Calls once, and says what it is given: the reference's times, then the candidate's, in the order of the calls."""

    name = "fake"

    def __init__(self, *times: list[float]) -> None:
        self.times, self.asked = iter(times), list[tuple[int, int]]()

    def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
        run()
        self.asked.append((warmup, count))
        return next(self.times)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, built."""
    return built(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def problem(artifact: Path) -> Callable[[str], Problem]:
    """The case with one of the kernels, on the CPU."""

    def make(entry: str) -> Problem:
        return Problem(Request(case=CASE, surface="cpp", artifact=str(artifact), entry=entry), device="cpu")

    return make


# --- the algorithms ---------------------------------------------------------------------------------------------------


def test_kernelbench_candidate_first_and_rounded_means(problem: Callable[[str], Problem]) -> None:
    clock = FakeClock([1.0, 1.002], [3.0, 3.111])
    judged = kernelbench.judge(problem("right"), clock)
    assert judged.correct, judged.why
    assert clock.asked == [(3, 100), (5, 100)]
    assert (judged.candidate_ms, judged.reference_ms) == (1.0, 3.06)
    assert judged.speedup == pytest.approx(3.06)
    assert judged.reference_samples_ms == (3.0, 3.111)


def test_flashinfer_bench_mean_of_three_medians(problem: Callable[[str], Problem]) -> None:
    clock = FakeClock([3, 3, 9], [4, 4, 9], [5, 5, 9], [1, 1, 9], [2, 2, 9], [3, 3, 9])
    judged = flashinfer_bench.judge(problem("right"), clock)
    assert judged.correct, judged.why
    assert clock.asked == [(10, 50)] * 6
    assert (judged.reference_ms, judged.candidate_ms, judged.speedup) == (4, 2, 2)
    assert judged.candidate_samples_ms == (1, 1, 9, 2, 2, 9, 3, 3, 9)


@pytest.mark.parametrize("evaluator", [kernelbench, flashinfer_bench])
@pytest.mark.parametrize("entry", ["wrong", "infinite"])
def test_a_wrong_kernel_is_called_wrong(
    evaluator: types.ModuleType, entry: str, problem: Callable[[str], Problem]
) -> None:
    judged = evaluator.judge(problem(entry), FakeClock([1.0], [1.0], [1.0]))
    assert not judged.correct
    assert judged.why
    assert judged.candidate_samples_ms == ()


def test_inputs_are_the_same_for_a_number_and_others_for_another(problem: Callable[[str], Problem]) -> None:
    first, second = problem("right"), problem("right")
    assert torch.equal(first.inputs(1)["a"], second.inputs(1)["a"])
    assert not torch.equal(first.inputs(1)["a"], first.inputs(2)["a"])


def test_a_bound_call_keeps_its_tensors(problem: Callable[[str], Problem]) -> None:
    made = problem("right")
    inputs, output = made.inputs(0), made.output()
    run: Any = made.candidate(inputs, output)
    assert run.tensors[1] is output


def test_another_operator_is_refused(artifact: Path) -> None:
    case = make_case("topk", (4, 64, 8), "fp32", "torch")
    with pytest.raises(UsageError, match="gemm only"):
        Problem(Request(case=case, surface="cpp", artifact=str(artifact), entry="right"), device="cpu")


def test_an_element_is_wrong_only_beyond_both_bounds() -> None:
    expected = torch.tensor([100.0, 1e-4])
    assert flashinfer_bench.mismatch(torch.tensor([100.9, 5e-3]), expected) == ""
    assert "1 elements" in flashinfer_bench.mismatch(torch.tensor([101.1, 5e-3]), expected)
    assert "not finite" in flashinfer_bench.mismatch(torch.tensor([100.0, float("nan")]), expected)
    assert "float64" in flashinfer_bench.mismatch(expected.double(), expected)


def test_where_cupti_fails_on_a_kernel_the_verdict_is_by_events(
    monkeypatch: pytest.MonkeyPatch, problem: Callable[[str], Problem]
) -> None:
    class Failing(FakeClock):
        def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
            raise ClockFailure("other kernels")

    monkeypatch.setattr(flashinfer_bench, "Problem", lambda request: problem("right"))
    monkeypatch.setattr(flashinfer_bench, "clock_of_this_process", Failing)
    monkeypatch.setattr(flashinfer_bench, "QueuedClock", lambda why: FakeClock(*[[2.0]] * 6))
    request: Any = None
    assert flashinfer_bench.answer(request).speedup == 1.0


# --- the processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A process that says everything twice."""
    (tmp_path / "echo_twice.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Process("echo_twice") as process:
        yield process


def test_a_process_answers_each_request_despite_prints(echo: Process) -> None:
    assert [echo.ask(Word(text=text), Word).text for text in ("a", "b")] == ["aa", "bb"]


def test_a_crash_is_reported_by_the_last_words(echo: Process) -> None:
    with pytest.raises(ProcessEnded, match=r"status 1 and no answer: (.|\n)*it went wrong"):
        echo.ask(Word(text="crash"), Word)
    with pytest.raises(ProcessEnded):
        echo.ask(Word(text="again"), Word)


def test_a_process_that_does_not_answer_is_ended(echo: Process) -> None:
    with pytest.raises(ProcessEnded, match="status -9"):
        echo.ask(Word(text="sleep"), Word, limit_s=2.0)


def test_an_evaluator_without_a_gpu_ends_with_its_reason(artifact: Path) -> None:
    request = Request(case=CASE, surface="cpp", artifact=str(artifact), entry="right")
    with (
        Process("evaluators.kernelbench", {"CUDA_VISIBLE_DEVICES": ""}) as process,
        pytest.raises(ProcessEnded, match=r"(?i)cuda"),
    ):
        process.ask(request, Judged)


# --- the suite's table ------------------------------------------------------------------------------------------------


def evaluated(name: str, speedups: tuple[float, ...], **changes: Any) -> suite.Evaluated:
    """A row of the table."""
    row = suite.Evaluated(
        evaluator=name, case="gemm-4096x4096x4096-bf16", kernel="expert", library="cublaslt", clock="CUDA events",
        first_s=None, seconds=(2.0, 4.0, 3.0), speedups=speedups, reference_samples_ms=((1.0,),) * 3,
        candidate_samples_ms=((1.0,),) * 3, machine="NVIDIA H200", judged_at="2026-11-21T12:00:00+00:00",
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def test_the_table_has_verdicts_per_minute_and_the_spread() -> None:
    rows = [
        evaluated("kernelbench", (0.98, 1.02, 1.0)),
        evaluated("gate", (1.0, 1.004, 1.002), half_widths=(0.01, 0.012, 0.008)),
        evaluated("flashinfer_bench", (), refused=("set 0: 3 elements",)),
        evaluated("flashinfer_bench_tool", (0.97, 0.97, 0.97), refused=("INCORRECT_DTYPE: no",), version="0.1.2"),
    ]
    lines = suite.report_of(rows, "sm90").splitlines()
    shown = [line for line in lines if line.startswith("| ")][1:]
    titles = [item.title for item in suite.EVALUATORS.values()]
    assert [line.split(" | ")[0] for line in shown] == [f"| {title}" for title in (*titles[:3], f"{titles[3]} 0.1.2")]
    assert "| 3 | 3.00 (4.00) | 20.0 | 1.0000 | 1.0020 | 1.0040 | 0.20 % | +-1.00 % |" in shown[0]
    assert shown[1].endswith("| 0.9800 | 1.0000 | 1.0200 | 2.00 % | none |")
    assert "flashinfer-bench's algorithm: set 0: 3 elements" in lines
    assert "flashinfer-bench 0.1.2: INCORRECT_DTYPE: no" in lines
    head = next(line for line in lines if line.startswith("| evaluator"))
    assert {line.count("|") for line in shown} == {head.count("|")}
    assert msgspec.json.decode(msgspec.json.encode(rows[1]), type=suite.Evaluated) == rows[1]


def test_the_page_names_tools_and_how_to_install_them() -> None:
    gate, tool = evaluated("gate", (1.0,)), evaluated("flashinfer_bench_tool", (1.0,), version="0.1.2")
    assert "flashinfer-bench 0.1.2 is the tool, as pip installs it" in suite.report_of([gate, tool], "sm90")
    without = suite.report_of([gate], "sm90")
    assert "`pip install flashinfer-bench==0.1.2`) has not judged" in without
    assert "is the tool" not in without


def test_without_the_tool_its_part_is_skipped_with_the_command() -> None:
    evaluator = suite.EVALUATORS["flashinfer_bench_tool"]
    assert suite.version_of(evaluator._replace(distribution="pytest")) == pytest.__version__
    assert suite.version_of(suite.EVALUATORS["kernelbench"]) == ""
    with pytest.raises(
        pytest.skip.Exception, match=r"no-such-tool is not installed: pip install no-such-tool==0\.1\.2"
    ):
        suite.version_of(evaluator._replace(distribution="no-such-tool"))
    assert evaluator.distribution == flashinfer_bench_tool.DISTRIBUTION


def test_verdicts_stop_at_the_count_or_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(suite, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def judge() -> str:
        now[0] += 4.0
        return "verdict"

    assert suite.in_time(judge, 3, 100.0) == (["verdict"] * 3, [4.0] * 3)
    assert len(suite.in_time(judge, 9, 13.0)[0]) == 3
    assert len(suite.in_time(judge, 9, 0.0)[0]) == suite.LEAST


def test_the_row_of_the_gate_has_what_its_verdicts_say() -> None:
    case, source = paper_case("gemm", "gpu", "cublas"), suite.expert_of("sm90")
    timing = Timing(
        policy="paired", reference_ms=2.0, candidate_ms=1.0, speedup=Interval(2.0, 1.9, 2.1, 0.95),
        reference_samples_ms=(2.0,), candidate_samples_ms=(1.0,), warmup=3,
        flush_bytes=0, statistic="median",
    )  # fmt: skip
    accepted = Reason(code=Code.ACCEPTED_FASTER, message="fast")
    right = Verdict(
        case=case, status=accepted.code.status, reasons=(accepted,), timing=timing, reference={"variant": "cublas"}
    )
    mismatch = Reason(code=Code.MISMATCH, message="another value")
    wrong = Verdict(case=case, status=mismatch.code.status, reasons=(mismatch,))
    row = suite.row_of_gate(case, source, right, 9.0, [right, wrong], [1.0, 2.0])
    assert (row.speedups, row.library, row.first_s, row.candidate_samples_ms) == ((2.0,), "cublas", 9.0, ((1.0,),))
    assert row.half_widths == pytest.approx((0.05,))
    assert row.refused == ("wrong_value.mismatch: another value",)


def test_a_wrong_verdict_of_another_evaluator_is_a_refusal() -> None:
    request = Request(case=CASE, surface="cuda", artifact="kernel.so", entry="run", blas_library="cublas")
    right = Judged(correct=True, clock="CUPTI", speedup=1.5, reference_samples_ms=(3.0,), candidate_samples_ms=(2.0,))
    judged = [right, Judged(correct=False, why="seed 1: the outputs differ")]
    row = suite.row_of_other("kernelbench", request, "expert", None, judged, [1.0, 2.0], machine="NVIDIA H200")
    assert (row.speedups, row.refused, row.clock) == ((1.5,), ("seed 1: the outputs differ",), "CUPTI")
    assert row.per_minute == 40


@pytest.mark.parametrize(
    ("name", "processes", "questions"),
    [("kernelbench", 3, 3), ("flashinfer_bench", 1, 4), ("flashinfer_bench_tool", 1, 4)],
)
def test_a_process_is_new_or_kept_without_its_first_verdict(
    name: str, processes: int, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    asked: list[Request] = []

    class Stand(contextlib.nullcontext[Any]):
        def __enter__(self) -> Stand:
            return self

        def ask(self, question: Request, kind: type[Judged]) -> Judged:
            asked.append(question)
            return kind(correct=True, clock="fake", speedup=float(len(asked)))

    def start(platform: str, module: str, settings: object) -> Stand:
        started.append(module)
        return Stand()

    monkeypatch.setattr(suite, "process_on", start)
    monkeypatch.setattr(suite, "alone", lambda platform: contextlib.nullcontext())
    monkeypatch.setattr(suite, "device_name", lambda platform: "NVIDIA H200")
    monkeypatch.setattr(suite, "version_of", lambda evaluator: evaluator.distribution and "0.1.2")
    request = Request(case=CASE, surface="cuda", artifact="kernel.so", entry="run")
    settings: Any = None
    row = suite.by_other(name, "sm90", settings, request, "expert", 3)
    assert started == [f"evaluators.{name}"] * processes
    assert len(asked) == questions
    assert row.speedups == tuple(range(questions - 2, questions + 1))
    assert (row.first_s is None) == (processes == 3)
    assert row.machine == "NVIDIA H200"
    assert row.version == ("0.1.2" if name == "flashinfer_bench_tool" else "")


def test_every_evaluator_but_the_gate_is_a_script_that_is_there() -> None:
    modules = [evaluator.module for name, evaluator in suite.EVALUATORS.items() if name != "gate"]
    assert all((SUITE / f"{module.replace('.', '/')}.py").exists() for module in modules)
    assert suite.EVALUATORS["gate"].module == ""


def test_the_expert_is_a_cuda_kernel_that_exists() -> None:
    assert suite.expert_of("sm90").surface is Surface.CUDA


def test_on_a_cpu_everything_is_skipped_with_the_reason(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(SUITE / "test_gpu_evaluators.py")]
    command += ["--platform=cpu"]
    done = subprocess.run(
        command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert "4 skipped" in done.stdout
    assert "measures on a GPU" in done.stdout
