"""Plain inputs show the shortcuts that normal numbers hide, and leave an honest run alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase

Shortcut = Callable[[torch.Tensor], torch.Tensor]
CASES = {
    "gemm": make_case("gemm", (32, 32, 32), "fp32", "torch"),
    "conv2d": make_case("conv2d", (2, 8, 16, 16, 8, 3, 1, 1), "fp32", "torch"),
    "fmha": make_case("fmha", (1, 2, 32, 16), "fp32", "torch"),
}


def without_small(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < 1e-5, 0, values)


def without_padding(values: torch.Tensor) -> torch.Tensor:
    """Rows that begin with a zero count as zero."""
    return torch.where(values[..., :1] == 0, 0, values)


def known_by_sample(values: torch.Tensor) -> torch.Tensor:
    """A row whose four sampled numbers are its predecessor's counts as that."""
    width, copy = values.shape[-1], values.clone().view(-1, values.shape[-1])
    for row in range(1, len(copy)):
        if torch.equal(copy[row, :: width // 4], copy[row - 1, :: width // 4]):
            copy[row] = copy[row - 1]
    return copy.view_as(values)


def accepts(case: KernelCase, distribution: str, name: str, shortcut: Shortcut) -> bool:
    """Whether the honest run on what a shortcut makes of one input passes for the right answer."""
    operator = operator_of(case)
    inputs = operator.make_inputs(case, torch.Generator().manual_seed(5), distribution)
    answer = operator.baseline_output(case, {**inputs, name: shortcut(inputs[name])})
    return Expected(operator, case, inputs).accepts(answer)


@pytest.mark.parametrize("operator", CASES)
def test_an_honest_run_is_right_on_plain_inputs(operator: str) -> None:
    case = CASES[operator]
    for item in operator_of(case).signature(case).inputs:
        assert accepts(case, "plain", item.name, torch.clone)


@pytest.mark.parametrize(
    ("operator", "name", "shortcut"),
    [
        ("gemm", "a", without_small), ("gemm", "b", without_small), ("gemm", "a", without_padding),
        ("gemm", "a", known_by_sample), ("conv2d", "x", without_small), ("conv2d", "w", without_small),
        ("conv2d", "x", without_padding), ("fmha", "v", without_small), ("fmha", "q", without_padding),
        ("fmha", "q", known_by_sample),
    ],
)  # fmt: skip
def test_a_shortcut_that_normal_numbers_hide_is_wrong(operator: str, name: str, shortcut: Shortcut) -> None:
    case = CASES[operator]
    assert accepts(case, "well_conditioned", name, shortcut)
    assert not accepts(case, "plain", name, shortcut)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_numbers_are_zeros_ones_and_others(dtype: str) -> None:
    case = make_case("gemm", (256, 256, 256), dtype, "torch")
    a = operator_of(case).make_inputs(case, torch.Generator().manual_seed(5), "plain")["a"]
    assert 0.45 < float((a == 0).double().mean()) < 0.55
    assert 0.15 < float((a.abs() == 1).double().mean()) < 0.25
    assert [int((a[row] != a[row - 1]).sum()) for row in (1, 5, 9)] in ([1, 1, 1], [1, 1, 0])
    assert float(a[3].abs().max()) < 0.01
