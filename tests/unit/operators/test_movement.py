"""Which definitions only move bytes or truncate: by what they call, and by what they give."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage import operator
from pytest_klineage.operators import OpenOperator, make_case
from pytest_klineage.records.messages import OpenCase
from pytest_klineage.worker.problems import ProblemSet


@operator("x[M,N] -> y[N,M]", dtypes=("fp32",))
def transposed(x: torch.Tensor) -> torch.Tensor:
    """Rows become columns."""
    return x.t().contiguous()


@operator("x[M,N] -> y[N,M]", dtypes=("fp32",))
def by_a_product(x: torch.Tensor) -> torch.Tensor:
    """The same, written as a product."""
    return torch.einsum("ij,jk->ki", x, torch.eye(x.shape[1], dtype=x.dtype))


@operator("x[M,N] -> y[M,2*N]", dtypes=("fp32",))
def padded(x: torch.Tensor) -> torch.Tensor:
    """Zeros beside every row."""
    return torch.where(torch.arange(2 * x.shape[1]) < x.shape[1], torch.cat((x, x), 1), 0.0)


@operator("x[V,N], rows[M]: int64 < V -> y[M,N]", dtypes=("fp32",))
def looked_up(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers."""
    return x[rows]


@operator("x[M,N] -> y[M,N]: bf16", dtypes=("fp32",))
def converted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in another type."""
    return x.to(torch.bfloat16)


@operator("x[M,N] -> y[N,M]", dtypes=("fp32",))
def truncated(x: torch.Tensor) -> torch.Tensor:
    """Without fractions, which a cast to integers leaves out, too."""
    return x.trunc().t()


@operator("x[M,N] -> y[M,N]: int32", dtypes=("fp32",))
def towards_zero(x: torch.Tensor) -> torch.Tensor:
    """The same, written otherwise."""
    return torch.where(x < 0, x.ceil(), x.floor()).int()


@operator("x[M,N] -> y[M,N]", dtypes=("fp32",))
def rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest number, which no cast does."""
    return x.round()


@operator("x[M,N]: bool -> y[N,M]: bool", dtypes=("fp32",))
def few_values(x: torch.Tensor) -> torch.Tensor:
    """Elements that cannot be distinguished."""
    return x.t().contiguous()


@operator("x[M,N], keep[M]: bool -> y[M,N]", dtypes=("fp32",))
def kept_rows(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Rows that are kept, zeros for the others."""
    return torch.where(keep[:, None], x, 0.0)


@operator("x[M,N], drop[M,N]: bool -> y[M,N]", dtypes=("fp32",))
def blanked(x: torch.Tensor, drop: torch.Tensor) -> torch.Tensor:
    """Zeros wherever a mask says so."""
    return x.masked_fill(drop, 0.0)


@operator("x[M,N] -> y[M]", dtypes=("fp32",))
def largest(x: torch.Tensor) -> torch.Tensor:
    """An input element, but not always the same one."""
    return x.amax(1)


@operator("x[M,N], z[M,N] -> y[M,N]", dtypes=("fp32",))
def larger(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """One of two."""
    return torch.maximum(x, z)


@operator("x[M,N] -> y[M,N+1]", dtypes=("fp32",))
def with_energy(x: torch.Tensor) -> torch.Tensor:
    """All elements, and one that is computed."""
    return torch.cat((x, x.square().sum(1, keepdim=True)), 1)


@operator("x[M,N]: bool, z[M,N]: bool -> y[M,N]: bool", dtypes=("fp32",))
def both(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Computed, of few values."""
    return x & z


@operator("x[M,N]: int32 < 3 -> y[N,M]: bool", dtypes=("fp32",))
def not_zero(x: torch.Tensor) -> torch.Tensor:
    """A cast to booleans, written as a comparison."""
    return x.t() != 0


@operator("x[M,N]: int32 -> y[M,N]: uint8", dtypes=("fp32",))
def low_byte(x: torch.Tensor) -> torch.Tensor:
    """A cast to fewer bits, written as a choice of bits."""
    return x & 255


@operator("x[M,N]: int32 -> y[M,N]: bool, z[M,N]: int32", dtypes=("fp32",))
def cast_and_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast is a part of the work alone."""
    return x != 0, x ^ 1


@operator("x[M,N]: int32 < 3 -> y[M,N]: bool", dtypes=("fp32",))
def above_one(x: torch.Tensor) -> torch.Tensor:
    """No cast, which takes 1 for true."""
    return x > 1


def only_moves(chosen: OpenOperator, shape: tuple[int, ...]) -> bool:
    case = make_case(chosen, shape, "fp32", "torch")
    return ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1)).only_moves


@pytest.mark.parametrize(
    ("chosen", "shape"),
    [(transposed, (24, 16)), (by_a_product, (24, 16)), (padded, (24, 16)), (looked_up, (24, 16, 8)),
     (converted, (24, 16)), (few_values, (24, 16)), (kept_rows, (24, 16)), (blanked, (24, 16)), (truncated, (24, 16)),
     (towards_zero, (24, 16)), (not_zero, (24, 16)), (low_byte, (24, 16))],
)  # fmt: skip
def test_moved_bytes_are_known(chosen: OpenOperator, shape: tuple[int, ...]) -> None:
    assert only_moves(chosen, shape)


@pytest.mark.parametrize("chosen", [largest, larger, with_energy, both, rounded, cast_and_more, above_one])
def test_computed_elements_are_no_moves(chosen: OpenOperator) -> None:
    assert not only_moves(chosen, (24, 16))
