"""Inputs of a user's operator: the default distribution, named ones, and copies in which one element differs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.distributions import normal, random_index, torch_dtype
from pytest_klineage.operators.evaluation import error_scales, is_float
from pytest_klineage.operators.movement import COMPARES, MOVES
from pytest_klineage.operators.tolerance import SLACK, largest_error
from pytest_klineage.records import KernelCase, TensorSpec

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors
    from pytest_klineage.operators.defined import DefinedOperator, Function

RANGES = {"int8": (-128, 128), "uint8": (0, 256), "bool": (0, 2)}
"""Values that an integer input takes when the signature does not bound it; wider types take those of OTHER_RANGE."""
OTHER_RANGE = (-100, 100)
MOVED_ROWS = (1, 4, 16, 64)
"""In so many rows two elements change places, in turn, until an output changes visibly."""
SIZES = (1.0, 4.0, 32.0, 32.0)
"""In largest elements, what a redrawn element may be, in turn, until an output changes visibly."""

DRAWS = 8
"""Places at which a number that is not zero is looked for."""


def draw(operator: DefinedOperator, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
    """Inputs of a distribution, in the signature's types. Raises UsageError for a function that returns others."""
    return finished(operator, case, generator, input_distribution, numbers(operator, case, generator))


def numbers(operator: DefinedOperator, case: KernelCase, generator: torch.Generator) -> Tensors:
    """What all distributions start from: standard normal numbers in float64, integers in int64."""
    specs = operator.signature(case).inputs
    return {spec.name: default_values(spec, bound_of(operator, case, spec.name), generator) for spec in specs}


def finished(
    operator: DefinedOperator, case: KernelCase, generator: torch.Generator, input_distribution: str, values: Tensors
) -> Tensors:
    """The inputs that a distribution's functions make of such numbers, which they may overwrite."""
    specs = operator.signature(case).inputs
    for name in dict.fromkeys((DEFAULT_DISTRIBUTION, input_distribution)):
        if function := operator.distributions.get(name):
            values = values | changed(operator, case, function, values, generator)
    inputs = {}
    for spec in specs:
        tensor = values[spec.name]
        if tuple(tensor.shape) != spec.shape:
            shape = tuple(tensor.shape)
            what = f"{input_distribution!r} returns {spec.name} with shape {shape}, the signature says {spec.shape}"
            raise operator.error(f"the distribution {what}", operator.distributions.get(input_distribution))
        inputs[spec.name] = tensor.to(device=generator.device, dtype=torch_dtype(spec.dtype)).contiguous()
    return inputs


def bound_of(operator: DefinedOperator, case: KernelCase, name: str) -> int | None:
    """What an integer input stays under, where the signature says so."""
    tensor = next(item for item in operator.line.inputs if item.name == name)
    return None if tensor.below is None else tensor.below.value(case.shape)


