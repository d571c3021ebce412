"""An operator that one file adds: judged, listed, reported, exported, asked for in a prompt, and found for cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.results.runs import read_run

ROOT = Path(__file__).parents[2]
OPERATOR = '''
"""Sums along rows, and what this project makes of them."""

import msgspec
import torch

from pytest_klineage import kernel_case, make_case, paper_case
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Operator
from pytest_klineage.operators.distributions import normal, permutation, random_index
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, output_rounding, summation_variance
from pytest_klineage.records import Signature, SourceFile
from pytest_klineage.records.signature import dense


class PrefixSum(Operator):
    """Inclusive sums along rows. Axes M, N; input x[M,N], output y[M,N]."""

    name = "prefix_sum"
    axes = ("M", "N")
    dtypes = ("fp32",)
    family = "products of tiles"
    aliases = ("scan",)
    tensor_axes = {"x": ("M", "N"), "y": ("M", "N")}
    drawn_in_torch = {"x": "torch.sin({})"}
    published = {"cpu": ((48, 40), "fp32", {}), "gpu": ((4096, 4096), "fp32", {})}
    small = {"gpu": ((8, 16), "fp32", {})}

    def in_torch(self, case, *, in_order=False):
        return "return torch.cumsum(x, 1)"

    def signature(self, case):
        return Signature(inputs=(dense("x", case.dtype, *case.shape.values()),),
                         outputs=(dense("y", case.dtype, *case.shape.values()),))

    def make_inputs(self, case, generator, input_distribution):
        return {"x": normal(tuple(case.shape.values()), generator).float()}

    def oracle(self, case, inputs):
        return {"y": inputs["x"].double().cumsum(1)}

    def baseline_output(self, case, inputs):
        return {"y": inputs["x"].cumsum(1)}

    def error_scale(self, case, inputs, expected):
        squares = inputs["x"].double().square().cumsum(1)
        terms = torch.arange(1, case.shape["N"] + 1, dtype=torch.float64, device=squares.device)
        error = summation_variance(squares, expected["y"], terms).sqrt() * UNIT_ROUNDOFF["fp32"]
        return {"y": error + output_rounding("fp32", expected["y"])}

    def symmetry_transform(self, case, inputs, generator):
        rows, back = permutation(case.shape["M"], generator, inputs["x"])
        return {"x": inputs["x"].index_select(0, rows)}, lambda outputs: {"y": outputs["y"].index_select(0, back)}

    def perturb(self, case, inputs, generator):
        x = inputs["x"].clone()
        x[random_index(case.shape["M"], generator), 0] += 100.0
        return {"x": x}

    def flops(self, case):
        return float(case.shape["M"] * case.shape["N"])
'''
TESTS = """
@kernel_case((48, 40), "fp32", op="prefix_sum", at_least=1e-4)
def test_right(kernel_gate):
    assert kernel_gate("scan.cpp").reference["label"] == "the definition, eager"


@kernel_case((48, 40), "fp32", op="prefix_sum", at_least=1e-4)
def test_wrong(kernel_gate):
    kernel_gate("skips_first.cpp")


def test_prompt():
    from pytest_klineage.lab.optimizers.instructions import instructions_for
    from pytest_klineage.records import Surface

    text = instructions_for(paper_case("prefix_sum", "cpu", "torch"), Surface.CPP, "cpu")
    assert "Inclusive sums along rows" in text
    assert "| inputs[0] | x | fp32 | [48, 40] | [40, 1] |" in text


def test_formats():
    from pytest_klineage.formats import definition_of
    from pytest_klineage.lab.external.problems import kernelbench_file

    case = paper_case("prefix_sum", "cpu", "torch")
    assert "torch.sin(torch.randn(48, 40))" in kernelbench_file(case)
    assert definition_of(case).outputs["y"].shape == ("M", "N")


def test_sanitizer():
    from pytest_klineage.gate.stages.sanitize import cases_to_try

    assert [case.shape for case in cases_to_try(paper_case("prefix_sum", "gpu", "torch"))] == [
        {"M": 8, "N": 16}, {"M": 4096, "N": 4096}
    ]


