"""Parts of other packages: an installed distribution with entry points, used and listed without any edit of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.results.runs import read_run

OPS = """
import torch
from pytest_klineage import operator
from pytest_klineage.references import Reference

@operator("x[M] -> y[M]", dtypes=("fp32",))
def thrice(x, *, negative: bool = False):
    return -3 * x if negative else 3 * x

class Other(Reference):
    name, platforms, remedy = "other", ("cpu",), "pip install other"
    def operators(self):
        return ("thrice", "gemm")
    def prepare(self, case, trial=None):
        if case.operator == "gemm":
            return lambda inputs, outputs: {"c": inputs["a"] @ inputs["b"]}
        return lambda inputs, outputs: {"y": 3 * inputs["x"]}
    def describe(self, case):
        return {"label": "other"}
"""
KERNEL = """#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    for (int64_t i = 0; i < call->inputs[0].shape[0]; ++i)
        ((float *)call->outputs[0].data)[i] = 3 * ((const float *)call->inputs[0].data)[i];
    return 0;
}
"""
TESTS = """
from pytest_klineage import kernel_case

@kernel_case((1000,), "fp32", op="thrice", ref="other", at_least=0.0001)
def test_both(kernel_gate):
    assert kernel_gate("thrice.cpp").reference["label"] == "other"

@kernel_case((900,), "fp32", op="thrice", at_least=0.0001)
def test_definition(kernel_gate):
    kernel_gate("thrice.cpp")

@kernel_case((16, 16, 16), "fp32", op="gemm", ref="other", at_least=0.0001)
def test_a_shipped_operator(kernel_gate):
    kernel_gate("good.cpp")
"""
POINTS = """[pytest_klineage.operators]
thrice = klineage_pack.ops:thrice
[pytest_klineage.references]
other = klineage_pack.ops:Other
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package, as far as importlib.metadata is concerned."""
    (tmp_path / "klineage_pack").mkdir()
    (tmp_path / "klineage_pack/__init__.py").touch()
    (tmp_path / "klineage_pack/ops.py").write_text(OPS)
    info = tmp_path / "klineage_pack-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: klineage-pack\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    return tmp_path


def test_a_package_adds_an_operator_and_a_reference(
    package: Path, kernels: Path, pytester: pytest.Pytester, processes: tuple[str, ...], quick: tuple[str, ...]
) -> None:
    (kernels / "thrice.cpp").write_text(KERNEL)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(*processes, *quick, "--klineage-platform=cpu")
    result.assert_outcomes(passed=3)
    (path,) = kernels.glob("results/runs/*/records.jsonl")
    found = {record.nodeid.partition("::")[2]: record.verdict.case.definition for record in read_run(path).records}
    assert found["test_a_shipped_operator"] is None
    assert found["test_both"] is not None
    assert found["test_both"].package == "klineage-pack 1.2"
    assert found["test_both"].source.endswith("klineage_pack/ops.py:thrice")


def test_they_are_listed_with_their_package(package: Path) -> None:
    cases, doctor = (
        subprocess.run([sys.executable, "-m", "pytest_klineage", name], capture_output=True, text=True, check=False)
        for name in ("cases", "doctor")
    )
    assert "thrice\n  package:  klineage-pack 1.2\n  axes:     M\n" in cases.stdout
    assert "  tensors:  x[M] -> y[M]\n" in cases.stdout
    assert "reference other\n  package:  klineage-pack 1.2\n" in cases.stdout
    assert "klineage-pack 1.2 (klineage_pack.ops:thrice)" in doctor.stdout


def test_one_that_cannot_be_loaded_is_named(package: Path) -> None:
    (package / "klineage_pack/ops.py").write_text("import no_such_package\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_klineage", "doctor"], capture_output=True, text=True, check=False
    )
    assert "absent   operator thrice" in done.stdout
    assert (
        "klineage-pack 1.2 registers operators thrice = klineage_pack.ops:thrice, which cannot be loaded" in done.stdout
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest_klineage", "cases"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "No module named 'no_such_package'" in done.stderr) == (2, True)
