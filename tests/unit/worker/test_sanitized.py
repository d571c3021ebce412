"""The process that a sanitizer watches, with a stand-in for CUDA's driver whose device memory is host memory.

What it runs is a C++ kernel: the native ABI is the same. Whether the real driver agrees is for tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_klineage.operators import make_case, operator
from pytest_klineage.records import Code, KernelCase, KernelSource, SourceFile, Surface
from pytest_klineage.records.messages import Job, KernelLoaded, LoadFailed
from pytest_klineage.surfaces import SurfaceFailure, surface_backend
from pytest_klineage.worker.sanitized import Apart, host_inputs

DRIVER = """
import ctypes, enum
class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_LAUNCH_FAILED = 719
class CUstream_flags(enum.IntEnum):
    CU_STREAM_NON_BLOCKING = 1
kept, waits = [], []
FAIL_AT = {fail_at}
def cuInit(flags): return (CUresult.CUDA_SUCCESS,)
def cuDeviceGet(number): return (CUresult.CUDA_SUCCESS, number)
def cuDevicePrimaryCtxRetain(device): return (CUresult.CUDA_SUCCESS, "context")
def cuDevicePrimaryCtxReset(device): return (CUresult.CUDA_SUCCESS,)
def cuCtxSetCurrent(context): return (CUresult.CUDA_SUCCESS,)
def cuStreamCreate(flags): return (CUresult.CUDA_SUCCESS, 4711)
def cuMemAlloc(num_bytes):
    kept.append(ctypes.create_string_buffer(num_bytes))
    return (CUresult.CUDA_SUCCESS, ctypes.addressof(kept[-1]))
def cuMemcpyHtoD(target, source, num_bytes):
    ctypes.memmove(target, source, num_bytes)
    return (CUresult.CUDA_SUCCESS,)
def cuCtxSynchronize():
    waits.append(None)
    return (CUresult.CUDA_ERROR_LAUNCH_FAILED if len(waits) == FAIL_AT else CUresult.CUDA_SUCCESS,)
"""
KERNEL = """
#include "klineage.h"
#include <stdio.h>
#include <stdint.h>
static int calls = 0;
extern "C" int run(const klineage_call *call) {
    ++calls;
    const float *a = (const float *)call->inputs[0].data;
    float *c = (float *)call->outputs[0].data;
    KLINEAGE_REQUIRE(call, (intptr_t)call->stream == 4711, "another stream");
    float sum = 0.0f;
    for (int64_t i = 0; i < call->inputs[0].shape[0] * call->inputs[0].shape[1]; ++i) sum += a[i] * a[i];
    KLINEAGE_REQUIRE(call, sum > 1.0f, "a is empty");
    for (int64_t i = 0; i < call->outputs[0].shape[0] * call->outputs[0].shape[1]; ++i) c[i] = sum;
    BODY
    return 0;
}
"""
CASE = make_case("gemm", (16, 16, 16), "fp32", "torch")
Serve = Callable[..., tuple[int, KernelLoaded | LoadFailed]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Build a kernel, serve a job with it in a process of its own, and read status and answer."""

    def run(body: str = "", *, fail_at: int = 0, case: KernelCase = CASE, sandbox: bool = False) -> tuple[int, object]:
        package = tmp_path / "stand_in" / "cuda" / "bindings"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").write_text("")
        (package / "driver.py").write_text(DRIVER.replace("{fail_at}", str(fail_at)))
        source = KernelSource(
            surface=Surface.CPP, files=(SourceFile("kernel.cpp", KERNEL.replace("BODY", body)),), entry="run"
        )
        built = surface_backend("cpp").build(source, tmp_path / "cache", platform="cpu", timeout_s=60)
        work = tmp_path / "work"
        work.mkdir()
        job = Job(
            surface="cpp", artifact=str(built.artifact), entry="run", case=case, workdir=str(work), sandbox=sandbox
        )
        (work / "job.json").write_bytes(msgspec.json.encode(job))
        paths = [str(tmp_path / "stand_in"), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-m", "pytest_klineage.worker.sanitized", str(work / "job.json")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}, timeout=120, check=False,
            capture_output=True,
        )  # fmt: skip
        assert (work / "answer.json").exists(), done.stderr.decode()
        return done.returncode, msgspec.json.decode((work / "answer.json").read_bytes(), type=KernelLoaded | LoadFailed)

    return run


def test_a_kernel_that_ends_twice_is_done(serve: Serve) -> None:
    assert serve() == (0, KernelLoaded())


def test_it_is_called_twice(serve: Serve) -> None:
    status, answer = serve('KLINEAGE_REQUIRE(call, calls < 2, "a second call");')
    assert status == 1
    assert answer == LoadFailed(code=Code.RETURNED_ERROR, message="the kernel returned 1: a second call")


def test_it_is_not_called_a_third_time(serve: Serve) -> None:
    status, _answer = serve('KLINEAGE_REQUIRE(call, calls < 3, "a third call");')
    assert status == 0


def test_an_error_of_the_device_is_reported(serve: Serve) -> None:
    status, answer = serve(fail_at=2)
    assert status == 1
    assert isinstance(answer, LoadFailed)
    assert answer.code is Code.CUDA_ERROR
    assert "CUDA_ERROR_LAUNCH_FAILED" in answer.message


def test_a_contained_kernel_writes_to_its_directory_only(serve: Serve, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    status, answer = serve(f'FILE *file = fopen("{there}", "w"); if (file) fclose(file);', sandbox=True)
    assert status == 0
    assert isinstance(answer, KernelLoaded)
    assert "capabilities" in answer.containment
    if any(name.startswith("landlock") for name in answer.containment):
        assert not there.exists()


def test_inputs_lie_in_memory_as_the_signature_says() -> None:
    case = make_case("conv2d", (2, 3, 5, 6, 4, 3, 1, 1), "fp16", "torch", layout="nhwc")
    chosen = operator("conv2d")
    signature = chosen.signature(case)
    made = chosen.make_inputs(case, torch.Generator().manual_seed(1), chosen.input_distributions[0])
    for spec, tensor in zip(signature.inputs, host_inputs(case, signature), strict=True):
        assert tensor.stride() == spec.strides
        assert tensor.untyped_storage().nbytes() == spec.num_elements * 2
        assert torch.equal(tensor, made[spec.name])


def test_tensors_that_lie_apart_are_not_one_tensor() -> None:
    with pytest.raises(SurfaceFailure, match="native"):
        _ = Apart(0).bytes