def default_values(spec: TensorSpec, bound: int | None, generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers in float64, or uniform integers in int64."""
    import torch

    if is_float(spec.dtype):
        return normal(spec.shape, generator)
    low, high = (0, bound) if bound is not None else RANGES.get(spec.dtype, OTHER_RANGE)
    return torch.randint(low, high, spec.shape, generator=generator, device=generator.device)


def changed(
    operator: DefinedOperator, case: KernelCase, function: Function, values: Tensors, generator: torch.Generator
) -> Tensors:
    """What a user's function makes of inputs. Random numbers that it draws by itself follow from `generator`, too."""
    import torch

    given = arguments_for(operator, case, function, values, generator)
    with torch.random.fork_rng(devices=[generator.device.index or 0] if generator.device.type == "cuda" else []):
        torch.manual_seed(random_index(1 << 31, generator))
        try:
            result = function(**given)
        except Exception as error:  # a user's code may raise anything
            raise operator.error(f"{function.__name__} failed: {type(error).__name__}: {error}", function) from None
    return by_name(operator, function, result, [name for name in given if name in values])


def arguments_for(
    operator: DefinedOperator, case: KernelCase, function: Function, values: Tensors, generator: torch.Generator
) -> dict[str, Any]:
    """What a function asks for by the names of its parameters."""
    known = {**operator.sizes(case), **values, "generator": generator}
    return {name: known[name] for name in inspect.signature(function).parameters}


def by_name(operator: DefinedOperator, function: Function, result: Any, names: list[str]) -> Tensors:
    """Tensors that a function returned for the inputs it took. Raises UsageError."""
    import torch

    if not isinstance(result, dict):
        values = list(result) if isinstance(result, tuple | list) else [result]
        if len(values) != len(names):
            what = f"{function.__name__} took {', '.join(names) or 'no inputs'} and returned {len(values)} values"
            raise operator.error(f"{what}; return the inputs it took, in order, or a dict by name", function)
        result = dict(zip(names, values, strict=True))
    known = {tensor.name for tensor in operator.line.inputs}
    for name, tensor in result.items():
        if name not in known or not isinstance(tensor, torch.Tensor):
            what = f"{function.__name__} returned {name!r}: {type(tensor).__name__}, which is no input"
            raise operator.error(what, function)
    return dict(result)


def one_redrawn(operator: DefinedOperator, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
    """A copy in which one element is another, by enough to change an output beyond its bound where that can be.

    Where a definition only compares, two elements change places instead, if it is the first input that is drawn.
    """
    before = operator.oracle(case, inputs)
    floats = [name for name, tensor in inputs.items() if tensor.is_floating_point() and tensor.numel()]
    names = floats or list(inputs)
    # Twins are to differ in any of the inputs.
    first = random_index(len(names), generator)
    compares = operator.calls_only(case, MOVES | COMPARES) and not operator.calls_only(case, MOVES)
    names = names[first:] + ([] if compares else names[:first])
    if compares and first == 0:
        for rows in MOVED_ROWS:
            found = {**inputs, names[0]: exchanged(inputs[names[0]], rows, generator)}
            if is_visible(operator, case, found, before, operator.oracle(case, found)):
                return found
    found = inputs
    for size in SIZES:
        for name in names:
            found = {**inputs, name: redrawn(inputs[name], size, bound_of(operator, case, name), generator)}
            if is_visible(operator, case, found, before, operator.oracle(case, found)):
                return found
    return found


def is_visible(operator: DefinedOperator, case: KernelCase, inputs: Tensors, before: Tensors, after: Tensors) -> bool:
    """Whether old outputs are clearly wrong answers to the new problem, which has these inputs."""
    scales, fixed = error_scales(operator, case, inputs, after), operator.fixed_bounds(case)
    return any(largest_error(before[name], after[name], scales[name]) > 2 * fixed.get(name, SLACK) for name in after)


def exchanged(tensor: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """A copy in which two unlike elements change places in so many rows; those that are sorted stay so."""
    copy = tensor.clone()
    rows = copy.view(-1, tensor.shape[-1] if tensor.dim() else 1)
    start = random_index(len(rows), generator)
    for row in (rows[(start + place) % len(rows)] for place in range(min(count, len(rows)))):
        values = row.double()
        one = random_index(len(row), generator)
        others = (values != values[one]).nonzero().flatten()
        if len(others) and not bool((values.diff() >= 0).all()):
            other = int(others[random_index(len(others), generator)])
            row[one], row[other] = row[other].clone(), row[one].clone()
    return copy


def redrawn(tensor: torch.Tensor, size: float, bound: int | None, generator: torch.Generator) -> torch.Tensor:
    """A copy in which one element is another one.

    A float gets a magnitude of `size` largest ones and the other sign. What holds of the whole tensor goes on to hold,
    since a kernel may build on it: zeros stay zeros, no negative number comes where there was none, and a symmetric
    matrix stays one.
    """
    import torch

    copy = tensor.clone()
    flat = copy.view(-1)
    position = telling_place(flat, generator)
    if tensor.dtype is torch.bool:
        flat[position] = not bool(flat[position])
    elif not tensor.is_floating_point():
        value = int(flat[position])
        flat[position] = (value + 1) % bound if bound is not None else value - 1 if value > 0 else value + 1
    else:
        limit = torch.finfo(tensor.dtype).max / 2
        largest = min(size * float(tensor.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) + 1.0, limit)
        values = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit floats cannot be compared
        flat[position] = -largest if float(flat[position]) > 0 and bool((values < 0).any()) else largest
        if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and torch.equal(values, values.mT):
            where = [int(index) for index in torch.unravel_index(torch.tensor(position), tensor.shape)]
            copy[(*where[:-2], where[-1], where[-2])] = flat[position]
    return copy


def telling_place(flat: torch.Tensor, generator: torch.Generator) -> int:
    """The place of one element, of a float that is not zero where some draws find one."""
    positions = [random_index(flat.numel(), generator) for _ in range(DRAWS if flat.is_floating_point() else 1)]
    return next((position for position in positions if float(flat[position]) != 0), positions[0])
