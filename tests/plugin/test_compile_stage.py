"""The compile stage through pytest: kernels are built for a platform, nothing is run, artifacts take the same way back.

On the cpu platform with a C++ compiler; for GPUs where nvcc is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import GPU_PLATFORMS
from pytest_klineage.surfaces.toolkit import find_disassembler, find_toolkit

TEST = """
from pytest_klineage import kernel_case


@kernel_case((64, 64, 64), "fp32", op="gemm"{arguments})
def test_it(kernel_gate):
    kernel_gate("{kernel}"{given})
"""
CUDA = """
#include <cuda_runtime.h>
#include "klineage.h"
__global__ void fill(float *c, int n) { if (threadIdx.x < n) c[threadIdx.x] = 1.0f; }
extern "C" int run(const klineage_call *call) {
    fill<<<1, 32, 0, (cudaStream_t)call->stream>>>((float *)call->outputs[0].data, 32);
    return cudaGetLastError() != cudaSuccess;
}
"""
STAGE = "--klineage-stage=compile"


def nvcc_is_missing() -> str:
    """Why there is no nvcc, or nothing."""
    try:
        find_toolkit()
    except MissingDependency as error:
        return str(error)
    return ""


needs_nvcc = pytest.mark.skipif(bool(nvcc_is_missing()), reason=nvcc_is_missing() or "nvcc is there")


def write(folder: Path, kernel: str, arguments: str = "", given: str = "") -> None:
    (folder / "test_k.py").write_text(TEST.format(kernel=kernel, arguments=arguments, given=given))
    (folder / "fill.cu").write_text(CUDA)


def verdict_of(folder: Path) -> dict[str, object]:
    """The verdict that the last run wrote to out.json."""
    (record,) = json.loads((folder / "out.json").read_text())["records"]
    verdict: dict[str, object] = record["verdict"]
    return verdict


def test_a_right_and_a_wrong_kernel_are_both_built(pytester: pytest.Pytester, kernels: Path) -> None:
    for kernel in ("good.cpp", "wrong.cpp", "crash.cpp"):
        write(kernels, kernel)
        result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=cpu")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["*spill B*instructions*", "*accepted", "built 1 of 1"])


def test_what_cannot_be_built_fails(pytester: pytest.Pytester, kernels: Path) -> None:
    write(kernels, "broken.cpp")
    result = pytester.runpytest_subprocess(STAGE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*build_error.compile*", "*undeclared_name*"])


def test_a_missing_entry_is_found_without_loading(pytester: pytest.Pytester, kernels: Path) -> None:
    write(kernels, "noentry.cpp")
    result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*build_error.entry_missing: the library exports no symbol 'run'*"])


def test_an_artifact_takes_the_place_of_the_compiler(
    pytester: pytest.Pytester, kernels: Path, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(kernels, "good.cpp", arguments=", at_least=1e-6")
    folder = ("--klineage-artifacts=built", "--klineage-json=out.json", "--klineage-platform=cpu")
    pytester.runpytest_subprocess(STAGE, *folder).assert_outcomes(passed=1)
    (artifact,) = kernels.glob("built/*/kernel.so")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    pytester.runpytest_subprocess(*quick, *folder).assert_outcomes(passed=1)
    build = verdict_of(kernels)["build"]
    assert isinstance(build, dict)
    assert build["recipe"] == artifact.parent.name
    assert build["artifact"] == json.loads((artifact.parent / "build.json").read_text())["sha256"]
    artifact.write_bytes(artifact.read_bytes() + b".")
    result = pytester.runpytest_subprocess(*quick, *folder)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*build_error.artifact: the artifact *is refused: kernel.so has the SHA-256*"])


def test_a_stage_must_be_known(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--klineage-stage=link")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'link' is not one of: all, compile*"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (", requires=('wgma',)", "unknown instruction 'wgma'. Did you mean 'wgmma'?"),
        (", requires='wgmma'", "requires= is a list of instructions"),
        (", max_spills=-1", "max_spills= is a number of bytes, 0 or more, got -1"),
        (", max_spills=True", "max_spills= is a number of bytes"),
    ],
)
def test_demands_are_checked_when_tests_are_collected(
    pytester: pytest.Pytester, kernels: Path, arguments: str, said: str
) -> None:
    write(kernels, "good.cpp", arguments=arguments)
    result = pytester.runpytest_subprocess(STAGE, "--collect-only")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert said in result.stdout.str()


def test_a_kernel_for_another_platform_is_skipped(pytester: pytest.Pytester, kernels: Path) -> None:
    write(kernels, "good.cpp", given=", platforms=('sm90', 'sm120')")
    result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=cpu", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped.platform: the kernel was written for sm90, sm120, not for cpu*"])


def test_a_cuda_kernel_is_skipped_on_a_cpu(pytester: pytest.Pytester, kernels: Path) -> None:
    write(kernels, "fill.cu")
    result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=cpu", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped.platform: a cuda kernel does not run on cpu, only on sm80, *sm120*"])


def test_without_nvcc_a_cuda_kernel_is_skipped(
    pytester: pytest.Pytester, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    write(kernels, "fill.cu")
    result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=sm90", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped.missing_dependency*CUDACXX*"])


@needs_nvcc
@pytest.mark.parametrize(
    "platform",
    [pytest.param(name, marks=(pytest.mark.nightly,) * (name not in ("sm90", "sm120"))) for name in GPU_PLATFORMS],
)
def test_a_cuda_kernel_is_built_without_a_device(pytester: pytest.Pytester, kernels: Path, platform: str) -> None:
    write(kernels, "fill.cu", arguments=", max_spills=0")
    options = (STAGE, f"--klineage-platform={platform}", "--klineage-json=out.json")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["gemm-64x64x64-fp32 *fill * 1 *accepted"])
    verdict = verdict_of(kernels)
    assert isinstance(verdict["build"], dict)
    assert verdict["build"]["platform"] == platform
    (kernel,) = verdict["build"]["kernels"]
    assert kernel["name"] == "_Z4fillPfi"
    assert kernel["registers"] > 0


@needs_nvcc
@pytest.mark.skipif(find_disassembler() is None, reason="cuobjdump or nvdisasm is not installed")
def test_an_instruction_that_is_demanded_must_be_there(pytester: pytest.Pytester, kernels: Path) -> None:
    write(kernels, "fill.cu", arguments=", requires=('wgmma',)")
    result = pytester.runpytest_subprocess(STAGE, "--klineage-platform=sm90")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*build_error.missing_instruction: no kernel has wgmma: found fill: none*"])
