"""Parts of other packages: an installed distribution with entry points, used and listed without any edit of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.results.runs import read_run
from pytest_klineage.surfaces.toolkit import find_tool

OPS = """
import torch
from pytest_klineage import operator
from pytest_klineage.references import Reference

@operator("x[M] -> y[M]", dtypes=("fp32",), may_ignore=("negative",))
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
LANGUAGE = """
import subprocess
from pytest_klineage.records import Build, Code, GpuPlatform, INSTRUCTIONS
from pytest_klineage.surfaces import Built, SurfaceBackend, SurfaceFailure
from pytest_klineage.surfaces.native import INCLUDE_DIR, NativeKernel

class Dashes(SurfaceBackend):
    # C++ whose functions may have dashes in their names.
    surface, platforms, needs_torch, suffixes = "dashes", ("cpu",), False, (".dash",)

    def build(self, source, cache, *, platform, timeout_s):
        folder = cache / "dashes" / source.digest
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cpp").write_text(source.main.text.replace("-in-dashes", "_in_dashes"))
        command = ["g++", "-O2", "-shared", "-fPIC", f"-I{INCLUDE_DIR}", "kernel.cpp", "-o", "kernel.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise SurfaceFailure(Code.COMPILE, "it is no dashes", log=done.stderr)
        return Built(artifact=folder / "kernel.so", build=Build(digest=source.digest, toolchain="dashes 1"))

    def load(self, artifact, entry, module):
        return NativeKernel(artifact, entry)

SPARK = GpuPlatform(
    name="sm121", capability="12.1", target="121a", title="Spark", toolkit=(12, 9), shared_bytes=101_376,
    instructions=frozenset({"mma", "cp_async"}),
)
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
MORE_POINTS = """[pytest_klineage.surfaces]
dashes = klineage_pack.language:Dashes
[pytest_klineage.platforms]
sm121 = klineage_pack.language:SPARK
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
    (info / "entry_points.txt").write_text(POINTS + MORE_POINTS)
    (tmp_path / "klineage_pack/language.py").write_text(LANGUAGE)
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
    assert "surface dashes\n  package:  klineage-pack 1.2\n  runs on:  cpu\n" in cases.stdout
    assert "platform sm121\n  package:  klineage-pack 1.2\n  is:       Spark, compute capability 12.1" in cases.stdout
    assert "klineage-pack 1.2 (klineage_pack.language:Dashes)" in doctor.stdout
    assert "klineage-pack 1.2 (klineage_pack.language:SPARK)" in doctor.stdout


def test_a_package_adds_a_language(
    package: Path, kernels: Path, pytester: pytest.Pytester, processes: tuple[str, ...], quick: tuple[str, ...]
) -> None:
    text = KERNEL.replace("extern", "static float three-in-dashes() { return 3; }\nextern")
    (kernels / "thrice.dash").write_text(text.replace("3 *", "three-in-dashes() *"))
    (kernels / "evil.dash").write_text(text.replace("return 0", "ptrace(0); return 0"))
    (kernels / "wrong.dash").write_text("no language\n")
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((1000,), "fp32", op="thrice", ref="other", at_least=0.0001)
        def test_by_suffix(kernel_gate):
            assert kernel_gate("thrice.dash").surface == "dashes"

        @kernel_case((1000,), "fp32", op="thrice", ref="other", at_least=0.0001)
        def test_wrong(kernel_gate):
            kernel_gate("wrong.dash", surface="dashes")

        @kernel_case((1000,), "fp32", op="thrice", ref="other", at_least=0.0001)
        def test_audited(kernel_gate):
            kernel_gate("evil.dash")
        """
    )
    result = pytester.runpytest_subprocess(*processes, *quick, "--klineage-platform=cpu")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*build_error.compile: it is no dashes*", "*cheat.tampering: the source calls ptrace*"]
    )
    (path,) = kernels.glob("results/runs/*/records.jsonl")
    assert {record.verdict.surface for record in read_run(path).records} == {"dashes"}


@pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is not installed")
def test_a_package_adds_a_platform(package: Path, kernels: Path, pytester: pytest.Pytester) -> None:
    (kernels / "fill.cu").write_text(
        '#include "klineage.h"\n__global__ void fill(float *y) { y[threadIdx.x] = 0; }\n'
        'extern "C" int run(const klineage_call *call) {\n'
        "    fill<<<1, 32, 0, (cudaStream_t)call->stream>>>((float *)call->outputs[0].data);\n    return 0;\n}\n"
    )
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((64, 64, 64), "fp32", op="gemm")
        def test_fill(kernel_gate):
            kernel_gate("fill.cu", platforms=("sm_121a",))
        """
    )
    result = pytester.runpytest_subprocess("--klineage-stage=compile", "--klineage-platform=sm121")
    result.assert_outcomes(passed=1)
    (path,) = kernels.glob("results/runs/*/records.jsonl")
    (build,) = [record.verdict.build for record in read_run(path).records]
    assert build is not None
    assert (build.platform, "sm_121a" in build.command) == ("sm121", True)


def test_one_that_is_something_else_is_named(package: Path) -> None:
    language = package / "klineage_pack/language.py"
    language.write_text(language.read_text().replace('name="sm121"', 'name="sm122"'))
    (package / "klineage_pack/ops.py").write_text("def thrice(x): return 3 * x\nOther = 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_klineage", "doctor"], capture_output=True, text=True, check=False
    )
    for line in ("absent   operator thrice", "absent   reference other", "absent   platform sm121"):
        assert line in done.stdout
    assert "it is a platform sm122" in done.stdout


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
