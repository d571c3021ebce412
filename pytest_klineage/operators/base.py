"""What an operator is: axes, arguments, distributions, oracle, tolerance, symmetries, cost model. None lives here.

Torch is imported inside functions only: describing a case must cost nothing in the judge's process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import DTYPES, Definition, KernelCase, LibraryPolicy, Option, Signature

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = dict[str, torch.Tensor]
    Undo: TypeAlias = Callable[[Tensors], Tensors]

DEFAULT_REGIME = "well_conditioned"


class Operator(ABC):
    """A mathematical function with named axes. Instances are stateless."""

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    """Axis names in the order in which a user writes a shape."""
    options: ClassVar[dict[str, tuple[Option, ...]]] = {}
    """Allowed values of every option; the first is the default."""
    dtypes: ClassVar[tuple[str, ...]]
    regimes: ClassVar[tuple[str, ...]] = (DEFAULT_REGIME,)
    """Names of input distributions; the first is the well-conditioned default."""
    exact: ClassVar[bool] = False
    """True when outputs must match bit for bit, up to the operator's own freedom (`violations`)."""

    single_numbers: ClassVar[bool] = False
    """Whether an output may be a single number, which is its own mean: that answer is no null model then."""

    def validate(self, case: KernelCase) -> None:  # noqa: B027 - any sizes are right for most operators
        """Raise UsageError when sizes contradict one another. Axis names are checked by make_case."""

    def check_option(self, name: str, value: Option) -> None:
        """Raise UnknownName unless the option takes this value. Names of options are checked by make_case."""
        if value not in self.options[name]:
            raise UnknownName(f"value for {self.name} option {name!r}", value, map(str, self.options[name]))

    def least_size(self, axis: str) -> int:
        """The smallest size of an axis."""
        return 0 if axis == "pad" else 1

    def option(self, case: KernelCase, name: str) -> Option:
        """The value of an option of this case, or its default."""
        return case.options.get(name, self.options[name][0])

    @abstractmethod
    def signature(self, case: KernelCase) -> Signature:
        """Tensors and scalars that a kernel for this case receives."""

    @abstractmethod
    def make_inputs(self, case: KernelCase, generator: torch.Generator, regime: str) -> Tensors:
        """Inputs by name, in the case's data types, contiguous; `generator` decides every random number."""

    @abstractmethod
    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        """Outputs by name in float64 (integers in int64), computed from the inputs' exact values."""

    @abstractmethod
    def honest(self, case: KernelCase, inputs: Tensors) -> Tensors:
        """What a careful implementation in the case's own precision gives; its error sets the tolerance."""

    @abstractmethod
    def rounding_unit(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        """Per output element, the size of one honest rounding error in float64: errors are measured in this unit."""

    @abstractmethod
    def disguise(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        """The same problem with other bytes: an exact symmetry of the operator, drawn at random.

        Returns the new inputs and the function that maps outputs of the new problem back to those of the old one.
        It makes every timed repetition new to a kernel that remembers, and keeps the oracle's answer usable.
        """

    @abstractmethod
    def nudge(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        """A copy of the inputs in which a single element differs, by enough to change an output visibly."""

    @abstractmethod
    def flops(self, case: KernelCase) -> float:
        """Floating-point operations that the function needs."""

    def min_bytes(self, case: KernelCase) -> float:
        """Bytes that must move at least: every input read once, every output written once."""
        signature = self.signature(case)
        return float(sum(spec.num_elements * DTYPES[spec.dtype] for spec in (*signature.inputs, *signature.outputs)))

    def slacks(self, case: KernelCase) -> dict[str, float]:
        """By output, how many times the honest error a kernel may make, where that is not `tolerance.SLACK`."""
        return {}

    def fixed_bounds(self, case: KernelCase) -> dict[str, float]:
        """By output, bounds in rounding units that do not depend on the honest run's error."""
        return {}

    def has_symmetry(self, case: KernelCase) -> bool:
        """Whether `disguise` gives new problems with known answers; else every timed input is a new problem."""
        return True

    def examine(self, case: KernelCase, inputs: Tensors) -> list[str]:
        """Notes for the record. Raises UsageError for a user's definition that cannot be an oracle."""
        return []

    def object_to(self, findings: Sequence[str]) -> None:  # noqa: B027 - a shipped operator's case is skipped instead
        """Raise UsageError where findings of the lint are a user's mistake."""

    def violations(self, case: KernelCase, inputs: Tensors, expected: Tensors, actual: Tensors) -> dict[str, float]:
        """For exact operators: by output, the number of elements that no correct implementation could return."""
        raise NotImplementedError(f"{self.name} is not an exact operator")


def make_case(
    chosen: Operator,
    definition: Definition | None,
    shape: tuple[int, ...] | dict[str, int],
    dtype: str,
    reference: str,
    *,
    at_least: float = 1.0,
    library: LibraryPolicy = LibraryPolicy.FORBID,
    also_shapes: Iterable[tuple[int, ...] | dict[str, int]] = (),
    **options: Option,
) -> KernelCase:
    """Build and check a case; `definition` is None for a shipped operator. `shape` is positional in the operator's
    axis order, or a dict by axis name.

    `also_shapes` are further shapes, written in either way, at which the kernel must be right.

    Raises UnknownName for a dtype, axis or option that does not exist, UsageError for sizes and a speedup
    that cannot be.
    """
    operator = chosen.name
    if dtype not in chosen.dtypes:
        raise UnknownName(f"dtype for {operator}", dtype, chosen.dtypes)
    for name, value in options.items():
        if name not in chosen.options:
            raise UnknownName(f"option for {operator}", name, chosen.options)
        chosen.check_option(name, value)
    # Not a bool, and neither NaN nor infinity, which compare with anything.
    if type(at_least) not in (int, float) or not 0 < at_least < float("inf"):
        raise UsageError(f"at_least must be a positive number, got {at_least!r}")
    changed = {name: value for name, value in options.items() if value != chosen.options[name][0]}
    case = KernelCase(
        operator=operator,
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


def named_shape(operator: Operator, shape: tuple[int, ...] | dict[str, int]) -> dict[str, int]:
    """A shape by axis name, in the operator's order. Raises UsageError that names the axes."""
    axes = operator.axes
    if not isinstance(shape, dict):
        if len(shape) != len(axes):
            names = ", ".join(axes)
            raise UsageError(f"{operator.name} has {len(axes)} axes ({names}), got {len(shape)} sizes: {shape}")
        shape = dict(zip(axes, shape, strict=True))
    for axis in shape:
        if axis not in axes:
            raise UnknownName(f"axis of {operator.name}", axis, axes)
    missing = [axis for axis in axes if axis not in shape]
    if missing:
        raise UsageError(f"{operator.name} also needs the axes {', '.join(missing)}")
    for axis, size in shape.items():
        if type(size) is not int or size < operator.least_size(axis):
            raise UsageError(f"axis {axis} of {operator.name} must be a positive integer, got {size!r}")
    return {axis: shape[axis] for axis in axes}
