"""The operators by name, and how a case of one is made. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytest_klineage.errors import UnknownName
from pytest_klineage.operators import base, resolve
from pytest_klineage.operators.base import DEFAULT_REGIME, Operator
from pytest_klineage.operators.conv2d import Conv2d
from pytest_klineage.operators.define import OpenOperator, allclose
from pytest_klineage.operators.fmha import Fmha
from pytest_klineage.operators.gdn import Gdn
from pytest_klineage.operators.gdn_cumsum import GdnCumsum
from pytest_klineage.operators.gdn_fused_fwd import GdnFusedFwd
from pytest_klineage.operators.gdn_kkt_solve import GdnKktSolve
from pytest_klineage.operators.gemm import Gemm
from pytest_klineage.operators.shapes import PAPER_SHAPES
from pytest_klineage.operators.topk import TopK
from pytest_klineage.records import KernelCase, LibraryPolicy, Option

__all__ = [
    "DEFAULT_REGIME", "OPERATORS", "PAPER_SHAPES", "OpenOperator", "Operator", "allclose", "find_operator", "make_case",
    "operator", "operator_of", "paper_case",
]  # fmt: skip

OPERATORS: dict[str, Operator] = {
    chosen.name: chosen
    for chosen in (Gemm(), Conv2d(), Fmha(), TopK(), Gdn(), GdnCumsum(), GdnKktSolve(), GdnFusedFwd())
}


def operator(name: str) -> Operator:
    """The operator of this name, shipped or of another package. Raises UnknownName, which lists the valid ones."""
    return resolve.find_operator(name, OPERATORS)[0]


def find_operator(wanted: str | Operator, folder: Path | None = None) -> Operator:
    """The operator that a user means: an object, a name, or "file.py:name" in `folder`. Raises UsageError."""
    return resolve.find_operator(wanted, OPERATORS, folder)[0]


def operator_of(case: KernelCase) -> Operator:
    """The operator of a case, wherever it was defined. Raises UsageError when its definition has changed."""
    return resolve.operator_of(case, OPERATORS)


def make_case(
    operator: str | Operator,
    shape: tuple[int, ...] | dict[str, int],
    dtype: str,
    reference: str,
    *,
    at_least: float = 1.0,
    library: LibraryPolicy = LibraryPolicy.FORBID,
    also_shapes: Iterable[tuple[int, ...] | dict[str, int]] = (),
    **options: Option,
) -> KernelCase:
    """A checked case of an operator: an object, a name, or "file.py:name"; see `base.make_case`."""
    chosen, definition = resolve.find_operator(operator, OPERATORS)
    return base.make_case(
        chosen,
        definition,
        shape,
        dtype,
        reference,
        at_least=at_least,
        library=library,
        also_shapes=also_shapes,
        **options,
    )


def paper_case(name: str, tier: str, reference: str) -> KernelCase:
    """The paper's case of an operator: tier "gpu" has the paper's sizes, "cpu" the small ones. Raises UnknownName."""
    if name not in PAPER_SHAPES:
        raise UnknownName("operator", name, PAPER_SHAPES)
    if tier not in PAPER_SHAPES[name]:
        raise UnknownName("tier", tier, PAPER_SHAPES[name])
    shape, dtype, options = PAPER_SHAPES[name][tier]
    return make_case(name, shape, dtype, reference, **options)
