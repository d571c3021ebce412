"""Naive and expert kernels of experts/*/sm90-* on a GPU: right at neighbouring shapes, CUDA's refused outside of them.

Triton and TileLang compile what their files do not declare in the worker, when it is called: without a network, in
folders of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from device import need_module

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, KernelSource, Surface, Verdict
from pytest_klineage.surfaces.toolkit import find_toolkit

pytestmark = pytest.mark.gpu

EXPERTS = {(item.operator, item.surface): item for item in find_experts(Path(__file__).parents[2] / "experts", "sm90")}
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
LAYERS = (
    (2, 64, 28, 28, 128, 3, 2, 1), (1, 64, 56, 56, 64, 3, 1, 1), (2, 128, 7, 7, 520, 3, 1, 1),
    (3, 24, 9, 11, 40, 3, 1, 1), (2, 72, 13, 17, 136, 3, 2, 1), (2, 64, 14, 14, 256, 1, 1, 0),
    (40, 64, 28, 28, 256, 1, 1, 0), (2, 64, 12, 10, 72, 1, 2, 0), (3, 1024, 14, 14, 256, 1, 1, 0),
    (2, 64, 8, 8, 128, 5, 1, 2), (1, 8, 30, 30, 64, 7, 2, 3), (1, 64, 3, 250, 64, 3, 1, 2),
    (1, 8, 5, 5, 8, 1, 1, 0), (9, 512, 7, 7, 512, 3, 1, 1),
    (2, 128, 28, 28, 192, 1, 1, 0), (2, 64, 16, 16, 64, 5, 1, 0), (2, 128, 28, 28, 128, 3, 1, 1),
)  # fmt: skip
"""Layers of residual networks, small ones, those that fill no tile, and images whose planes fill no 64 pixels."""
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
WIDER = (
    Neighbours(
        "fmha", "bf16", ((1, 2, 512, 128), (3, 5, 129, 128), (2, 3, 1003, 128)), (("causal", True), ("layout", "bshd"))
    ),
    Neighbours("fmha", "fp16", ((1, 4, 512, 64), (2, 4, 1, 64), (2, 68, 1157, 64)), (("group", 4), ("layout", "bshd"))),
    Neighbours("fmha", "bf16", ((1, 4, 512, 64), (1, 2, 191, 64), (4, 40, 700, 64)), (("causal", True), ("group", 2))),
    Neighbours("fmha", "fp16", ((1, 2, 320, 256), (2, 2, 65, 256), (1, 150, 257, 256)), (("causal", True),)),
    Neighbours(
        "fmha",
        "bf16",
        ((1, 4, 512, 128), (2, 8, 1003, 128), (4, 40, 700, 128)),
        (("causal", True), ("window", 128), ("group", 4)),
    ),
)
"""What the experts' contracts allow beyond the naive kernels': tails, types, masks, and several tiles for each CTA."""
EXPERT_ONLY = (
    Neighbours("conv2d", "fp16", LAYERS),
    Neighbours("conv2d", "fp16", LAYERS, (("layout", "nhwc"),)),
    Neighbours("conv2d", "bf16", LAYERS),
    Neighbours("conv2d", "bf16", LAYERS, (("layout", "nhwc"),)),
    Neighbours("topk", "fp32", ((8, 4096, 512), (2, 262144, 2048), (3, 65537, 1), (5, 8191, 8191 // 4))),
    Neighbours("topk", "fp16", ((8, 4096, 512), (2, 131072, 64), (3, 33, 33))),
    Neighbours("topk", "bf16", ((8, 4096, 512), (2, 262144, 2048), (7, 16387, 100))),
    Neighbours("topk", "fp32", ((8, 4096, 512), (400, 20011, 500), (140, 20011, 1024), (70, 40001, 2048))),
    Neighbours("topk", "fp16", ((8, 4096, 512), (34, 131079, 64))),
    Neighbours("topk", "bf16", ((8, 4096, 512), (140, 65543, 2047))),
    Neighbours("gdn", "bf16", ((2, 6, 128, 64, 512), (2, 6, 128, 64, 17000), (4, 4, 64, 64, 200))),
    Neighbours("gdn", "bf16", ((2, 6, 128, 64, 9000), (4, 8, 64, 64, 777)), (("initial_state", True),)),
)
"""What a naive kernel does not take: rows beyond 16,384 columns, k beyond 1,024, 16-bit types; heads of 64; other
layers than 64 -> 128 channels; what it takes slowly: sequences of several segments; every plan that streams rows."""
REFUSED = (
    Neighbours("gemm", "bf16", ((256, 257, 256),)),
    Neighbours("conv2d", "fp16", ((1, 3, 8, 8, 128, 3, 1, 1),)),
    Neighbours("conv2d", "fp32", ((1, 64, 8, 8, 128, 3, 1, 1),)),
    Neighbours("fmha", "fp16", ((1, 1, 64, 96),)),
    Neighbours("topk", "fp32", ((1, 4096, 2049),)),
    Neighbours("topk", "fp16", ((1, 262145, 8),)),
    Neighbours("gdn", "bf16", ((1, 1, 32, 64, 64),)),
    Neighbours("gdn_cumsum", "fp32", ((4, 32, 64),)),
    Neighbours("gdn_kkt_solve", "bf16", ((1, 1, 64, 64, 64),)),
    Neighbours("gdn_fused_fwd", "bf16", ((1, 1, 128, 32, 64),)),
)
"""What the experts' contracts leave out: a message, never a wrong answer."""


