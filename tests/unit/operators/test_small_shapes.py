"""Small shapes: every operator and tier has one, each case is legal, scorable, and small."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage.operators import OPERATORS, make_case, paper_case
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.records import KernelCase

ENTRIES = [(name, tier) for name, chosen in OPERATORS.items() for tier in chosen.small]
FIXED = {
    "gemm": (), "conv2d": ("C", "F", "K", "stride", "pad"), "fmha": ("D",), "topk": ("S", "K"), "gdn": ("D", "C"),
    "gdn_cumsum": ("HV", "C"), "gdn_kkt_solve": ("D", "C"), "gdn_fused_fwd": ("D", "C"),
}  # fmt: skip
"""Axes that a kernel may fix: the small shape of the GPU tier has the paper's."""


def small_case(name: str, tier: str) -> KernelCase:
    shape, dtype, options = OPERATORS[name].small[tier]
    return make_case(name, shape, dtype, "torch", **options)


def test_each_published_case_has_a_small_one() -> None:
    assert all(set(chosen.small) == set(chosen.published) == {"cpu", "gpu"} for chosen in OPERATORS.values())


@pytest.mark.parametrize(("name", "tier"), ENTRIES)
def test_a_small_case_is_scorable(name: str, tier: str) -> None:
    case = small_case(name, tier)
    assert lint_case(OPERATORS[name], case, torch.Generator().manual_seed(1)) == []


@pytest.mark.parametrize(("name", "tier"), ENTRIES)
def test_a_small_case_is_the_papers_but_small(name: str, tier: str) -> None:
    case, full = small_case(name, tier), paper_case(name, tier, "torch")
    assert (case.dtype, case.options) == (full.dtype, full.options)
    assert 16 * OPERATORS[name].min_bytes(case) <= OPERATORS[name].min_bytes(full)
    if tier == "gpu":
        assert {axis: case.shape[axis] for axis in FIXED[name]} == {axis: full.shape[axis] for axis in FIXED[name]}
