"""One gate for all tests of the judge, a tiny case, and kernels made from a right one by one change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface, Verdict, from_json, to_json

GEMM = """
#include "klineage.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const int64_t M = c.shape[0], N = c.shape[1], K = a.shape[1];
    float *ap = (float *)a.data, *bp = (float *)b.data, *cp = (float *)c.data;
    int64_t rows = M;
    BEFORE
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < N; ++j) {
            double sum = 0.0;
            for (int64_t p = 0; p < K; ++p) sum += (double)ap[i * K + p] * bp[p * N + j];
            cp[i * N + j] = (float)sum;
        }
    AFTER
    return 0;
}
"""

FLUSH_BYTES = 1 << 20
"""What is written between two timed calls. All of the caches would leave a slow machine too few pairs."""


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate that stops timing as soon as it may."""
    cache = tmp_path_factory.mktemp("cache")
    settings = GateSettings(
        time_limit_s=0.3, precision=0.3, busy_limit=1.0, spread_limit=1e6, seeds=2, flush_bytes=FLUSH_BYTES,
        cache_dir=cache,
    )  # fmt: skip
    with Gate("cpu", settings) as gate:
        yield gate


@pytest.fixture
def change(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change settings of the shared gate for one test."""

    def change(**fields: Any) -> None:
        monkeypatch.setattr(gate._context, "settings", msgspec.structs.replace(gate.settings, **fields))

    return change


@pytest.fixture
def case() -> Callable[..., KernelCase]:
    """A gemm of 64^3 that asks for next to no speed, because these tests are not about speed."""

    def build(**fields: Any) -> KernelCase:
        return make_case("gemm", (64, 64, 64), "fp32", "torch", **({"at_least": 1e-6} | fields))

    return build


@pytest.fixture
def cpp() -> Callable[..., KernelSource]:
    """A right gemm with something before and after its loops."""

    def build(*, before: str = "", after: str = "", **fields: Any) -> KernelSource:
        text = GEMM.replace("BEFORE", before).replace("AFTER", after)
        given = {"entry": "run", "label": "unit"} | fields
        return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), **given)

    return build


@pytest.fixture
def python() -> Callable[[str], KernelSource]:
    """A kernel in Python from its text."""

    def build(text: str) -> KernelSource:
        return KernelSource(surface=Surface.PYTHON, files=(SourceFile("kernel.py", text),), entry="run", label="unit")

    return build


@pytest.fixture
def judge(gate: Gate, case: Callable[..., KernelCase]) -> Callable[..., Verdict]:
    """Judge a source on the tiny case. Every verdict must survive JSON."""

    def judge(source: KernelSource, **fields: Any) -> Verdict:
        reference_source = fields.pop("reference_source", None)
        verdict = gate.judge(case(**fields), source, reference_source=reference_source)
        assert from_json(to_json(verdict), Verdict) == verdict
        assert verdict.status is verdict.code.status
        return verdict

    return judge
