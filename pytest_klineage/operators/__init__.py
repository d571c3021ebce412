"""The operators by name, each a class in a module here, and how a case is made. Importing this imports no torch."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import extensions
from pytest_klineage.operators import resolve
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Operator, named_shape
from pytest_klineage.operators.define import OpenOperator, allclose
from pytest_klineage.records import KernelCase, LibraryPolicy, Option

__all__ = [
    "DEFAULT_DISTRIBUTION",
    "OPERATORS",
    "OpenOperator",
    "Operator",
    "allclose",
    "by_alias",
    "family_of",
    "find_operator",
    "make_case",
    "operator",
    "operator_of",
    "paper_case",
]


def _shipped() -> Iterator[Operator]:
    """One of every operator that a module of this package defines, by the modules' names."""
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        for made in vars(importlib.import_module(found.name)).values():
            own = inspect.isclass(made) and made.__module__ == found.name
            if own and issubclass(made, Operator) and "name" in vars(made):
                yield made()


OPERATORS: dict[str, Operator] = {chosen.name: chosen for chosen in _shipped()}


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
    """A checked case of an operator: an object, a name, or "file.py:name". `shape` is positional in the operator's axis
    order, or a dict by axis name; `also_shapes` are further ones at which the kernel must be right.

    Raises UnknownName for a dtype, axis or option that does not exist, UsageError for sizes and a speedup that cannot
    be.
    """
    chosen, definition = resolve.find_operator(operator, OPERATORS)
    if dtype not in chosen.dtypes:
        raise UnknownName(f"dtype for {chosen.name}", dtype, chosen.dtypes)
    for name, value in options.items():
        if name not in chosen.options:
            raise UnknownName(f"option for {chosen.name}", name, chosen.options)
        chosen.check_option(name, value)
    # Not a bool, and neither NaN nor infinity, which compare with anything.
    if type(at_least) not in (int, float) or not 0 < at_least < float("inf"):
        raise UsageError(f"at_least must be a positive number, got {at_least!r}")
    changed = {name: value for name, value in options.items() if value != chosen.options[name][0]}
    case = KernelCase(
        operator=chosen.name,
        shape=named_shape(chosen, shape),
        dtype=dtype,
        reference=reference,
        options=changed,
        at_least=at_least,
        library=LibraryPolicy(library),
        also_shapes=tuple(named_shape(chosen, other) for other in also_shapes),
        definition=definition,
    )
    for named in (case.shape, *case.also_shapes):
        chosen.validate(case.at_shape(named))
    return case


def paper_case(name: str, tier: str, reference: str = "") -> KernelCase:
    """The published case of an operator: tier "gpu" has the paper's sizes, "cpu" smaller ones.

    Without a reference it is that of published tables: `torch` on a CPU, the operator's `gpu_reference` on a GPU.

    Raises UnknownName for an operator or tier, UsageError for an operator without one.
    """
    chosen = find_operator(name)
    if not chosen.published:
        raise UsageError(f"{name} has no published case: give a shape, or add one to its class as published")
    if tier not in chosen.published:
        raise UnknownName("tier", tier, chosen.published)
    shape, dtype, options = chosen.published[tier]
    usual = "torch" if tier == "cpu" else chosen.gpu_reference
    return make_case(chosen, shape, dtype, reference or usual, **options)


def family_of(name: str) -> str:
    """The family of an operator; empty for one that this process does not know."""
    return getattr(resolve.known(name, OPERATORS), "family", "")


def by_alias(name: str) -> str:
    """Our name of what another project calls `name`; `name` itself where no operator is called that."""
    every = (*OPERATORS.values(), *map(operator, extensions("operators")))
    return next((chosen.name for chosen in every if name in chosen.aliases), name)
