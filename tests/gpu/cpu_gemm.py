"""GEMMs for a CPU, a right one and two wrong ones: what the tests of the suites' evaluators have judged."""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelSource, SourceFile, Surface
from pytest_klineage.surfaces.cpp import CppBackend

CASE = make_case("gemm", (16, 24, 32), "fp32", "torch")
KERNELS = r"""
#include "klineage.h"
static int gemm(const klineage_call *call, float factor) {
    const float *a = (const float *)call->inputs[0].data, *b = (const float *)call->inputs[1].data;
    float *c = (float *)call->outputs[0].data;
    const long m = call->inputs[0].shape[0], k = call->inputs[0].shape[1], n = call->inputs[1].shape[1];
    for (long i = 0; i < m; ++i)
        for (long j = 0; j < n; ++j) {
            float sum = 0;
            for (long l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
            c[i * n + j] = factor * sum;
        }
    return 0;
}
extern "C" int right(const klineage_call *call) { return gemm(call, 1.0f); }
extern "C" int wrong(const klineage_call *call) { return gemm(call, 1.1f); }
extern "C" int infinite(const klineage_call *call) { return gemm(call, 1e38f); }
"""


def built(cache: Path) -> Path:
    """The library with all of them."""
    source = KernelSource(surface=Surface.CPP, files=(SourceFile(name="gemm.cpp", text=KERNELS),), entry="right")
    return CppBackend().build(source, cache, platform="cpu", timeout_s=60).artifact
