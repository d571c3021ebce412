"""The stand-in for `torch.arange` gives what the framework gives, and refuses fractions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_klineage.worker.sandbox.whole_numbers import stand_in


class Refused(Exception):
    pass


def refuse() -> None:
    raise Refused


def ours(*arguments: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return stand_in(refuse)(*arguments, out=torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "arguments", [(0, 7), (3, 20, 4), (10, -5, -3), (5, 5), (0, 7.5), (2.0, 9.0, 2.0), (0, -6.5, -2), (-4, 4)]
)
def test_it_counts_as_the_framework_does(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    found, expected = ours(*arguments, dtype=dtype), torch.arange(*arguments, dtype=dtype)
    assert found.dtype is expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("arguments", [(0, 1, 0.1), (0.5, 4), (0, 10, 2.5), (-0.25, 3, 1)])
def test_what_has_fractions_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Refused):
        ours(*arguments)


@pytest.mark.parametrize("arguments", [(0, 5, 0), (5, 0), (0, 5, -1), (0, float("inf"))])
def test_what_the_framework_objects_to_is_an_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError):
        torch.arange(*arguments)
    with pytest.raises(RuntimeError):
        ours(*arguments)


def test_a_tensor_of_the_callers_is_written_in_place() -> None:
    columns = torch.zeros(4, 2, dtype=torch.int64)
    stand_in(refuse)(0, 4, out=columns[:, 1])
    assert columns.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
