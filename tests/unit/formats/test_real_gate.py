"""Imported candidates and solutions are judged like any kernel: by the real gate, on the CPU, at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.formats import candidate_of, definition_of, import_definition, read_problem, source_of
from pytest_klineage.formats.trace_export import workload_of
from pytest_klineage.formats.trace_records import BuildSpec, Solution, SolutionFile
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, LibraryPolicy, Verdict

PROBLEM = """import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, channels, filters):
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, 3, padding=1, bias=False)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.rand(1, 8, 12, 12)]

def get_init_inputs():
    return [8, 16]
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    settings = GateSettings(
        time_limit_s=0.3,
        precision=0.5,
        seeds=1,
        busy_limit=1.0,
        spread_limit=1e6,
        flush_bytes=1 << 20,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    with Gate("cpu", settings) as opened:
        yield opened


def lenient(case: KernelCase) -> KernelCase:
    """Any speed, and a library may do the work: what is tested is the call."""
    return msgspec.structs.replace(case, at_least=1e-4, library=LibraryPolicy.ALLOW)


def test_a_candidate_is_called_with_the_inputs_as_its_weights(gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "conv.py"
    path.write_text(PROBLEM)
    imported = read_problem(path, tmp_path / "imported")

    def judged(text: str) -> Verdict:
        candidate = text.replace("class Model(", "class ModelNew(")
        return gate.judge(lenient(imported.case), candidate_of(candidate, imported))

    right = judged(PROBLEM)
    assert right.scored, right.reasons[0].message
    wrong = judged(PROBLEM.replace("self.conv(x)", "self.conv(x) * 1.01"))
    assert wrong.code is Code.MISMATCH
    renamed = judged(PROBLEM.replace("self.conv", "self.other"))
    assert renamed.code is Code.EXCEPTION
    assert "conv" in f"{renamed.reasons[0].message} {renamed.log}"


def test_a_solution_that_fills_its_outputs_is_judged(gate: Gate, tmp_path: Path) -> None:
    case = make_case("gemm", (32, 32, 32), "fp32", "torch")
    imported = import_definition(definition_of(case), workload_of(case), tmp_path)
    text = "import torch\n\n\ndef run(a, b, c):\n    torch.mm(a, b, out=c)\n"
    solution = Solution(
        name="fills", definition="gemm", author="somebody", sources=(SolutionFile("main.py", text),),
        spec=BuildSpec(language="python", target_hardware=("cpu",), entry_point="main.py::run"),
    )  # fmt: skip
    verdict = gate.judge(lenient(imported.case), source_of(solution, imported))
    assert verdict.scored, verdict.reasons[0].message
