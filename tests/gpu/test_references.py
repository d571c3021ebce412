"""On a GPU: every reference is right in its own convention, through the real libraries, and says what it charged.

Shapes are small, and of the instances that an ahead-of-time build of FlashInfer for the paper's cases has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytest_klineage.errors import MissingDependency
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase
from pytest_klineage.references import reference
from pytest_klineage.references.choose import DeviceTimer
from pytest_klineage.references.cublas import LIBRARIES, CublasReference
from pytest_klineage.worker.reference_kernel import trial_of

pytestmark = [
    pytest.mark.gpu,
    # Libraries warn about one another; that is not what is tested.
    pytest.mark.filterwarnings("ignore"),
]

SHAPES: dict[str, list[tuple[tuple[int, ...], str, dict[str, Any]]]] = {
    "gemm": [((512, 384, 640), "bf16", {}), ((96, 64, 128), "fp32", {})],
    "conv2d": [((2, 64, 28, 28, 128, 3, 1, 1), "fp16", {"layout": layout}) for layout in ("nchw", "nhwc")],
    "fmha": [
        ((2, 4, 512, 128), "fp16", {"causal": causal, "layout": layout})
        for causal in (False, True)
        for layout in ("bhsd", "bshd")
    ]
    + [
        ((2, 8, 512, 128), "bf16", {"causal": True, "group": 4}),
        ((2, 8, 512, 64), "fp16", {"causal": True, "window": 128}),
    ],
    "topk": [((64, 4096, 512), "fp32", {})],
    "gdn": [((2, 6, 128, 64, 512), "bf16", {}), ((2, 6, 128, 64, 500), "bf16", {})],
    "gdn_cumsum": [((6, 64, 512), "fp32", {})],
    "gdn_kkt_solve": [((2, 6, 128, 64, 512), "bf16", {})],
    "gdn_fused_fwd": [((2, 6, 128, 64, 512), "bf16", {})],
}
MEMBERS = ("torch", "cublas", "cudnn", "flashinfer", "fla", "vendor")
CASES = [
    pytest.param(make_case(name, shape, dtype, ref, **options), id=f"{ref}-{name}-{index}")
    for ref in MEMBERS
    for name in reference(ref).operators()
    for index, (shape, dtype, options) in enumerate(SHAPES[name])
]


@pytest.fixture(scope="module", autouse=True)
def torch_on_the_gpu(platform: str) -> Iterator[None]:
    """These tests use the GPU from pytest's own process, which keeps none of its memory afterwards."""
    if not torch.cuda.is_available():
        pytest.skip("torch cannot use the GPU of this machine")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", CASES)
def test_it_is_right_and_reports_the_counted_time(case: KernelCase, platform: str) -> None:
    if reference(case.reference).limits(case, platform):
        pytest.skip(reference(case.reference).limits(case, platform))
    with torch.cuda.stream(torch.cuda.Stream()):
        trial = trial_of(case, platform)
        try:
            call = reference(case.reference).prepare(case, trial)
        except MissingDependency as missing:
            pytest.skip(str(missing))
        for tensor in trial.outputs.values():
            tensor.zero_()
        returned = call(trial.inputs, trial.outputs)
        torch.cuda.synchronize()
        expected = Expected(OPERATORS[case.operator], case, trial.inputs)
        found = trial.outputs if returned is None else returned
        assert expected.accepts(found), (expected.errors(found), expected.bounds)
    described = reference(case.reference).describe(case)
    charged = float(described[f"variant_ms.{described['variant']}"])
    assert 0.0005 < charged < 10.0
    assert not [key for key in described if key.startswith("variant_error.")], described


def test_a_timed_call_does_not_see_the_host() -> None:
    """Launching takes the host longer than the device takes for one element."""
    x = torch.zeros(1, device="cuda")
    timer = DeviceTimer()
    times = sorted(timer(x.zero_) for _ in range(20))
    assert times[10] < 0.02


def test_cublas_says_which_version_is_loaded() -> None:
    """Its libraries have the major version of the CUDA that torch was built with."""
    versions = CublasReference().versions()
    for library in LIBRARIES:
        assert re.fullmatch(rf"{str(torch.version.cuda).partition('.')[0]}\.\d+\.\d+", versions[library]), versions
