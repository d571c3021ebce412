"""The marker `kernel_case`: what a test may say about its kernel, checked at collection."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import KlineageError, UnknownName, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from pytest_klineage.operators import Operator
    from pytest_klineage.records import KernelCase, LibraryPolicy, Option

MARKER = "kernel_case"
MARKER_LINE = (
    'kernel_case(shape, dtype, ref="torch", *, op, at_least=1.0, library="forbid", also=(), shapes=(), variants=(), '
    'prepare="", max_spills=None, requires=(), **options): the case that the kernel of this test is judged on; see the '
    "kernel_gate fixture."
)
PLACE = re.compile(r"\S+\.py:\d+: ")
"""How a message begins that names its line."""
CASE_KEY = pytest.StashKey["KernelCase"]()
SHAPE = "klineage_shape"
"""The parameter that the shapes of a sweep become."""


def kernel_case(
    shape: Sequence[int] | dict[str, int] | None = None,
    dtype: str = "",
    ref: str | Callable[..., Any] = "torch",
    *,
    op: str | Operator = "",
    at_least: float = 1.0,
    library: str = "forbid",
    also: Sequence[Sequence[int] | dict[str, int]] = (),
    shapes: Sequence[Sequence[int] | dict[str, int]] = (),
    variants: Sequence[str | Callable[..., Any]] = (),
    prepare: str | Callable[..., Any] = "",
    max_spills: int | None = None,
    requires: Sequence[str] = (),
    **options: Option,
) -> pytest.MarkDecorator:
    """Mark a test with the case that its kernel is judged on.

    Args:
        shape: sizes in the order of the operator's axes, or a dict by axis name.
        dtype: short name of the data type, such as "fp32".
        ref: the implementation that the kernel is compared with: a name such as "torch" or "vendor", for an operator
            of yours "torch" or "torch.compile", or a function of yours, as "package.module:function" or as itself.
        op: the operator: a name such as "gemm", one that `@operator` made, or "file.py:name".
        at_least: speedup that the kernel must reach, up to the gate's margin.
        library: when a library does the work: "forbid" reject, "label" judge and say so, "allow" judge.
        also: further shapes at which the kernel must be right; not timed.
        shapes: instead of a shape, those of a sweep: the test runs once for each.
        variants: further functions beside a ref that is a function; the fastest of them is compared with.
        prepare: a function that converts the inputs for such a ref, untimed.
        max_spills: bytes of registers per thread that a GPU kernel may spill; None for any number.
        requires: instructions that must be in the machine code, such as ("wgmma", "tma_load"); see docs/reference.
        **options: the operator's own, such as causal=True.

    Names are checked when pytest collects the test: a typo costs no build. `pytest-klineage cases` lists them.
    """
    given: dict[str, Any] = {"max_spills": max_spills, "requires": requires, **options}
    own = {"shapes": shapes, "variants": variants, "prepare": prepare}
    return pytest.mark.kernel_case(
        shape, dtype, ref, op=op, at_least=at_least, library=library, also=also, **own, **given
    )


def case_of(item: pytest.Item) -> KernelCase | None:
    """The case of a test, or None without a marker; the nearest marker wins. Raises UsageError for a bad one."""
    if CASE_KEY in item.stash:
        return item.stash[CASE_KEY]
    mark = item.get_closest_marker(MARKER)
    if mark is None:
        return None
    callspec = getattr(item, "callspec", None)
    case = build_case(
        mark.args, mark.kwargs, folders=(item.path.parent, item.config.rootpath),
        shape=callspec.params.get(SHAPE) if callspec is not None else None,
    )  # fmt: skip
    item.stash[CASE_KEY] = case
    return case


def build_case(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, folders: Sequence[Path] = (), shape: Any = None
) -> KernelCase:
    """The case that a marker's arguments describe, at `shape` where the marker has a sweep.

    `folders` are where files of definitions and references may lie. Raises UsageError, which names what is valid.
    """
    import msgspec

    from pytest_klineage.operators import OPERATORS, make_case

    signature = inspect.signature(kernel_case)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"kernel_case: {error}. Write it as {MARKER_LINE.partition(':')[0]}") from None
    bound.apply_defaults()
    given = bound.arguments
    if given["op"] == "":
        raise UsageError(f"kernel_case needs op=, the operator: one of {', '.join(sorted(OPERATORS))}, or one of yours")
    operator = _operator(given["op"], folders)
    for name in given["options"]:
        if name not in operator.options:
            own = [parameter for parameter in signature.parameters if parameter != "options"]
            raise UnknownName(f"argument of kernel_case for {operator.name}", name, (*own, *operator.options))
    ref = reference_name(given["ref"], folders)
    check_reference(ref, operator)
    case = make_case(
        operator,
        _shape(given["shape"] if shape is None else shape),
        given["dtype"],
        ref,
        at_least=given["at_least"],
        library=_library(given["library"]),
        also_shapes=_shapes(given["also"], "also"),
        **given["options"],
    )
    return msgspec.structs.replace(
        case, max_spills=_max_spills(given["max_spills"]), requires=_requires(given["requires"]),
        **_own_reference(given, ref, folders),
    )  # fmt: skip


def _operator(given: Any, folders: Sequence[Path]) -> Operator:
    """The operator that a marker means; a file is looked for in all folders."""
    from pytest_klineage.operators import find_operator

    name = given.partition(":")[0] if isinstance(given, str) else ""
    folder = next((folder for folder in folders if name and (folder / name).is_file()), None)
    return find_operator(given, folder or (folders[0] if folders else None))


def _own_reference(given: Mapping[str, Any], ref: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Variants and the preparation of a reference that is a function. Raises UsageError for another reference."""
    from pytest_klineage.references.functions import is_function

    variants, prepare = given["variants"], given["prepare"]
    if not isinstance(variants, list | tuple):
        raise UsageError(f'variants= is a list of functions, such as ("mylib.v2:softmax",), got {variants!r}')
    if (variants or prepare) and not is_function(ref):
        raise UsageError(f"variants= and prepare= belong to a ref that is a function; {ref} is not one")
    return {
        "reference_variants": tuple(reference_name(item, folders) for item in variants),
        "reference_prepare": reference_name(prepare, folders) if prepare else "",
    }