COMPILED_WHEN_CALLED = Neighbours("gemm", "bf16", ((512, 768, 320), (131, 70, 65)))
"""Rows that TMA takes, and rows that it does not; TileLang needs seconds for each, in every new process."""
COMPILER_LIMITS = {"load_timeout_s": 60.0, "run_timeout_s": 60.0}
"""Importing TileLang takes seconds; the first call includes its compiler."""


def kernel(operator: str, surface: Surface, variant: str, platform: str) -> KernelSource:
    """One kernel of the experts; skips without one for the platform."""
    expert = EXPERTS.get((operator, surface))
    if expert is None or variant not in expert.variants:
        pytest.skip(f"experts/{operator}/sm90-{surface.value} has no {variant!r} kernel")
    platforms = expert.platforms_of(expert.variants[variant])
    if platform not in platforms:
        pytest.skip(f"experts/{operator}/sm90-{surface.value}: {variant!r} is for {', '.join(platforms)} only")
    return expert.source(variant)


def assert_right(verdict: Verdict, neighbours: Neighbours) -> None:
    """The kernel was timed, and every neighbouring shape was tried."""
    assert verdict.scored, [(reason.code.value, reason.message) for reason in verdict.reasons] + [verdict.log]
    tried = {tuple(check.shape.values()) for check in verdict.checks if check.shape}
    assert tried == set(neighbours.shapes[1:])


def need_compiler(surface: Surface) -> None:
    """Skips where the language, or the compiler that it calls, is not installed."""
    need_module(surface.value)
    if surface is Surface.TILELANG:
        try:
            find_toolkit()
        except MissingDependency as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("variant", ["naive", "expert"])
@pytest.mark.parametrize("neighbours", [pytest.param(item, id=item.name) for item in SUPPORTED])
def test_a_kernel_is_right_at_neighbouring_shapes(
    neighbours: Neighbours, variant: str, platform: str, judge: Callable[..., Verdict]
) -> None:
    source = kernel(neighbours.operator, Surface.CUDA, variant, platform)
    assert_right(judge(neighbours.case(), source), neighbours)


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=f"{item.name}-{item.dtype}") for item in WIDER])
def test_an_expert_is_right_in_its_whole_domain(
    neighbours: Neighbours, platform: str, judge: Callable[..., Verdict]
) -> None:
    source = kernel(neighbours.operator, Surface.CUDA, "expert", platform)
    assert_right(judge(neighbours.case(), source), neighbours)


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=f"{item.name}-{item.dtype}") for item in EXPERT_ONLY])
def test_an_expert_is_right_beyond_the_naive_kernel(
    neighbours: Neighbours, platform: str, judge: Callable[..., Verdict]
) -> None:
    assert_right(judge(neighbours.case(), kernel(neighbours.operator, Surface.CUDA, "expert", platform)), neighbours)


@pytest.mark.parametrize("variant", ["naive", "expert"])
@pytest.mark.parametrize("surface", [Surface.TRITON, Surface.TILELANG], ids=lambda surface: surface.value)
def test_a_kernel_that_is_compiled_when_it_is_called_is_right(
    surface: Surface, variant: str, platform: str, judge: Callable[..., Verdict]
) -> None:
    need_compiler(surface)
    source = kernel(COMPILED_WHEN_CALLED.operator, surface, variant, platform)
    assert_right(judge(COMPILED_WHEN_CALLED.case(), source, **COMPILER_LIMITS), COMPILED_WHEN_CALLED)


@pytest.mark.parametrize("neighbours", [pytest.param(item, id=f"{item.name}-{item.dtype}") for item in REFUSED])
def test_what_an_expert_does_not_support_it_refuses(
    neighbours: Neighbours, platform: str, judge: Callable[..., Verdict]
) -> None:
    verdict = judge(neighbours.case(), kernel(neighbours.operator, Surface.CUDA, "expert", platform))
    assert verdict.code is Code.RETURNED_ERROR, [(reason.code.value, reason.message) for reason in verdict.reasons]
    assert len(verdict.reasons[0].message) > len("the kernel returned 1: ")
