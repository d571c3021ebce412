"""FlashInfer-Trace: definitions and solutions come in, cases and verdicts go out, and what was exported comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.formats import (
    Solution,
    Trace,
    TraceDefinition,
    Unsupported,
    Workload,
    definition_of,
    import_definition,
    lint_imported,
    read_trace_set,
    solution_of,
    source_of,
    trace_of,
    traces_jsonl,
)
from pytest_klineage.formats.trace_export import workload_of
from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.records import (
    Check,
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Machine,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Verdict,
)

CASES = [
    make_case("gemm", (64, 32, 48), "bf16", "torch"),
    make_case("conv2d", (2, 8, 12, 14, 16, 3, 2, 1), "fp16", "torch"),
    make_case("fmha", (1, 2, 64, 32), "fp16", "torch", causal=True),
    make_case("fmha", (1, 2, 64, 32), "fp32", "torch"),
    make_case("fmha", (1, 4, 64, 32), "fp32", "torch", causal=True, window=16, group=2),
    make_case("topk", (4, 256, 32), "fp32", "torch"),
]
GEMM: dict[str, Any] = {
    "name": "gemm_n128_k256", "op_type": "gemm", "description": "C = A B",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 128}, "K": {"type": "const", "value": 256}},
    "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["K", "N"], "dtype": "float16"}},
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
    "reference": "import torch\n\n@torch.no_grad()\ndef run(A, B):\n    C = torch.matmul(A, B)\n    return C\n",
    "tags": ["status:verified"], "constraints": ["M > 0"],
}  # fmt: skip
RANDOM = {"type": "random"}
WORKLOAD: dict[str, Any] = {"axes": {"M": 64}, "inputs": {"A": RANDOM, "B": RANDOM}, "uuid": "u1"}


def definition(**changes: Any) -> TraceDefinition:
    return msgspec.convert({**GEMM, **changes}, TraceDefinition)


def workload(**changes: Any) -> Workload:
    return msgspec.convert({**WORKLOAD, **changes}, Workload)


def solution(text: str, **spec: Any) -> Solution:
    written = {
        "name": "fast", "definition": "gemm_n128_k256", "author": "somebody",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run", **spec},
        "sources": [{"path": "main.py", "content": text}, {"path": "part.py", "content": "x = 1\n"}],
    }  # fmt: skip
    return msgspec.convert(written, Solution)


def test_a_definition_at_a_workload_is_a_case(tmp_path: Path) -> None:
    import torch

    found = import_definition(definition(), workload(), tmp_path, reference="torch.compile")
    assert (found.case.shape, found.case.dtype) == ({"M": 64, "K": 256, "N": 128}, "fp16")
    assert (found.case.reference, found.arguments) == ("torch.compile", ("A", "B"))
    chosen = operator_of(found.case)
    inputs = chosen.make_inputs(found.case, torch.Generator().manual_seed(1), chosen.input_distributions[0])
    expected = inputs["A"].double() @ inputs["B"].double()
    torch.testing.assert_close(chosen.oracle(found.case, inputs)["C"], expected)


def test_a_scalar_is_an_option(tmp_path: Path) -> None:
    import torch

    scaled = definition(
        inputs={"s": {"shape": None, "dtype": "float32"}, **GEMM["inputs"]},
        reference="def run(s, A, B):\n    return A @ B * s\n",
    )
    three = {"A": RANDOM, "B": RANDOM, "s": {"type": "scalar", "value": 3.0}}
    found = import_definition(scaled, workload(inputs=three), tmp_path)
    chosen = operator_of(found.case)
    inputs = chosen.make_inputs(found.case, torch.Generator().manual_seed(1), chosen.input_distributions[0])
    expected = 3 * inputs["A"].double() @ inputs["B"].double()
    torch.testing.assert_close(chosen.oracle(found.case, inputs)["C"], expected)
    source = source_of(solution("def run(s, A, B):\n    return s * A @ B\n", destination_passing_style=False), found)
    namespace: dict[str, Any] = {}
    exec(source.files[0].text, namespace)
    torch.testing.assert_close(namespace[source.entry](*inputs.values(), s=3), 3 * inputs["A"] @ inputs["B"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_is_exported_comes_back(case: KernelCase, tmp_path: Path) -> None:
    written = msgspec.json.encode(definition_of(case))
    found = import_definition(msgspec.json.decode(written, type=TraceDefinition), workload_of(case), tmp_path).case
    first, second = (operator_of(item).signature(item) for item in (case, found))
    assert (found.dtype, first.inputs, first.outputs) == (case.dtype, second.inputs, second.outputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_an_exported_reference_computes_the_case(case: KernelCase) -> None:
    import torch

    chosen = operator_of(case)
    inputs = chosen.make_inputs(case, torch.Generator().manual_seed(1), chosen.input_distributions[0])
    namespace: dict[str, Any] = {}
    exec(definition_of(case).reference, namespace)
    found = namespace["run"](*inputs.values())
    outputs = dict(zip(chosen.oracle(case, inputs), found if isinstance(found, tuple) else (found,), strict=True))
    for name, expected in chosen.oracle(case, inputs).items():
        if case.operator == "topk" and name == "indices":
            continue
        torch.testing.assert_close(outputs[name].double(), expected.double(), rtol=2e-2, atol=2e-2)


def test_what_has_no_words_there_is_refused() -> None:
    with pytest.raises(Unsupported, match="gdn is not one call of PyTorch"):
        definition_of(make_case("gdn", (1, 3, 32, 16, 96), "fp32", "torch"))
    with pytest.raises(Unsupported, match="the format knows no strides"):
        definition_of(make_case("conv2d", (1, 8, 8, 8, 8, 3, 1, 1), "fp16", "torch", layout="nhwc"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reference": "import torch\ndef walk(A, B):\n    return A @ B\n"}, "name 'run' is not defined"),
        ({"reference": "def run(A, B):\n    return A @ B.T\n"}, "the definition failed: RuntimeError"),
        ({"outputs": {"C": {"shape": ["M", "K"], "dtype": "float16"}}}, "with shape (64, 128), the signature says"),
        ({"outputs": {"C": {"shape": ["M", "N"], "dtype": "int32"}}}, "for C, the signature says int32"),
    ],
)  # fmt: skip
def test_a_reference_that_is_another_thing_fails(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    imported = import_definition(definition(**changes), workload(), tmp_path)
    with pytest.raises(UsageError) as failed:
        lint_imported(imported)
    assert why in str(failed.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reference": "def run(A, B:\n"}, "SyntaxError"),
        ({"outputs": {"C": {"shape": ["M", "Z"], "dtype": "float16"}}}, "the axis Z is not defined"),
        ({"inputs": {"A": {"shape": ["M", "K"], "dtype": "float4"}, "B": GEMM["inputs"]["B"]}}, "A is float4"),
        (
            {"inputs": {**GEMM["inputs"], "s": {"shape": None, "dtype": "float32"}},
             "reference": "def run(A, B, s):\n    return A @ B\n"},
            "the workload u1 says nothing of the input s",
        ),
    ],
)  # fmt: skip
def test_a_definition_that_cannot_be_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as refused:
        import_definition(definition(**changes), workload(), tmp_path)
    assert str(refused.value).startswith("unsupported: gemm_n128_k256: ")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"axes": {}}, "the axis M has no size in the workload u1"),
        ({"axes": {"M": 0}}, "the axis M has no size"),
        ({"inputs": {"A": RANDOM}}, "says nothing of the input B"),
        ({"inputs": {"A": RANDOM, "B": {"type": "safetensors", "path": "p", "tensor_key": "k"}}}, "is safetensors"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_had_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=why):
        import_definition(definition(), workload(**changes), tmp_path)


RETURNS = "import torch\ndef run(A, B):\n    return A @ B\n"
WRITES = "import torch\ndef run(A, B, C):\n    torch.mm(A, B, out=C)\n"


@pytest.mark.parametrize(
    ("text", "style", "entry"),
    [(RETURNS, False, "run"), (RETURNS, None, "run"), (WRITES, True, "klineage_run"), (WRITES, None, "klineage_run")],
)
def test_a_solution_is_called_as_it_wants(text: str, style: bool | None, entry: str, tmp_path: Path) -> None:
    import torch

    imported = import_definition(definition(), workload(), tmp_path)
    found = source_of(solution(text, destination_passing_style=style), imported)
    assert (found.surface, found.entry, found.label) == (Surface.PYTHON, entry, "fast")
    assert [file.name for file in found.files] == ["main.py", "part.py"]
    namespace: dict[str, Any] = {}
    exec(found.files[0].text, namespace)
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    if entry == "run":
        result = namespace[entry](a, b)
    else:
        result = torch.empty(3, 5)
        namespace[entry](a, b, out=result)
    torch.testing.assert_close(result, a @ b)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"language": "cuda"}, "cuda that is bound by tvm-ffi; a kernel here includes klineage.h"),
        ({"language": "rust"}, "the language 'rust'"),
        ({"entry_point": "other.py::run"}, "is not among its files"),
    ],
)
def test_a_solution_that_cannot_be_called_is_refused(spec: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=why):
        source_of(solution(RETURNS, **spec), import_definition(definition(), workload(), tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        KernelSource(
            surface=Surface.CUDA, entry="run", flags=("-O3",), label="mine",
            files=(SourceFile("gemm.cu", "// one"), SourceFile("tile.cuh", "// two")),
        ),
        KernelSource(surface=Surface.PYTHON, entry="run", files=(SourceFile("k.py", RETURNS),), label="mine"),
        KernelSource(
            surface=Surface.TRITON, entry="run", label="mine",
            files=(SourceFile("k.py", "def run(a, b, out):\n    out.copy_(a @ b)\n"),),
        ),
    ],
    ids=["cuda", "python", "triton"],
)  # fmt: skip
def test_a_kernel_comes_back_as_it_was(source: KernelSource, tmp_path: Path) -> None:
    case = CASES[0]
    written = msgspec.json.encode(solution_of(source, case, "sm90"))
    imported = import_definition(definition_of(case), workload_of(case), tmp_path)
    assert source_of(msgspec.json.decode(written, type=Solution), imported).digest == source.digest


def test_kernels_that_cannot_leave_are_refused() -> None:
    module = KernelSource(surface=Surface.PYTHON, entry="run", files=(), module="package.module")
    with pytest.raises(Unsupported, match="an installed module"):
        solution_of(module, CASES[0], "cpu")
    files = (SourceFile("k.py", "def run(x, k, out):\n    pass\n"),)
    with pytest.raises(Unsupported, match="its outputs as one tuple"):
        solution_of(KernelSource(surface=Surface.PYTHON, entry="run", files=files), CASES[-1], "cpu")


def verdict(code: Code, speedup: float | None = None) -> Verdict:
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired", reference_ms=speedup, candidate_ms=1.0, speedup=Interval(speedup, 0.9, 2.1),
            reference_samples_ms=(), candidate_samples_ms=(), warmup=1, flush_bytes=0, statistic="",
        )  # fmt: skip
    return Verdict(
        case=CASES[0], status=code.status, reasons=(Reason(code=code, message="because"),), label="mine",
        source_digest="ab" * 32, timing=timing, judged_at="2026-01-01T00:00:00Z",
        machine=Machine(platform="cpu", device="A CPU", software={"torch": "2.9"}),
        checks=(Check(input_distribution="well_conditioned", output="c", error=3.0, bound=12.0, passed=True),),
    )  # fmt: skip


def test_a_scored_verdict_is_a_passed_trace() -> None:
    trace = trace_of(verdict(Code.SLOWER_THAN_REQUIRED, 0.5))
    assert trace is not None
    found = trace.evaluation
    assert found is not None
    assert (found.status, found.environment) == ("PASSED", {"hardware": "A CPU", "libs": {"torch": "2.9"}})
    assert found.performance == {"latency_ms": 1.0, "reference_latency_ms": 0.5, "speedup_factor": 0.5}
    assert found.correctness is not None
    assert found.correctness["max_absolute_error"] == "NaN"
    extra = found.correctness["extra"]
    assert extra["klineage_worst_error_over_bound"] == 0.25
    assert (extra["klineage_speedup_low"], extra["klineage_speedup_high"]) == (0.9, 2.1)
    assert (trace.definition, trace.solution) == ("klineage_gemm_64x32x48_bf16", "mine_abababababab")


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.value)
def test_every_verdict_has_a_word_and_the_parts_that_it_demands(code: Code) -> None:
    scored = code.status.value in ("accepted", "slower", "inconclusive") and code is not Code.ACCEPTED_BUILT
    trace = trace_of(verdict(code, 1.0 if scored else None))
    if code.status.value == "skipped" or code is Code.ACCEPTED_BUILT:
        assert trace is None
        return
    assert trace is not None
    found = trace.evaluation
    assert found is not None
    assert (found.correctness is not None) == (found.status in ("PASSED", "INCORRECT_NUMERICAL"))
    assert (found.performance is not None) == (found.status == "PASSED") == scored
    assert found.log == f"{code.value}: because"


def test_a_set_is_read_and_what_is_broken_in_it_is_named(tmp_path: Path) -> None:
    for folder in ("definitions/gemm", "solutions/gemm", "workloads/gemm", "traces/gemm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "definitions" / "gemm" / "one.json").write_text(json.dumps(GEMM))
    (tmp_path / "definitions" / "gemm" / "two.json").write_text('{"name": 3}')
    (tmp_path / "solutions" / "gemm" / "s.json").write_bytes(msgspec.json.encode(solution(RETURNS)))
    line = json.dumps({"definition": "gemm_n128_k256", "workload": WORKLOAD, "solution": None, "evaluation": None})
    (tmp_path / "workloads" / "gemm" / "w.jsonl").write_text(f"{line}\nhalf a li\n")
    (tmp_path / "traces" / "gemm" / "t.jsonl").write_bytes(
        traces_jsonl([verdict(Code.ACCEPTED_FASTER, 2.0), verdict(Code.SKIPPED_PLATFORM)])
    )
    found = read_trace_set(tmp_path)
    assert list(found.definitions) == ["gemm_n128_k256"]
    assert [len(part) for part in (found.solutions, found.workloads, found.traces)] == [1, 1, 1]
    assert isinstance(found.traces[0], Trace)
    assert len(found.problems) == 2
    assert "two.json is no TraceDefinition of FlashInfer-Trace" in found.problems[0]
    assert "w.jsonl, line 2 is no Trace" in found.problems[1]
    with pytest.raises(UsageError, match="definitions/ is not there"):
        read_trace_set(tmp_path / "definitions")