@kernel_case((48, 40), "fp32", op="prefix_sum", at_least=1e-4)
def test_lineage_and_cards(kernel_gate, tmp_path):
    from pytest_klineage import read_source
    from pytest_klineage.lab.induction.admit_targets import targets_for
    from pytest_klineage.lab.library.lineages import problems_of, save_lineage, state_of
    from pytest_klineage.lab.library.retrieval import CardIndex, RetrievalTarget
    from pytest_klineage.operators import by_alias
    from pytest_klineage.records import (
        CardScope, CardStatus, Carrier, CarrierKind, Category, Context, Effect, Evidence, Interval, Lineage, SkillCard,
        Surface, Termination, Transition,
    )
    from pytest_klineage.records.edits import diff_edit

    paths = "scan.cpp", "scan_in_float.cpp"
    verdicts = [kernel_gate(path) for path in paths]
    sources = [msgspec.structs.replace(source, files=(SourceFile("scan.cpp", source.main.text),))
               for source in map(read_source, paths)]
    verdicts = [msgspec.structs.replace(verdict, source_digest=source.digest)
                for verdict, source in zip(verdicts, sources)]
    texts = [{"scan.cpp": source.main.text} for source in sources]
    step = Transition(
        category=Category.SIMD, locus="run", intent="sums in float", before=sources[0].digest, after=sources[1].digest,
        backward=diff_edit(*texts[::-1]), forward=diff_edit(*texts), forward_verdict=verdicts[1],
        effect=Interval(1.5, 1.4, 1.6),
    )
    lineage = Lineage(
        operator="prefix_sum", platform="cpu", surface=Surface.CPP, case=verdicts[0].case,
        states=tuple(state_of(number, "state", *pair) for number, pair in enumerate(zip(sources, verdicts))),
        transitions=(step,), termination=Termination.NAIVE_REACHED, termination_reason="nothing is left",
    )
    stored = save_lineage(tmp_path / "prefix_sum/cpu-cpp/lineage", lineage, sources)
    assert problems_of(stored) == []
    origin = Context(
        operator=by_alias("scan"), shape={"M": 48, "N": 40}, dtype="fp32", surface=Surface.CPP, platform="cpu"
    )
    digest = stored.lineage.transitions[0].digest
    card = SkillCard(
        name="sum-in-float", status=CardStatus.ADMITTED, category=Category.SIMD, intent="Sum in float.", anchor="a sum",
        carrier=Carrier(kind=CarrierKind.ANNOTATION, language="text", text="float"), origins=(origin,),
        preconditions=(), scope=CardScope(),
        evidence=(Evidence("prefix_sum/cpu-cpp", digest),),
        effect=Effect(summary="Fewer instructions.", speedup=Interval(1.5, 1.4, 1.6), span=(digest,)),
    )
    (target,) = targets_for(card, [stored], {"prefix_sum": [(6, 7)]})
    assert target.context.shape == {"M": 48, "N": 40}
    for name, shape, like in (("gemm", (8, 8, 8), 0.5), ("topk", (8, 8, 4), 0.0)):
        wanted = RetrievalTarget(case=make_case(name, shape, "fp32", "torch"), surface=Surface.CPP, platform="cpu")
        (match,) = CardIndex([card]).retrieve(wanted).matches
        assert abs(match.similarities.case - 0.6 * like - 0.2) < 1e-9
"""
KERNEL = """#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &x = call->inputs[0];
    for (int64_t i = 0; i < x.shape[0]; ++i) {
        TYPE sum = 0;
        for (int64_t j = 0; j < x.shape[1]; ++j) {
            sum += ((const float *)x.data)[i * x.shape[1] + j] * (j >= FIRST);
            ((float *)call->outputs[0].data)[i * x.shape[1] + j] = (float)sum;
        }
    }
    return 0;
}
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of one file, which has its own tests in it, and three kernels."""
    pytester.makepyfile(test_prefix_sum=OPERATOR + TESTS)
    info = pytester.mkdir("prefix_sum-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prefix-sum\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest_klineage.operators]\nprefix_sum = test_prefix_sum:PrefixSum\n")
    for name, kind, first in (("scan", "double", "0"), ("scan_in_float", "float", "0"), ("skips_first", "double", "1")):
        (pytester.path / f"{name}.cpp").write_text(KERNEL.replace("TYPE", kind).replace("FIRST", first))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), str(ROOT)]))
    return pytester.path


def said_by(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_klineage", *command], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_everything_works_for_it(folder: Path, pytester: pytest.Pytester, quick: tuple[str, ...]) -> None:
    result = pytester.runpytest_subprocess(*quick, "--klineage-platform=cpu")
    result.assert_outcomes(passed=5, failed=1)
    (path,) = folder.glob("results/runs/*/records.jsonl")
    codes = {record.nodeid.partition("::")[2]: record.verdict.code.value for record in read_run(path).records}
    assert (codes["test_right"].partition(".")[0], codes["test_wrong"]) == ("accepted", "wrong_value.mismatch")
    said_by("report", str(path.parent), "--html", str(folder / "report.html"))
    assert "prefix_sum-48x40-fp32" in (folder / "report.html").read_text()


def test_the_command_lists_it(folder: Path) -> None:
    listed = said_by("cases")
    assert (
        "prefix_sum\n  package:  prefix-sum 1.0\n  axes:     M, N\n  dtypes:   fp32\n  compared: torch, torch.comp"
        in listed
    )
    assert "  cpu shape: fp32: M=48, N=40\n    inputs:  x[48,40] fp32\n" in listed
    assert "  gpu shape: fp32: M=4096, N=4096\n" in listed
