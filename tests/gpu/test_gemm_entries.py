"""The entries of the GEMM's core on a GPU: right with tails, long sums and several tiles a CTA, others refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_klineage.lab.library.experts import read_expert
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, KernelSource, Verdict

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PRODUCTS = "suites/experts/products.py"
GROUPED = "suites/flaggems/operators.py:grouped_mm"


class Entry(NamedTuple):
    """A variant of the GEMM's folder, its operator, and shapes of which the first is timed."""

    variant: str
    operator: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.dtype}"

    def case(self) -> KernelCase:
        """All shapes in one case that asks for no speed."""
        first, *others = self.shapes
        return make_case(str(ROOT / self.operator), first, self.dtype, "torch", at_least=1e-4, also_shapes=others)

    def source(self, platform: str) -> KernelSource:
        """The kernel; skips where it is for another platform."""
        expert = read_expert(ROOT / "experts" / "gemm" / "sm90-cuda" / "expert.toml")
        if platform not in expert.platforms_of(expert.variants[self.variant]):
            pytest.skip(f"the GEMM's entry {self.variant!r} is for {expert.platform} only")
        return expert.source(self.variant)


SHAPES = ((512, 320, 768), (70, 80, 136), (1, 64, 8), (300, 264, 520), (4096, 192, 4096))
"""M, K and N. The last one has more tiles than clusters are resident, so that results are stored late."""
PLANNED = (*SHAPES, (64, 4096, 4096), (1000, 1000, 1024))
"""The first of the two more has a K that is split, the second rows that are misaligned."""
EIGHT_BITS = ((512, 320, 768), (70, 80, 136), (1, 64, 8), (4096, 384, 4096), (512, 7168, 2112), (64, 16256, 264))
"""The last two have sums that the instruction alone would not keep; the last one's stages are odd in number."""
HALVES = ("bf16", "fp16")
RIGHT = (
    Entry("fp8", f"{PRODUCTS}:scaled_mm", "bf16", EIGHT_BITS),
    *(Entry("linear", f"{PRODUCTS}:linear", dtype, PLANNED) for dtype in HALVES),
    Entry("gated_linear", "suites/skill_effect/held_out.py:gated_linear", "bf16", SHAPES),
    *(
        Entry("grouped", GROUPED, dtype, ((512, 320, 4, 768), (70, 72, 3, 136), (5, 64, 4, 8), (4096, 192, 8, 4096)))
        for dtype in HALVES
    ),
)
REFUSED = (
    Entry("fp8", f"{PRODUCTS}:scaled_mm", "bf16", ((64, 72, 64),)),
    Entry("linear", f"{PRODUCTS}:linear", "bf16", ((64, 68, 64),)),
    Entry("gated_linear", "suites/skill_effect/held_out.py:gated_linear", "bf16", ((64, 64, 60),)),
    Entry("grouped", GROUPED, "bf16", ((64, 64, 2, 60),)),
    Entry("grouped", GROUPED, "fp32", ((64, 64, 2, 64),)),
)
"""Rows that start at no multiple of 16 bytes, and a type that is not built."""


@pytest.mark.parametrize("entry", [pytest.param(one, id=one.name) for one in RIGHT])
def test_an_entry_is_right(entry: Entry, platform: str, judge: Callable[..., Verdict]) -> None:
    verdict = judge(entry.case(), entry.source(platform))
    assert verdict.scored, [(reason.code.value, reason.message) for reason in verdict.reasons] + [verdict.log]
    assert {tuple(check.shape.values()) for check in verdict.checks if check.shape} == set(entry.shapes[1:])


@pytest.mark.parametrize("entry", [pytest.param(one, id=one.name) for one in REFUSED])
def test_what_an_entry_does_not_take_it_refuses(entry: Entry, platform: str, judge: Callable[..., Verdict]) -> None:
    verdict = judge(entry.case(), entry.source(platform))
    assert verdict.code is Code.RETURNED_ERROR, [(reason.code.value, reason.message) for reason in verdict.reasons]
    assert len(verdict.reasons[0].message) > len("the kernel returned 1: ")
