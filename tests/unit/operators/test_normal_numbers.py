"""Normal numbers of large tensors, which are drawn in chunks side by side."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage.operators.distributions import CHUNK, normal
from pytest_klineage.operators.tolerance import levels, rounding_perturbed


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return normal(shape, torch.Generator().manual_seed(seed))


def test_they_do_not_depend_on_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = drawn((3, CHUNK))
        torch.set_num_threads(4)
        together = drawn((3, CHUNK))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)
    assert not torch.equal(alone, drawn((3, CHUNK), seed=1))


def test_chunks_are_independent_and_normal() -> None:
    values = drawn((2 * CHUNK + 7,))
    first, second = values[:CHUNK], values[CHUNK : 2 * CHUNK]
    assert abs(float((first * second).mean())) < 0.02
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01
    assert not bool((values[-7:] == 0).any())


def test_the_generator_goes_on_after_them() -> None:
    random = torch.Generator().manual_seed(0)
    assert not torch.equal(normal((2, CHUNK), random), normal((2, CHUNK), random))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_nudge_is_one_rounding_error(dtype: torch.dtype) -> None:
    tensor = drawn((4096,)).to(dtype)
    moved = rounding_perturbed(tensor, torch.Generator().manual_seed(1))
    relative = ((moved - tensor.double()) / tensor.double()).std() / (torch.finfo(dtype).eps / 2)
    assert moved.dtype is torch.float64
    # In float64 the moved number is itself rounded, which adds some.
    assert 0.9 < float(relative) < 1.3


def test_levels_count_what_is_above() -> None:
    errors = torch.tensor([0.5, 1.5, 3.0, 5.0, 20.0], dtype=torch.float64)
    assert levels(errors, 20.0) == [4, 2, 1]
    assert levels(errors, 0.5) == []
