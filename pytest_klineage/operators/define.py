"""An operator from a definition in PyTorch: `@operator("x[M,N] -> y[M,N]")`. Importing this imports no torch.

The definition is a plain function of the inputs. Evaluated in float64 it is the oracle; run once in the case's own
precision it sets the tolerance. It is called in the judge's oracle process and, for `ref="torch"`, in the reference's;
a candidate's process never imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators.base import DEFAULT_REGIME, Operator
from pytest_klineage.operators.signature_line import Formula, SignatureLine, formula, parse_signature
from pytest_klineage.records import DTYPES, Definition, KernelCase, Option, Signature, definition_digest

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

FLOATS = frozenset(name for name in DTYPES if name.startswith(("fp", "bf")))
SLACK_OF_8_BITS = 3.0
"""For outputs of 8-bit floats, whose rounding is the error: the neighbour of the right number is 2 units off."""
DEFAULT_DTYPES = ("fp32", "bf16", "fp16")
GENERATOR = "generator"
"""A parameter of this name, of a function that makes or transforms inputs, is a torch.Generator."""
PROJECT_MARKS = (".git", "pyproject.toml", "setup.cfg", "setup.py", "pytest.ini", "tox.ini")
"""Files of which one lies in a project's root."""

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Allclose:
    """A declared tolerance: |actual - expected| <= atol + rtol * |expected|, against the float64 result."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise UsageError(f"allclose: {name} must be a number of at least 0, got {value!r}")
        if self.rtol == self.atol == 0:
            raise UsageError("allclose needs an rtol or an atol above 0")


def allclose(rtol: float = 0.0, atol: float = 0.0) -> Allclose:
    """A tolerance for `operator(tolerance=...)`. Raises UsageError for numbers that cannot be one."""
    return Allclose(rtol, atol)


def operator(
    signature: str,
    *,
    dtypes: Sequence[str] = DEFAULT_DTYPES,
    tolerance: Allclose | Mapping[str, Allclose] | None = None,
    options: Mapping[str, Sequence[Option]] | None = None,
    flops: str | int = 0,
    min_bytes: str | int | None = None,
    name: str = "",
) -> Callable[[Function], OpenOperator]:
    """Make an operator of the function below: its definition, in PyTorch, with the inputs as parameters.

    signature: the tensors, such as "x[M,N], w[N]: fp32 -> y[M,N]"; see docs/reference/operators.md for the grammar.
    dtypes: types that a case may have; the first is that of examples.
    tolerance: `allclose(rtol, atol)` for all outputs, or by output; default: ten times the rounding errors that the
    definition itself makes in the case's precision.
    options: allowed values by keyword-only parameter, the default first; needed for strings, possible for numbers.
    flops, min_bytes: what the function needs at least, as a formula over axes such as "2*M*N*K".
    name: in tables, and for `op="file.py:name"`; default: the function's.

    Keyword-only parameters with a default are options of a case; those without one are axes. Raises UsageError with
    the line of the file.
    """

    caller = sys._getframe(1)
    place = Place(Path(caller.f_code.co_filename), caller.f_lineno, caller.f_globals)

    def define(function: Function) -> OpenOperator:
        return OpenOperator(
            place,
            function, signature, dtypes=dtypes, tolerance=tolerance, options=options or {}, flops=flops,
            num_bytes=min_bytes, name=name,
        )  # fmt: skip

    if callable(signature):
        raise UsageError('@operator needs the signature first: @operator("x[M,N] -> y[M,N]")')
    return define


@dataclass(frozen=True)
class Place:
    """Where `operator` was called."""

    file: Path
    line: int
    namespace: dict[str, Any] = field(repr=False, compare=False)
    """The module's."""


MADE: dict[tuple[str, str], list[OpenOperator]] = {}
"""By file and name, what the decorator has made in this process: a file may have been imported twice."""


