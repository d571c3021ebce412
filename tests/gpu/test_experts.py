"""Naive and expert kernels of experts/*/sm90-cuda on a GPU: right at neighbouring shapes, refused outside of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_klineage.library.experts import Expert, find_experts
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, Verdict

pytestmark = pytest.mark.gpu

EXPERTS = {item.operator: item for item in find_experts(Path(__file__).parents[2] / "experts", "sm90")
           if item.surface == "cuda"}  # fmt: skip
Shapes = tuple[tuple[int, ...], ...]


class Neighbours(NamedTuple):
    """Shapes of one operator and type, the first of which is timed."""

    operator: str
    dtype: str
    shapes: Shapes
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.operator, *(str(value) for _name, value in self.options)])

    def case(self) -> KernelCase:
        """All shapes in one case that asks for no speed."""
        first, *others = self.shapes
        return make_case(
            self.operator, first, self.dtype, "torch", at_least=1e-4, also_shapes=others, **dict(self.options)
        )


CONVOLVED = tuple(
    (n, 64, h, w, 128, 3, 1, 1)
    for n, h, w in ((2, 56, 56), (1, 7, 9), (3, 57, 31), (40, 1, 8), (4, 7, 8), (2, 14, 88), (1, 3, 250))
)
"""Whole planes in a tile and tiles across images, lines of one pixel, what takes rectangles, and wide images."""
SUPPORTED = (
    Neighbours("gemm", "bf16", ((512, 768, 320), (256, 256, 256), (1024, 256, 2048))),
    Neighbours("conv2d", "fp16", CONVOLVED),
    Neighbours("conv2d", "fp16", CONVOLVED, (("layout", "nhwc"),)),
    Neighbours("fmha", "fp16", ((1, 2, 512, 128), (2, 3, 264, 128), (1, 1, 8, 128))),
    Neighbours("fmha", "fp16", ((1, 2, 512, 128), (2, 3, 264, 128)), (("layout", "bshd"),)),
    Neighbours("topk", "fp32", ((8, 4096, 512), (1, 7, 7), (3, 1000, 1), (2, 16384, 1024))),
    Neighbours("gdn", "bf16", ((2, 6, 128, 64, 512), (1, 3, 128, 64, 64), (2, 4, 128, 64, 200))),
    Neighbours("gdn_cumsum", "fp32", ((48, 64, 512), (4, 64, 10), (20, 64, 200))),
    Neighbours("gdn_kkt_solve", "bf16", ((2, 6, 128, 64, 512), (1, 4, 128, 64, 64), (2, 2, 128, 64, 200))),
    Neighbours("gdn_fused_fwd", "bf16", ((2, 6, 128, 64, 512), (1, 3, 128, 64, 64), (2, 4, 128, 64, 200))),
)  # fmt: skip
REFUSED = (
    Neighbours("gemm", "bf16", ((257, 256, 256),)),
    Neighbours("conv2d", "fp16", ((1, 32, 8, 8, 128, 3, 1, 1),)),
    Neighbours("fmha", "fp16", ((1, 1, 64, 128),), (("causal", True),)),
    Neighbours("topk", "fp32", ((1, 2048, 1025),)),
    Neighbours("gdn_cumsum", "fp32", ((4, 32, 64),)),
    Neighbours("gdn_kkt_solve", "bf16", ((1, 1, 64, 64, 64),)),
    Neighbours("gdn_fused_fwd", "bf16", ((1, 1, 128, 32, 64),)),
)
"""What the experts' contracts leave out: a message, never a wrong answer."""


def folder(operator: str, variant: str) -> Expert:
    """The operator's folder; skips where it has no such kernel."""
    if operator not in EXPERTS or variant not in EXPERTS[operator].variants:
        pytest.skip(f"experts/{operator}/sm90-cuda has no {variant!r} kernel")
    return EXPERTS[operator]


@pytest.mark.parametrize("variant", ["naive", "expert"])
@pytest.mark.parametrize("neighbours", [pytest.param(item, id=item.name) for item in SUPPORTED])
def test_a_kernel_is_right_at_neighbouring_shapes(
    neighbours: Neighbours, variant: str, judge: Callable[..., Verdict]
) -> None:
    verdict = judge(neighbours.case(), folder(neighbours.operator, variant).source(variant))
    assert verdict.scored, [(reason.code.value, reason.message) for reason in verdict.reasons]
    tried = {tuple(check.shape.values()) for check in verdict.checks if check.shape}
    assert tried == set(neighbours.shapes[1:])


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=item.name) for item in REFUSED])
def test_what_an_expert_does_not_support_it_refuses(neighbours: Neighbours, judge: Callable[..., Verdict]) -> None:
    verdict = judge(neighbours.case(), folder(neighbours.operator, "expert").source("expert"))
    assert verdict.code is Code.RETURNED_ERROR, [(reason.code.value, reason.message) for reason in verdict.reasons]
    assert len(verdict.reasons[0].message) > len("the kernel returned 1: ")
