"""Cases as problems of others: what is written computes what our references compute, and starts what reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.problems import (
    definition,
    kernelbench_file,
    write_kernelbench,
    write_trace_set,
)
from pytest_klineage.operators import OPERATORS, Operator, make_case, operator_of
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface

CASES = [
    make_case("gemm", (5, 6, 7), "fp32", "torch"),
    make_case("conv2d", (2, 3, 8, 9, 4, 3, 2, 1), "fp32", "torch"),
    make_case("conv2d", (2, 3, 8, 9, 4, 3, 1, 1), "fp32", "torch", layout="nhwc"),
    make_case("fmha", (2, 3, 8, 4), "fp32", "torch"),
    make_case("fmha", (2, 3, 8, 4), "fp32", "torch", causal=True, layout="bshd"),
    make_case("fmha", (2, 4, 24, 4), "fp32", "torch", group=2),
    make_case("fmha", (2, 4, 24, 4), "fp32", "torch", causal=True, window=16, group=4),
    make_case("topk", (4, 32, 5), "fp32", "torch"),
    make_case("gdn", (2, 4, 8, 4, 12), "fp32", "torch"),
    make_case("gdn", (2, 4, 8, 4, 12), "fp32", "torch", initial_state=True),
]


def test_every_operator_of_the_paper_has_a_problem() -> None:
    written = {name for name, chosen in OPERATORS.items() if type(chosen).in_torch is not Operator.in_torch}
    assert {case.operator for case in CASES} == written


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_problem_is_the_case(case: KernelCase) -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {}
    exec(kernelbench_file(case), names)
    inputs = names["get_inputs"]()
    signature = operator_of(case).signature(case)
    for made, spec in zip(inputs, signature.inputs, strict=True):
        assert (tuple(made.shape), tuple(made.stride())) == (spec.shape, spec.strides)
    found = names["Model"](*names["get_init_inputs"]())(*inputs)
    found = tuple(found) if isinstance(found, tuple) else (found,)
    assert [tuple(one.shape) for one in found] == [spec.shape for spec in signature.outputs]
    named = dict(zip((spec.name for spec in signature.inputs), inputs, strict=True))
    expected = operator_of(case).oracle(case, named)
    if case.operator == "topk":
        assert torch.equal(found[0].sort(dim=1).values.double(), expected["values"].sort(dim=1).values.double())
        return
    for mine, spec in zip(found, signature.outputs, strict=True):
        assert torch.allclose(mine.double(), expected[spec.name].double(), rtol=1e-4, atol=1e-4)


def test_an_operator_without_one() -> None:
    with pytest.raises(UnknownName, match="gdn_cumsum"):
        kernelbench_file(make_case("gdn_cumsum", (2, 4, 8), "fp32", "torch"))


def test_a_definition_runs_as_it_is_written() -> None:
    torch = pytest.importorskip("torch")
    found = definition(CASES[0])
    names: dict[str, Any] = {}
    exec(found["reference"], names)
    shapes = {name: [found["axes"][axis]["value"] for axis in spec["shape"]] for name, spec in found["inputs"].items()}
    result = names["run"](*(torch.ones(*shape) for shape in shapes.values()))
    assert list(result.shape) == [found["axes"][axis]["value"] for axis in found["outputs"]["c"]["shape"]]


def test_adaexplore_finds_its_problem(target: EvaluationTarget, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="agent_entry"):
        write_kernelbench(target, tmp_path, "mine")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent_entry.py").write_text("")
    path = write_kernelbench(target, tmp_path, "mine")
    assert path == tmp_path / "datasets" / "KernelBench_mine" / "level1" / "1_gemm-4x8x16-fp32.py"
    assert "class Model" in path.read_text()
    assert (tmp_path / "datasets" / "KernelBench" / "level3").is_dir()


def test_accelopt_needs_a_python_root_that_is_right(target: EvaluationTarget, judge: Any, tmp_path: Path) -> None:
    source = KernelSource(surface=Surface.PYTHON, files=(SourceFile("main.py", "wrong_value.mismatch"),), entry="run")
    verdict = judge(target.case, source)
    with pytest.raises(UsageError, match="Python kernel"):
        write_trace_set(target, verdict, tmp_path)
    given = msgspec.structs.replace(target, surface=Surface.PYTHON, root=source)
    with pytest.raises(UsageError, match="mismatch"):
        write_trace_set(given, verdict, tmp_path)
    assert not list(tmp_path.iterdir())
