"""Symmetries of a user's operator: axes along which it may be permuted, found by trying, or what the user declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.distributions import permutation
from pytest_klineage.operators.evaluation import row_magnitude
from pytest_klineage.operators.open_inputs import arguments_for, by_name
from pytest_klineage.operators.signature_line import TensorPattern
from pytest_klineage.operators.tolerance import largest_error
from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo
    from pytest_klineage.operators.defined import DefinedOperator

SEED = 20261122
"""Of the inputs on which symmetries are looked for. Which there are is no secret."""
ALIKE = 1e-9
"""Results in float64 that differ by less, relative to their row, differ by the order of sums only."""


def find_axes(operator: DefinedOperator, case: KernelCase, device: str = "") -> tuple[str, ...]:
    """Axes of the inputs that can be permuted, outputs following, without changing the answer."""
    import torch

    generator = torch.Generator(device or default_device()).manual_seed(SEED)
    inputs = operator.make_inputs(case, generator, DEFAULT_DISTRIBUTION)
    expected = operator.oracle(case, inputs)
    found = (axis for axis in candidates(operator, case) if commutes(operator, axis, inputs, expected, generator, case))
    return tuple(found)


def default_device() -> str:
    """Where this process works: on a GPU once it has used one."""
    import torch

    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch has no types here
    return "cuda" if used else "cpu"


def candidates(operator: DefinedOperator, case: KernelCase) -> list[str]:
    """Axes of inputs that occur in no formula and bound no index."""
    tensors = (*operator.line.inputs, *operator.line.outputs)
    bounds = [tensor.below for tensor in operator.line.inputs if tensor.below is not None]
    formulas = [*(dim for tensor in tensors for dim in tensor.dims if not dim.axis), *bounds]
    taken = {name for formula in formulas for name in formula.names}
    own = {dim.axis for tensor in operator.line.inputs for dim in tensor.dims}
    return [axis for axis in operator.axes if axis in own - taken and case.shape[axis] > 1]


def commutes(
    operator: DefinedOperator,
    axis: str,
    inputs: Tensors,
    expected: Tensors,
    generator: torch.Generator,
    case: KernelCase,
) -> bool:
    """Whether permuted inputs give permuted outputs, on random numbers."""
    moved, undo = permuted(operator, (axis,), inputs, generator)
    back = undo(operator.oracle(case, moved))
    return all(alike(back[name], expected[name]) for name in expected)


def alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the order of sums in float64; integers are equal."""
    import torch

    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    return largest_error(actual, expected, row_magnitude(expected).add(expected.abs()).mul_(ALIKE).add_(1e-300)) <= 1.0


def permuted(
    operator: DefinedOperator, axes: Sequence[str], inputs: Tensors, generator: torch.Generator
) -> tuple[Tensors, Undo]:
    """Inputs permuted along axes, and the function that takes outputs back."""
    like = next(iter(inputs.values()))
    sizes = {dim.axis: size for tensor in operator.line.inputs
             for dim, size in zip(tensor.dims, inputs[tensor.name].shape, strict=True)}  # fmt: skip
    orders = {axis: permutation(sizes[axis], generator, like) for axis in axes}
    moved = {tensor.name: selected(tensor, inputs[tensor.name], orders, 0) for tensor in operator.line.inputs}

    def undo(outputs: Tensors) -> Tensors:
        return {tensor.name: selected(tensor, outputs[tensor.name], orders, 1) for tensor in operator.line.results}

    return moved, undo


def selected(
    tensor: TensorPattern, values: torch.Tensor, orders: dict[str, tuple[torch.Tensor, torch.Tensor]], way: int
) -> torch.Tensor:
    """A tensor permuted along all of its axes in `orders`: there (0) or back (1)."""
    import torch

    found = values.view(torch.uint8) if values.element_size() == 1 else values
    for dim, axis in enumerate(item.axis for item in tensor.dims):
        if axis in orders:
            found = found.index_select(dim, orders[axis][way])
    return found.view(values.dtype)


def declared(
    operator: DefinedOperator, case: KernelCase, inputs: Tensors, generator: torch.Generator
) -> tuple[Tensors, Undo]:
    """The user's own symmetry, drawn once. Raises UsageError when it returns something else."""
    function = operator.symmetry_function
    if function is None:
        raise operator.error("no symmetry is declared")
    given = arguments_for(operator, case, function, inputs, generator)
    try:
        result = function(**given)
    except Exception as error:  # a user's code may raise anything
        raise operator.error(f"{function.__name__} failed: {type(error).__name__}: {error}", function) from None
    if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
        raise operator.error("the symmetry returns (inputs, way back), the second a function of the results", function)
    moved = {**inputs, **by_name(operator, function, result[0], [name for name in given if name in inputs])}
    names = [tensor.name for tensor in operator.line.results]

    def undo(outputs: Tensors) -> Tensors:
        back = result[1](*(outputs[name] for name in names))
        values = list(back) if isinstance(back, tuple | list) else [back]
        return dict(zip(names, values, strict=True))

    return {name: tensor.contiguous() for name, tensor in moved.items()}, undo
