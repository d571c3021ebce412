"""What the decorator reads from a definition: tensors, axes, options, types, tolerance, and its place in a file."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Operator
from pytest_klineage.operators.changes import CHANGES
from pytest_klineage.operators.movement import OPEN_TIES
from pytest_klineage.operators.signature_line import Formula, SignatureLine, formula, parse_signature
from pytest_klineage.records import DTYPES, Definition, KernelCase, Option, Signature, definition_digest

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


@dataclass(frozen=True)
class CallSite:
    """Where `operator` was called."""

    file: Path
    line: int
    namespace: dict[str, Any] = field(repr=False, compare=False)
    """The module's."""


MADE: dict[tuple[str, str], list[DefinedOperator]] = {}
"""By file and name, what the decorator has made in this process: a file may have been imported twice."""


class DefinedOperator(Operator):
    """What a definition says: its tensors, axes, options, types and costs, and where it stands. It computes nothing."""

    single_numbers = True
    counts_errors = True

    # A user's operators differ by instance, the shipped ones by class.
    name: str  # type: ignore[misc]  # see above
    axes: tuple[str, ...]  # type: ignore[misc]  # see above
    options: dict[str, tuple[Option, ...]]  # type: ignore[misc]  # see above
    dtypes: tuple[str, ...]  # type: ignore[misc]  # see above
    input_distributions: tuple[str, ...]  # type: ignore[misc]  # see above

    def __init__(
        self, call_site: CallSite, function: Function, signature: str, *, dtypes: Sequence[str], tolerance: Any,
        options: Mapping[str, Sequence[Option]], flops: str | int, num_bytes: str | int | None, name: str,
        may_ignore: Sequence[str] = (), defaults: bool | Sequence[str] = True,
    ) -> None:  # fmt: skip
        if not inspect.isfunction(function):
            raise UsageError(f"@operator stands before a function, not before {function!r}")
        self.function = function
        self.__doc__, self.__wrapped__ = function.__doc__, function
        self.name = name or function.__name__
        self.call_site, self.file = call_site, call_site.file
        here = function.__code__.co_filename == str(call_site.file)
        self.line_number = function.__code__.co_firstlineno if here else call_site.line
        MADE.setdefault((str(call_site.file), self.name), []).append(self)
        self.distributions: dict[str, Function] = {}
        self.symmetry_function: Function | None = None
        self.input_distributions = (DEFAULT_DISTRIBUTION,)
        self.symmetric: dict[str, tuple[str, ...]] = {}
        """By case, the axes that were found to be permutable."""
        self.called: dict[str, frozenset[str]] = {}
        """By case, the framework's operators that the definition was seen to call; views are left out."""
        try:
            self.line: SignatureLine = parse_signature(signature)
            keywords = keyword_parameters(function, [tensor.name for tensor in self.line.inputs])
            self._keywords = tuple(item.name for item in keywords)
            self.free = read_options(self, keywords, options)
            needed = [item.name for item in keywords if item.default is inspect.Parameter.empty]
            late = {*needed, *self.options} - self.line.bare
            self.axes = tuple(dict.fromkeys([*(name for name in self.line.names if name not in late), *needed]))
            self.dtypes = read_dtypes(dtypes)
            self.tolerances: dict[str, Allclose] = read_tolerances(tolerance, self.line)
            self._flops, self._bytes = self._size(flops), None if num_bytes is None else self._size(num_bytes)
            self.may_ignore = read_names(may_ignore, self)
            self.defaults = read_defaults(defaults)
            if not self.name.isidentifier():
                raise UsageError(f"the name of an operator is an identifier, got {self.name!r}")
        except UsageError as error:
            raise self.error(error) from None

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

    def check_option(self, name: str, value: Option) -> None:
        if name not in self.free:
            super().check_option(name, value)
        elif type(value) is not type(self.options[name][0]) and not (self.free[name] is float and type(value) is int):
            kind = self.free[name].__name__
            raise UsageError(f"the option {name} of {self.name} takes a value of type {kind}, got {value!r}")

    def least_size(self, axis: str) -> int:
        return 1 if axis in self.line.bare else 0

    @property
    def leaves_ties_open(self) -> bool:
        """Whether the definition was seen to call what PyTorch answers as it likes where numbers are equal."""
        return any(called & OPEN_TIES for called in self.called.values())

    def calls_only(self, case: KernelCase, names: frozenset[str]) -> bool:
        """Whether the definition was seen to call none but these operators of the framework."""
        return case.id in self.called and self.called[case.id] <= names

    @property
    def axes_text(self) -> str:
        """The axes; those that no input has say why they are axes."""
        outputs = [(name, tensor.name) for tensor in self.line.outputs for dim in tensor.dims for name in dim.names]
        why = {name: f" (of {output} alone)" for name, output in outputs}
        why |= dict.fromkeys(self._keywords, " (a parameter without a default)")
        why |= dict.fromkeys(self.line.input_names, "")
        return ", ".join(f"{name}{why[name]}" for name in self.axes)

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

    def slacks(self, case: KernelCase) -> dict[str, float]:
        return {spec.name: SLACK_OF_8_BITS for spec in self.signature(case).outputs if spec.dtype.startswith("fp8")}

    def fixed_bounds(self, case: KernelCase) -> dict[str, float]:
        declared = dict.fromkeys(self.tolerances, 1.0)
        whole = {spec.name: 0.0 for spec in self.signature(case).outputs if spec.dtype not in FLOATS}
        return {**whole, **declared}

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

    @abstractmethod
    def permutable_axes(self, case: KernelCase) -> tuple[str, ...]:
        """Axes along which inputs may be permuted, with the outputs following."""


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
    target: DefinedOperator, keywords: Sequence[inspect.Parameter], declared: Mapping[str, Sequence[Option]]
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


def read_names(names: Sequence[str], target: DefinedOperator) -> frozenset[str]:
    """Names of inputs and options. Raises UnknownName."""
    known = [*(tensor.name for tensor in target.line.inputs), *target.options]
    for name in names:
        if name not in known:
            raise UnknownName("input or option in may_ignore=", name, known)
    return frozenset(names)


def read_defaults(given: bool | Sequence[str]) -> tuple[str, ...]:
    """Names of the further distributions that are wanted. Raises UnknownName."""
    if isinstance(given, bool):
        return tuple(CHANGES) if given else ()
    for name in given:
        if name not in CHANGES:
            raise UnknownName("distribution in defaults=", name, CHANGES)
    return tuple(dict.fromkeys(given))


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
    """A file as records and messages call it: relative to its project's root, else to what its package lies in."""
    resolved = path.resolve()
    for folder in resolved.parents:
        if folder.name in ("site-packages", "dist-packages") or any((folder / mark).exists() for mark in PROJECT_MARKS):
            return resolved.relative_to(folder).as_posix()
    root = resolved.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return resolved.relative_to(root).as_posix()
