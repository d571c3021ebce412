"""The TileLang experts on a GPU, at shapes of a few tiles: right there, and refused outside of their domains.

pytest tests/gpu/test_tilelang_experts.py -m gpu --platform sm90 -x      # before anything that is timed

Every shape is a build of its own in the worker: 5 to 20 seconds each. The shapes have tails, and more tiles than blocks
where blocks stay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_experts import COMPILER_LIMITS, Neighbours, assert_right, kernel, need_compiler

from pytest_klineage.records import Code, Surface, Verdict

pytestmark = pytest.mark.gpu

NHWC = (("layout", "nhwc"),)
SMALL = (
    Neighbours("topk", "fp32", ((8, 4096, 512), (3, 1003, 100), (2, 7, 7))),
    Neighbours("topk", "bf16", ((8, 4096, 512), (2, 16384, 1024))),
    Neighbours("conv2d", "fp16", ((2, 64, 56, 56, 128, 3, 1, 1), (3, 64, 9, 7, 72, 3, 2, 1)), NHWC),
    Neighbours("conv2d", "fp16", ((2, 64, 56, 56, 128, 3, 1, 1), (3, 64, 9, 7, 72, 3, 2, 1))),
    Neighbours("conv2d", "bf16", ((2, 128, 14, 14, 64, 1, 1, 0), (1, 64, 12, 11, 136, 5, 1, 2))),
    Neighbours("fmha", "fp16", ((1, 2, 512, 128), (2, 70, 200, 128))),
    Neighbours(
        "fmha", "bf16", ((1, 4, 512, 64), (4, 40, 130, 64)), (("causal", True), ("group", 2), ("layout", "bshd"))
    ),
    Neighbours("gdn", "bf16", ((2, 6, 128, 64, 512), (1, 3, 128, 64, 64), (2, 4, 128, 64, 200))),
    Neighbours("gdn", "bf16", ((2, 4, 64, 64, 300),), (("initial_state", True),)),
    Neighbours("gemm", "fp16", ((512, 768, 320), (200, 136, 72))),
)
REFUSED = (
    Neighbours("topk", "fp32", ((1, 16385, 8),)),
    Neighbours("conv2d", "fp16", ((1, 32, 8, 8, 64, 3, 1, 1),)),
    Neighbours("fmha", "fp16", ((1, 1, 64, 96),)),
    Neighbours("gdn", "bf16", ((1, 1, 32, 64, 64),)),
)


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=f"{item.name}-{item.dtype}") for item in SMALL])
def test_an_expert_is_right_at_small_shapes(
    neighbours: Neighbours, platform: str, judge: Callable[..., Verdict]
) -> None:
    need_compiler(Surface.TILELANG)
    source = kernel(neighbours.operator, Surface.TILELANG, "expert", platform)
    assert_right(judge(neighbours.case(), source, **COMPILER_LIMITS), neighbours)


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=f"{item.name}-{item.dtype}") for item in REFUSED])
def test_what_an_expert_does_not_support_it_refuses(
    neighbours: Neighbours, platform: str, judge: Callable[..., Verdict]
) -> None:
    need_compiler(Surface.TILELANG)
    source = kernel(neighbours.operator, Surface.TILELANG, "expert", platform)
    verdict = judge(neighbours.case(), source, **COMPILER_LIMITS)
    assert verdict.code is Code.EXCEPTION, [(reason.code.value, reason.message) for reason in verdict.reasons]
    assert "ValueError" in verdict.reasons[0].message + verdict.log
