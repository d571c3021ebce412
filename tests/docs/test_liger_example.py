"""The example with Liger-Kernel: collected, built for every platform, and right in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.results.runs import list_runs, read_run
from pytest_klineage.surfaces.toolkit import package_folders

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "liger"
KERNELS = {"rms_norm", "swiglu", "softmax"}
needs_liger = pytest.mark.skipif(
    not (package_folders("liger_kernel") and package_folders("triton")), reason="liger-kernel or triton is absent"
)
INTERPRETED = """
import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

plain = interpreter._implicit_cvt

def typed(value):
    # The interpreter hands floats in as Python's, which have no .to(); a compiled kernel gets numbers of a type.
    if type(value) is not float:
        return plain(value)
    return tl.tensor(interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32), tl.float32)

interpreter._implicit_cvt = typed
import liger_kernel.ops.rms_norm
# A function of CUDA's library, which only a compiled kernel can call.
liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.rsqrt(x)
import liger_kernels
import test_liger

torch.manual_seed(0)
for rows, columns in ((5, 64), (3, 1000)):
    x, y, w = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    for name, inputs in (("rms_norm", (x, w, 1e-6)), ("swiglu", (x, y)), ("softmax", (x,))):
        out = torch.full_like(x, torch.nan)
        getattr(liger_kernels, name)(*inputs, out=out)
        named = {"eps": inputs[2]} if len(inputs) == 3 else {}
        expected = getattr(test_liger, name).function(*inputs[:2], **named)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
print("right")
"""


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options], cwd=EXAMPLE, env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_test_file_is_short_and_collected() -> None:
    assert len((EXAMPLE / "test_liger.py").read_text().splitlines()) <= 40
    done = run("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--klineage-platform=cpu", ".")
    ids = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert len(ids) == 18, done.stdout
    assert {name.partition("[")[0].removeprefix("test_").removesuffix("_compiled") for name in ids} == KERNELS


@needs_liger
@pytest.mark.parametrize("platform", ["sm90", pytest.param("sm120", marks=pytest.mark.nightly)])
def test_the_librarys_kernels_are_built(platform: str, tmp_path: Path) -> None:
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "4096x4096 and not compiled", ".",
        f"--klineage-platform={platform}", "--klineage-stage=compile", f"--klineage-results={tmp_path}",
        f"--klineage-cache-dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (path,) = list_runs(tmp_path)
    verdicts = [record.verdict for record in read_run(path).records]
    assert {verdict.case.operator for verdict in verdicts} == KERNELS
    for verdict in verdicts:
        assert verdict.build is not None
        assert len(verdict.build.kernels) == 3


@needs_liger
@pytest.mark.skipif(not package_folders("numpy"), reason="Triton's interpreter needs NumPy")
def test_the_definitions_are_what_the_library_computes() -> None:
    pytest.importorskip("torch")
    done = run("-W", "ignore", "-c", INTERPRETED, TRITON_INTERPRET="1")
    assert done.stdout == "right\n", done.stderr
