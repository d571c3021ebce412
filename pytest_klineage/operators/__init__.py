"""The operators by name, and how a case of one is made. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_klineage.errors import UnknownName
from pytest_klineage.operators import base
from pytest_klineage.operators.base import DEFAULT_REGIME, Operator
from pytest_klineage.operators.conv2d import Conv2d
from pytest_klineage.operators.fmha import Fmha
from pytest_klineage.operators.gdn import Gdn
from pytest_klineage.operators.gdn_cumsum import GdnCumsum
from pytest_klineage.operators.gdn_fused_fwd import GdnFusedFwd
from pytest_klineage.operators.gdn_kkt_solve import GdnKktSolve
from pytest_klineage.operators.gemm import Gemm
from pytest_klineage.operators.shapes import PAPER_SHAPES
from pytest_klineage.operators.topk import TopK
from pytest_klineage.records import KernelCase, LibraryPolicy, Option

__all__ = ["DEFAULT_REGIME", "OPERATORS", "PAPER_SHAPES", "Operator", "make_case", "operator", "paper_case"]

OPERATORS: dict[str, Operator] = {
    chosen.name: chosen
    for chosen in (Gemm(), Conv2d(), Fmha(), TopK(), Gdn(), GdnCumsum(), GdnKktSolve(), GdnFusedFwd())
}


def operator(name: str) -> Operator:
    """The operator of this name. Raises UnknownName, which lists the valid ones."""
    if name not in OPERATORS:
        raise UnknownName("operator", name, OPERATORS)
    return OPERATORS[name]


def make_case(
    operator: str,
    shape: tuple[int, ...] | dict[str, int],
    dtype: str,
    reference: str,
    *,
    at_least: float = 1.0,
    library: LibraryPolicy = LibraryPolicy.FORBID,
    also_shapes: Iterable[tuple[int, ...] | dict[str, int]] = (),
    **options: Option,
) -> KernelCase:
    """A checked case of one of OPERATORS; see `base.make_case`."""
    return base.make_case(
        OPERATORS,
        operator,
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
