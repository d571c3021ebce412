"""The marker `kernel_case`: what a test may say about its kernel, checked at collection. Nothing is built here."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import KlineageError, UnknownName, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_klineage.records import KernelCase, LibraryPolicy, Option

MARKER = "kernel_case"
MARKER_LINE = (
    'kernel_case(shape, dtype, ref="torch", *, op, at_least=1.0, library="forbid", also=(), max_spills=None, '
    "requires=(), **options): the case that the kernel of this test is judged on; see the kernel_gate fixture."
)
CASE_KEY = pytest.StashKey["KernelCase"]()


def kernel_case(
    shape: Sequence[int] | dict[str, int],
    dtype: str,
    ref: str = "torch",
    *,
    op: str = "",
    at_least: float = 1.0,
    library: str = "forbid",
    also: Sequence[Sequence[int] | dict[str, int]] = (),
    max_spills: int | None = None,
    requires: Sequence[str] = (),
    **options: Option,
) -> pytest.MarkDecorator:
    """Mark a test with the case that its kernel is judged on.

    shape: sizes in the order of the operator's axes, or a dict by axis name.
    dtype: short name of the data type, such as "fp32".
    ref: name of the implementation that the kernel is compared with.
    op: name of the operator, such as "gemm"; a marker without one is refused when the test is collected.
    at_least: speedup that the kernel must reach, up to the gate's margin.
    library: "forbid", "label" or "allow" work done by a library.
    also: further shapes at which the kernel must be right.
    max_spills: bytes of registers per thread that a GPU kernel may spill; None for any number.
    requires: instructions that must be in the machine code, such as ("wgmma", "tma_load"); see docs/reference.
    options: the operator's own, such as causal=True.

    Names are checked when pytest collects the test: a typo costs no build. `pytest-klineage cases` lists them.
    """
    given: dict[str, Any] = {"max_spills": max_spills, "requires": requires, **options}
    return pytest.mark.kernel_case(shape, dtype, ref, op=op, at_least=at_least, library=library, also=also, **given)


def case_of(item: pytest.Item) -> KernelCase | None:
    """The case of a test, or None without a marker; the nearest marker wins. Raises UsageError for a bad one."""
    if CASE_KEY in item.stash:
        return item.stash[CASE_KEY]
    mark = item.get_closest_marker(MARKER)
    if mark is None:
        return None
    case = build_case(mark.args, mark.kwargs)
    item.stash[CASE_KEY] = case
    return case


def build_case(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCase:
    """The case that a marker's arguments describe. Raises UsageError, which names what is valid."""
    import msgspec

    from pytest_klineage.operators import OPERATORS, make_case
    from pytest_klineage.references import REFERENCES

    signature = inspect.signature(kernel_case)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"kernel_case: {error}. Write it as {MARKER_LINE.partition(':')[0]}") from None
    bound.apply_defaults()
    given = bound.arguments
    operator, options = given["op"], given["options"]
    if operator == "":
        raise UsageError(f"kernel_case needs op=, the operator: one of {', '.join(sorted(OPERATORS))}")
    if not isinstance(operator, str) or operator not in OPERATORS:
        raise UnknownName("operator", operator, OPERATORS)
    for name in options:
        if name not in OPERATORS[operator].options:
            own = [parameter for parameter in signature.parameters if parameter != "options"]
            raise UnknownName(f"argument of kernel_case for {operator}", name, (*own, *OPERATORS[operator].options))
    check_reference(given["ref"], operator, REFERENCES)
    case = make_case(
        operator,
        _shape(given["shape"]),
        given["dtype"],
        given["ref"],
        at_least=given["at_least"],
        library=_library(given["library"]),
        also_shapes=_shapes(given["also"]),
        **options,
    )
    return msgspec.structs.replace(
        case, max_spills=_max_spills(given["max_spills"]), requires=_requires(given["requires"])
    )


def check_reference(name: Any, operator: str, references: dict[str, Any]) -> None:
    """Raise UnknownName unless `name` is a reference that implements the operator."""
    if not isinstance(name, str) or name not in references:
        raise UnknownName("reference", name, references)
    if operator not in references[name].operators():
        able = [other for other, reference in references.items() if operator in reference.operators()]
        raise UnknownName(f"reference for {operator}", name, able)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> Any:
    """Check the marker of every test as it is made, marks of single parameters included."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item) and item.get_closest_marker(MARKER) is not None:
            try:
                case_of(item)
            except KlineageError as error:
                raise collector.CollectError(f"{item.nodeid}: {error}") from None
    return made


def _shape(shape: Any) -> tuple[int, ...] | dict[str, int]:
    if isinstance(shape, dict):
        return shape
    if isinstance(shape, list | tuple):
        return tuple(shape)
    raise UsageError(f"a shape is a sequence of sizes or a dict by axis name, got {shape!r}")


def _shapes(shapes: Any) -> tuple[tuple[int, ...] | dict[str, int], ...]:
    if not isinstance(shapes, list | tuple):
        raise UsageError(f"also= is a list of shapes, such as [(1, 7, 33)], got {shapes!r}")
    return tuple(_shape(shape) for shape in shapes)


def _max_spills(given: Any) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    raise UsageError(f"max_spills= is a number of bytes, 0 or more, got {given!r}")


def _requires(names: Any) -> tuple[str, ...]:
    from pytest_klineage.records import INSTRUCTIONS

    if not isinstance(names, list | tuple):
        raise UsageError(f'requires= is a list of instructions, such as ("wgmma",), got {names!r}')
    for name in names:
        if name not in INSTRUCTIONS:
            raise UnknownName("instruction", name, INSTRUCTIONS)
    return tuple(names)


def _library(name: Any) -> LibraryPolicy:
    from pytest_klineage.records import LibraryPolicy

    valid = [policy.value for policy in LibraryPolicy]
    if name not in valid:
        raise UnknownName("library policy", name, valid)
    return LibraryPolicy(name)