class OpenOperator(Operator):
    """An operator that a user has defined. Calling it calls the definition."""

    single_numbers = True

    # A user's operators differ by instance, the shipped ones by class.
    name: str  # type: ignore[misc]  # see above
    axes: tuple[str, ...]  # type: ignore[misc]  # see above
    options: dict[str, tuple[Option, ...]]  # type: ignore[misc]  # see above
    dtypes: tuple[str, ...]  # type: ignore[misc]  # see above
    regimes: tuple[str, ...]  # type: ignore[misc]  # see above

    def __init__(
        self, place: Place, function: Function, signature: str, *, dtypes: Sequence[str], tolerance: Any,
        options: Mapping[str, Sequence[Option]], flops: str | int, num_bytes: str | int | None, name: str,
    ) -> None:  # fmt: skip
        if not inspect.isfunction(function):
            raise UsageError(f"@operator stands before a function, not before {function!r}")
        self.function = function
        self.__doc__, self.__wrapped__ = function.__doc__, function
        self.name = name or function.__name__
        self.place, self.file = place, place.file
        here = function.__code__.co_filename == str(place.file)
        self.line_number = function.__code__.co_firstlineno if here else place.line
        MADE.setdefault((str(place.file), self.name), []).append(self)
        self.distributions: dict[str, Function] = {}
        self.symmetry_function: Function | None = None
        self.regimes = (DEFAULT_REGIME,)
        self.symmetric: dict[str, tuple[str, ...]] = {}
        """By case, the axes that were found to be permutable."""
        try:
            self.line: SignatureLine = parse_signature(signature)
            keywords = keyword_parameters(function, [tensor.name for tensor in self.line.inputs])
            self._keywords = tuple(item.name for item in keywords)
            self._free = read_options(self, keywords, options)
            needed = [item.name for item in keywords if item.default is inspect.Parameter.empty]
            late = {*needed, *self.options} - self.line.bare
            self.axes = tuple(dict.fromkeys([*(name for name in self.line.names if name not in late), *needed]))
            self.dtypes = read_dtypes(dtypes)
            self.tolerances: dict[str, Allclose] = read_tolerances(tolerance, self.line)
            self._flops, self._bytes = self._size(flops), None if num_bytes is None else self._size(num_bytes)
            if not self.name.isidentifier():
                raise UsageError(f"the name of an operator is an identifier, got {self.name!r}")
        except UsageError as error:
            raise self.error(error) from None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The definition's own result."""
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f'<operator {self.name} "{self.line.text}">'

    # --- what a user adds ---------------------------------------------------------------------------------------------

    def inputs(self, name: str) -> Callable[[Function], Function]:
        """Name another distribution of the inputs, or replace the "default" one, by the function below.

        The function takes any of the inputs by name, as standard normal float64 tensors (integers as the signature
        bounds them), any axes, options, and `generator`. It returns the inputs it took, changed, or a dict by name.
        """
        if callable(name):
            raise self.error(UsageError('name the distribution: @name.inputs("shifted")'), name)

        def add(function: Function) -> Function:
            self._check_parameters(function, f"the distribution {name!r}")
            regime = DEFAULT_REGIME if name == "default" else name
            if regime in self.distributions:
                raise self.error(UsageError(f"there are two distributions {name!r}"), function)
            self.distributions[regime] = function
            self.regimes = tuple(dict.fromkeys([*self.regimes, regime]))
            return function

        return add

    def symmetry(self, function: Function) -> Function:
        """The function below draws an exact symmetry: inputs that differ in their bytes, and the way back.

        It takes any of the inputs by name, axes, options and `generator`, and returns the inputs it took, transformed,
        and a function from the results of the new problem (positional) to those of the old one. Without one, axes that
        the definition can be permuted along are found by trying.
        """
        self._check_parameters(function, "the symmetry")
        self.symmetry_function = function
        return function

    def _check_parameters(self, function: Function, what: str) -> None:
        known = {tensor.name for tensor in self.line.inputs} | {*self.axes, *self.options, GENERATOR}
        for parameter in inspect.signature(function).parameters:
            if parameter not in known:
                raise self.error(UnknownName(f"parameter of {what} of {self.name}", parameter, known), function)

    # --- where it comes from ------------------------------------------------------------------------------------------

    @property
    def definition(self) -> Definition:
        """Where it was defined, for records. Raises UsageError when that is no file."""
        if not self.file.is_file():
            raise UsageError(f"the operator {self.name} must be defined in a file, not in {self.file}")
        digest = definition_digest(self.file.read_text(encoding="utf-8"))
        return Definition(source=f"{shown(self.file)}:{self.name}", digest=digest)

    def error(self, error: UsageError | str, function: Function | None = None, *, line: int = 0) -> UsageError:
        """The error with the place in the user's file in front."""
        if function is not None:
            line = function.__code__.co_firstlineno
        return UsageError(f"{shown(self.file)}:{line or self.line_number}: operator {self.name}: {error}")

    # --- what the rest of the package asks ----------------------------------------------------------------------------

    def check_option(self, name: str, value: Option) -> None:
        if name not in self._free:
            super().check_option(name, value)
        elif type(value) is not type(self.options[name][0]) and not (self._free[name] is float and type(value) is int):
            kind = self._free[name].__name__
            raise UsageError(f"the option {name} of {self.name} takes a value of type {kind}, got {value!r}")

    def least_size(self, axis: str) -> int:
        return 1 if axis in self.line.bare else 0

    def validate(self, case: KernelCase) -> None:
        self.signature(case)

    def sizes(self, case: KernelCase) -> dict[str, Any]:
        """Axes and options by name."""
        return {**case.shape, **{name: self.option(case, name) for name in self.options}}

    def keywords(self, case: KernelCase) -> dict[str, Any]:
        """What the definition is given by keyword: its options, and axes that it asks for."""
        sizes = self.sizes(case)
        return {name: sizes[name] for name in self._keywords}

    def signature(self, case: KernelCase) -> Signature:
        sizes = self.sizes(case)
        numbers = {name: float(value) for name, value in sizes.items() if not isinstance(value, str)}
        try:
            inputs, results = (
                tuple(tensor.spec(numbers, case.dtype) for tensor in group)
                for group in (self.line.inputs, self.line.results)
            )
        except UsageError as error:
            raise self.error(error) from None
        dims = {dim.axis for tensor in self.line.inputs for dim in tensor.dims}
        scalars = {name: value for name, value in numbers.items() if name not in dims}
        return Signature(inputs=inputs, outputs=results, scalars=scalars)

    def make_inputs(self, case: KernelCase, generator: torch.Generator, regime: str) -> Tensors:
        from pytest_klineage.operators.open_inputs import draw

        return draw(self, case, generator, regime)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        from pytest_klineage.operators.evaluation import evaluate

        return evaluate(self, case, inputs, in_float64=True)

    def honest(self, case: KernelCase, inputs: Tensors) -> Tensors:
        from pytest_klineage.operators.evaluation import evaluate

        return evaluate(self, case, inputs, in_float64=False)

    def rounding_unit(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        from pytest_klineage.operators.evaluation import error_scales

        return error_scales(self, case, expected)

    def slacks(self, case: KernelCase) -> dict[str, float]:
        return {spec.name: SLACK_OF_8_BITS for spec in self.signature(case).outputs if spec.dtype.startswith("fp8")}

    def fixed_bounds(self, case: KernelCase) -> dict[str, float]:
        declared = dict.fromkeys(self.tolerances, 1.0)
        whole = {spec.name: 0.0 for spec in self.signature(case).outputs if spec.dtype not in FLOATS}
        return {**whole, **declared}

    def has_symmetry(self, case: KernelCase) -> bool:
        return self.symmetry_function is not None or bool(self.permutable_axes(case))

    def permutable_axes(self, case: KernelCase) -> tuple[str, ...]:
        """Axes along which inputs may be permuted, with the outputs following: found by trying, once a case."""
        from pytest_klineage.operators.open_symmetry import find_axes

        if case.id not in self.symmetric:
            self.symmetric[case.id] = find_axes(self, case)
        return self.symmetric[case.id]

    def disguise(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        from pytest_klineage.operators.open_symmetry import declared, permuted

        if self.symmetry_function is not None:
            return declared(self, case, inputs, generator)
        return permuted(self, self.permutable_axes(case), inputs, generator)

    def nudge(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        from pytest_klineage.operators.open_inputs import one_redrawn

        return one_redrawn(self, case, inputs, generator)

    def examine(self, case: KernelCase, inputs: Tensors) -> list[str]:
        from pytest_klineage.operators.examination import examine

        return examine(self, case, inputs)

    def object_to(self, findings: Sequence[str]) -> None:
        from pytest_klineage.operators.examination import objection

        if findings:
            raise self.error(objection(findings))

    def flops(self, case: KernelCase) -> float:
        return float(self._flops.value(case.shape))

    def min_bytes(self, case: KernelCase) -> float:
        if self._bytes is not None:
            return float(self._bytes.value(case.shape))
        # A table that is looked up by index need not be read as a whole.
        looked_up = {tensor.below.axis for tensor in self.line.inputs if tensor.below is not None}
        whole = {tensor.name for tensor in self.line.inputs if looked_up.isdisjoint(dim.axis for dim in tensor.dims)}
        signature = self.signature(case)
        moved = [*(spec for spec in signature.inputs if spec.name in whole), *signature.outputs]
        return float(sum(spec.num_elements * DTYPES[spec.dtype] for spec in moved))

    def _size(self, given: str | int) -> Formula:
        found = formula(str(given))
        for name in found.names:
            if name not in self.axes:
                raise UnknownName("axis in a formula", name, self.axes)
        return found


def keyword_parameters(function: Function, names: Sequence[str]) -> list[inspect.Parameter]:
    """A definition's keyword-only parameters. Raises UsageError unless the others are the inputs in order."""
    parameters = list(inspect.signature(function).parameters.values())
    if bad := [item for item in parameters if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]:
        raise UsageError(f"a definition names all of its parameters, so it takes no {bad[0]}")
    positional = [item for item in parameters if item.kind is not item.KEYWORD_ONLY]
    if [item.name for item in positional] != list(names):
        given, wanted = ", ".join(item.name for item in positional), ", ".join(names)
        raise UsageError(f"the parameters are ({given}), the signature's inputs are ({wanted}); options follow a *")
    return [item for item in parameters if item.kind is item.KEYWORD_ONLY]


def read_options(
    target: OpenOperator, keywords: Sequence[inspect.Parameter], declared: Mapping[str, Sequence[Option]]
) -> dict[str, type]:
    """Set the operator's options, and return the types of those that take any value. Raises UsageError."""
    target.options, free = {}, {}
    optional = {item.name: item for item in keywords if item.default is not inspect.Parameter.empty}
    for name in declared:
        if name not in optional:
            raise UnknownName("option", name, optional)
    for name, item in optional.items():
        default = item.default
        if type(default) not in (bool, int, float, str):
            raise UsageError(f"the option {name} has the default {default!r}; options are bool, int, float or str")
        values = tuple(declared.get(name, ())) or literal_values(item.annotation)
        if not values and isinstance(default, bool):
            values = (default, not default)
        if values and default not in values:
            raise UsageError(f"the default {default!r} of the option {name} is not among its values {values}")
        if not values and isinstance(default, str):
            raise UsageError(f"the option {name} is a string; say which: options={{{name!r}: ({default!r}, ...)}}")
        if not values:
            free[name] = type(default)
        target.options[name] = (default, *(value for value in values if value != default))
    return free


def literal_values(annotation: Any) -> tuple[Option, ...]:
    """The values of a Literal, as it stands or as the text of one; empty for any other annotation."""
    if isinstance(annotation, str) and annotation.startswith(("Literal[", "typing.Literal[")):
        # The text of an annotation in the user's own file, which has been executed already.
        annotation = eval(annotation.removeprefix("typing."), {"Literal": Literal})
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def read_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The types of a case. Raises UsageError."""
    if isinstance(dtypes, str) or not dtypes:
        raise UsageError(f'dtypes= is a sequence such as ("bf16", "fp16"), got {dtypes!r}')
    for name in dtypes:
        if name not in DTYPES:
            raise UnknownName("dtype", name, DTYPES)
    return tuple(dict.fromkeys(dtypes))


def read_tolerances(tolerance: Any, line: SignatureLine) -> dict[str, Allclose]:
    """Declared tolerances by output. Raises UsageError."""
    names = [tensor.name for tensor in line.results]
    if tolerance is None:
        return {}
    given = dict(tolerance) if isinstance(tolerance, Mapping) else dict.fromkeys(names, tolerance)
    for name, value in given.items():
        if name not in names:
            raise UnknownName("output in tolerance=", name, names)
        if not isinstance(value, Allclose):
            raise UsageError(f"tolerance= is allclose(rtol=..., atol=...), or a dict of them by output, got {value!r}")
    return given


def shown(path: Path) -> str:
    """A file as records and messages call it: relative to its project's root, or to where packages are installed."""
    resolved = path.resolve()
    for folder in resolved.parents:
        if folder.name in ("site-packages", "dist-packages") or any((folder / mark).exists() for mark in PROJECT_MARKS):
            return resolved.relative_to(folder).as_posix()
    return resolved.name