def reference_name(given: Any, folders: Sequence[Path]) -> str:
    """What a case calls a reference; this process remembers the files of functions. Raises UsageError."""
    if callable(given):
        return function_name(given)
    if not isinstance(given, str):
        raise UnknownName("reference", given, ["torch", "package.module:function"])
    module, colon, function = given.partition(":")
    if not colon:
        return given
    if path := beside(module, folders):
        return f"{remembered(path)}:{function}"
    if module.endswith(".py"):
        raise UsageError(f"ref={given!r}: there is no file {module} beside the test or in the root directory")
    return given


def beside(module: str, folders: Sequence[Path]) -> Path | None:
    """The file of a module that lies beside the test or in the root directory, which workers cannot import."""
    name = module if module.endswith(".py") else f"{module}.py"
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def function_name(function: Any) -> str:
    """A function of a file as cases write it. Raises UsageError for one that has no name in its file."""
    plain = inspect.unwrap(function)
    name = getattr(plain, "__qualname__", "")
    try:
        path = Path(inspect.getfile(plain))
    except TypeError:
        path = Path()
    if not path.is_file() or not name.replace(".", "").isidentifier():
        raise UsageError(f"ref={function!r}: name a function that a file defines, or write 'package.module:function'")
    return f"{remembered(path)}:{name}"


def remembered(path: Path) -> str:
    """A file as cases call it: relative to its project's root."""
    from pytest_klineage.operators.defined import shown
    from pytest_klineage.references.functions import named_file

    return named_file(path, shown(path))


