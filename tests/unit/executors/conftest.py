"""Small kernels for the cpu platform, requests for them, and a folder. The gate that judges them is the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.executors.base import plain_settings
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelSource, SourceFile, Surface
from pytest_klineage.records.judging import JudgeRequest

GEMM = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    BEFORE
    for (int64_t i = 0; i < c.shape[0]; ++i)
        for (int64_t j = 0; j < c.shape[1]; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < a.shape[1]; ++k)
                sum += (double)((const float *)a.data)[i * a.stride[0] + k * a.stride[1]]
                     * ((const float *)b.data)[k * b.stride[0] + j * b.stride[1]];
            ((float *)c.data)[i * c.stride[0] + j * c.stride[1]] = (float)sum;
        }
    return 0;
}
"""
QUICK = {
    "time_limit_s": 0.3, "precision": 0.5, "seeds": 1, "busy_limit": 1.0, "flush_bytes": 1 << 20, "run_timeout_s": 2.0,
}  # fmt: skip
CASE = make_case("gemm", (8, 8, 8), "fp32", "torch", at_least=1e-6)


def kernel(before: str = "", label: str = "kernel") -> KernelSource:
    """A right gemm with something before its loops."""
    text = GEMM.replace("BEFORE", before)
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), entry="run", label=label)


@pytest.fixture
def ask() -> Callable[..., JudgeRequest]:
    """A request for a judgement of a kernel on the small case, with quick settings."""

    def build(before: str = "", *, settings: dict[str, Any] | None = None, **fields: Any) -> JudgeRequest:
        chosen = plain_settings(GateSettings(**(QUICK | (settings or {}))))
        base = JudgeRequest(case=CASE, source=kernel(before), platform="cpu", settings=chosen)
        return msgspec.structs.replace(base, **fields)

    return build


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    """An empty folder of requests."""
    return BatchFolder(tmp_path / "batch")
