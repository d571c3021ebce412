"""What an operator is: axes, arguments, distributions, oracle, tolerance, symmetries, cost model.

Torch is imported inside functions only: describing a case must cost nothing in the judge's process.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import DTYPES, KernelCase, Option, Signature

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = dict[str, torch.Tensor]
    Undo: TypeAlias = Callable[[Tensors], Tensors]

DEFAULT_DISTRIBUTION = "well_conditioned"
Cases: TypeAlias = dict[str, tuple[tuple[int, ...], str, dict[str, Any]]]
"""By tier, "gpu" and "cpu": shape in the operator's axis order, data type, options."""


class Operator(ABC):
    """A mathematical function with named axes. Instances are stateless."""

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    """Axis names in the order in which a user writes a shape."""
    options: ClassVar[dict[str, tuple[Option, ...]]] = {}
    """Allowed values of every option; the first is the default."""
    dtypes: ClassVar[tuple[str, ...]]
    input_distributions: ClassVar[tuple[str, ...]] = (DEFAULT_DISTRIBUTION,)
    """Names of input distributions; the first is the well-conditioned default."""
    exact: ClassVar[bool] = False
    """True when outputs must match bit for bit, up to the operator's own freedom (`mismatch_count`)."""

    may_ignore: frozenset[str] = frozenset()
    """Inputs that need not change an output, such as a bias in front of a normalisation."""
    counts_errors: ClassVar[bool] = False
    """Whether the bounds also say how many elements may err by how much; see `tolerance`."""
    single_numbers: ClassVar[bool] = False
    """Whether an output may be a single number, which is its own mean: that answer is no null model then."""

    family: ClassVar[str] = ""
    """Operators of one family share most of their structure; empty for one that is alone."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """What other projects call it, in lower case."""
    published: ClassVar[Cases] = {}
    """What tables are made of; the case of the CPU tier runs anywhere."""
    gpu_reference: ClassVar[str] = "torch"
    """Reference that the published case is compared with on a GPU."""
    small: ClassVar[Cases] = {}
    """Small enough for tools that make a kernel a hundred times slower. Axes that a kernel may fix, such as
    channels or the head dimension, are as in `published`, and tiles of 128 and 256 fit."""
    tensor_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    """By tensor, a name for each of its dimensions, for formats that know no strides; empty where there are none."""
    drawn_in_torch: ClassVar[dict[str, str]] = {}
    """By input, an expression of PyTorch with {} for standard normal numbers, where those alone would not do."""

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        """What the case computes, as lines of PyTorch over its inputs; empty where there are none.

        With `in_order`, results that the operator allows in any order have one, for formats that compare by place.
        Strides are the signature's business.
        """
        return ""

    def explanation(self) -> str:
        """What is computed, for who writes a kernel."""
        return inspect.getdoc(type(self)) or self.name

    def validate(self, case: KernelCase) -> None:  # noqa: B027 - any sizes are right for most operators
        """Raise UsageError when sizes contradict one another. Axis names are checked by make_case."""

    def check_option(self, name: str, value: Option) -> None:
        """Raise UnknownName unless the option takes this value. Names of options are checked by make_case."""
        if value not in self.options[name]:
            raise UnknownName(f"value for {self.name} option {name!r}", value, map(str, self.options[name]))

    def least_size(self, axis: str) -> int:
        """The smallest size of an axis."""
        return 1

    @property
    def axes_text(self) -> str:
        """The axes, for an error about a shape."""
        return ", ".join(self.axes)

    def option(self, case: KernelCase, name: str) -> Option:
        """The value of an option of this case, or its default."""
        return case.options.get(name, self.options[name][0])

    @abstractmethod
    def signature(self, case: KernelCase) -> Signature:
        """Tensors and scalars that a kernel for this case receives."""

    @abstractmethod
    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        """Inputs by name, in the case's data types, contiguous; `generator` decides every random number."""

    @abstractmethod
    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        """Outputs by name in float64 (integers in int64), computed from the inputs' exact values."""

    @abstractmethod
    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        """What a careful implementation in the case's own precision gives; its error sets the tolerance."""

    @abstractmethod
    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        """Per output element, the size of one rounding error in float64: errors are measured in this unit."""

    @abstractmethod
    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        """The same problem with other bytes: an exact symmetry of the operator, drawn at random.

        Returns the new inputs and the function that maps outputs of the new problem back to those of the old one.
        It makes every timed repetition new to a kernel that remembers, and keeps the oracle's answer usable.
        """

    @abstractmethod
    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        """A copy of the inputs in which a single element differs, by enough to change an output visibly."""

    @abstractmethod
    def flops(self, case: KernelCase) -> float:
        """Floating-point operations that the function needs."""

    def min_bytes(self, case: KernelCase) -> float:
        """Bytes that must move at least: every input read once, every output written once."""
        signature = self.signature(case)
        return float(sum(spec.num_elements * DTYPES[spec.dtype] for spec in (*signature.inputs, *signature.outputs)))

    def slacks(self, case: KernelCase) -> dict[str, float]:
        """By output, how many times the baseline's error a kernel may make, where that is not `tolerance.SLACK`."""
        return {}

    def fixed_bounds(self, case: KernelCase) -> dict[str, float]:
        """By output, bounds in units of `error_scale` that do not depend on the baseline's error."""
        return {}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        """Undeclared checks: distributions of inputs, and values of options such as "eps=0.5"."""
        return ()

    def elsewhere_names(self, case: KernelCase) -> tuple[str, ...]:
        """Those of them that a case of a further shape may have, the first one always, others where drawn."""
        return ()

    def further_case(self, case: KernelCase, name: str) -> KernelCase:
        """The case of such a check."""
        return case

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """Inputs and answer (`tolerance.Expected`) of such a check, or why there is none.

        `wrong` is the answer to other inputs of the default distribution, which must not pass.
        """
        return ""

    def has_symmetry(self, case: KernelCase) -> bool:
        """Whether `symmetry_transform` gives new problems with known answers; else every timed input is new."""
        return True

    def examine(self, case: KernelCase, inputs: Tensors) -> list[str]:
        """Notes for the record. Raises UsageError for a user's definition that cannot be an oracle."""
        return []

    def calls_only_moves(self, case: KernelCase) -> bool:
        """Whether a definition that was examined calls nothing but what copies and converts."""
        return False

    def moves_alone(self, case: KernelCase) -> bool:
        """Whether it calls nothing but what copies: every element of a right answer is exact."""
        return False

    def object_to(self, findings: Sequence[str]) -> None:  # noqa: B027 - a shipped operator's case is skipped instead
        """Raise UsageError where findings of the lint are a user's mistake."""

    def mismatch_count(self, case: KernelCase, inputs: Tensors, expected: Tensors, actual: Tensors) -> dict[str, float]:
        """For exact operators: by output, the number of elements that no correct implementation could return."""
        raise NotImplementedError(f"{self.name} is not an exact operator")


def named_shape(operator: Operator, shape: tuple[int, ...] | dict[str, int]) -> dict[str, int]:
    """A shape by axis name, in the operator's order. Raises UsageError that names the axes."""
    axes = operator.axes
    if not isinstance(shape, dict):
        if len(shape) != len(axes):
            names = operator.axes_text
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