def check_reference(name: str, operator: Operator) -> None:
    """Raise UnknownName unless `name` is a reference that implements the operator."""
    from pytest_klineage.operators import OPERATORS
    from pytest_klineage.references import REFERENCES, SHIPPED, is_own, reference
    from pytest_klineage.references.functions import COMPILED, DEFINITION

    own = OPERATORS.get(operator.name) is not operator
    if is_own(name, operator.name, shipped=not own):
        return
    if operator.name not in reference(name).operators() or (own and name in SHIPPED):
        able = [DEFINITION, COMPILED] if own else [
            other for other, known in REFERENCES.items() if operator.name in known.operators()
        ]  # fmt: skip
        raise UnknownName(f"reference for {operator.name}", name, [*able, "package.module:function"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for every shape of its marker's sweep."""
    mark = metafunc.definition.get_closest_marker(MARKER)
    shapes = mark.kwargs.get("shapes") if mark is not None else None
    if not mark or not shapes:
        return
    if (mark.args and mark.args[0] is not None) or mark.kwargs.get("shape") is not None:
        raise UsageError(f"{metafunc.definition.nodeid}: kernel_case takes a shape or shapes=, not both")
    sizes = _shapes(shapes, "shapes")
    names = ["x".join(map(str, shape.values() if isinstance(shape, dict) else shape)) for shape in sizes]
    if SHAPE not in metafunc.fixturenames:
        metafunc.fixturenames.append(SHAPE)
    metafunc.parametrize(SHAPE, sizes, ids=names)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> Any:
    """Check the marker of every test as it is made, marks of single parameters included."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item) and item.get_closest_marker(MARKER) is not None:
            try:
                case_of(item)
            except KlineageError as error:
                raise collector.CollectError(_of_test(item, str(error))) from None
    return made


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Misuse in a test file is one line with its place there, and no traceback."""
    report = yield
    found = report.call.excinfo if report.call is not None else None
    if found is not None and isinstance(found.value, UsageError) and not collector.config.getoption("fulltrace"):
        report.longrepr = _placed(collector, found)
    return report


def _of_test(item: pytest.Item, message: str) -> str:
    """An error's message, with the line of the test that it is about unless it names one."""
    path, line, _ = item.location
    return message if PLACE.match(message) else f"{path}:{(line or 0) + 1}: {item.name}: {message}"


def _placed(collector: pytest.Collector, found: pytest.ExceptionInfo[BaseException]) -> str:
    """An error's message, with the file's name and the line at which it was raised unless it has them."""
    message, path = str(found.value), getattr(collector, "path", None)
    if PLACE.match(message):
        return message
    lines = [entry.lineno + 1 for entry in found.traceback if entry.path == path]
    return ":".join([collector.nodeid, *map(str, lines[-1:]), f" {message}"])


def _shape(shape: Any) -> tuple[int, ...] | dict[str, int]:
    if isinstance(shape, dict):
        return shape
    if isinstance(shape, list | tuple):
        return tuple(shape)
    raise UsageError(f"a shape is a sequence of sizes or a dict by axis name, got {shape!r}")


def _shapes(shapes: Any, name: str) -> tuple[tuple[int, ...] | dict[str, int], ...]:
    if not isinstance(shapes, list | tuple):
        raise UsageError(f"{name}= is a list of shapes, such as [(1, 7, 33)], got {shapes!r}")
    return tuple(_shape(shape) for shape in shapes)


def _max_spills(given: Any) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    raise UsageError(f"max_spills= is a number of bytes, 0 or more, got {given!r}")


def _requires(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list | tuple):
        raise UsageError(f'requires= is a list of instructions, such as ("wgmma",), got {names!r}')
    return tuple(names)


def _library(name: Any) -> LibraryPolicy:
    from pytest_klineage.records import LibraryPolicy

    valid = [policy.value for policy in LibraryPolicy]
    if name not in valid:
        raise UnknownName("library policy", name, valid)
    return LibraryPolicy(name)
