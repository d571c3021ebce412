"""Running a definition: in float64, where every lower precision in its text becomes float64, or in the case's own."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.operators.tolerance import HALF_SMALLEST, UNIT_ROUNDOFF
from pytest_klineage.records import KernelCase, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_klineage.operators.base import Tensors
    from pytest_klineage.operators.defined import DefinedOperator

CASTS = ("float", "half", "bfloat16")
"""Methods of a tensor that would leave float64."""
TIE, TIE_SEED = 1e-10, 20261128
"""By how much, relative to 1 and to themselves, numbers are moved that may tie; and the seed of the ways they go."""
TIE_ATTEMPTS, TIE_LOOKS = 12, 4
"""How often: of three equal numbers the middle one stays in its place in a third of the attempts, both ways, and in all
of 12 once in 500,000. Where 4 show no tie it ends."""
ROW_ELEMENTS = 64
"""A row, whose magnitude errors are measured by, has so many elements at least: trailing axes are joined until then."""


def evaluate(operator: DefinedOperator, case: KernelCase, inputs: Tensors, *, in_float64: bool) -> Tensors:
    """The definition's results by name.

    In float64: floats as float64, integers and booleans as int64. Else: inputs as they are, results in their declared
    types. Raises UsageError, with the line of the user's file, for a definition that fails or returns something else
    than it declares.
    """
    specs = operator.signature(case).outputs
    arguments = [widened(tensor) if in_float64 else tensor for tensor in inputs.values()]
    results = call(operator, case, arguments, in_float64=in_float64)
    found = dict(zip((spec.name for spec in specs), checked(operator, specs, results, inputs), strict=True))
    if in_float64:
        return {
            name: tensor.double() if tensor.is_floating_point() else tensor.long() for name, tensor in found.items()
        }
    return {spec.name: found[spec.name].to(torch_dtype(spec.dtype)).contiguous() for spec in specs}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A float tensor in float64; others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def call(operator: DefinedOperator, case: KernelCase, arguments: Sequence[Any], *, in_float64: bool) -> Any:
    """Call the definition with the case's options. Raises UsageError with the line at which it failed."""
    import torch

    named = operator.keywords(case)
    try:
        if not in_float64:
            return operator.function(*arguments, **named)
        with float64_only():
            return operator.function(*arguments, **named)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything; it becomes one error with its line
        raise failure(operator, error, arguments) from None


def failure(operator: DefinedOperator, error: BaseException, arguments: Sequence[Any]) -> UsageError:
    """What a definition raised, with the line of the user's file that it came from."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(operator.file)
    ]
    said = " ".join(str(error).split()) or type(error).__name__
    text = f"the definition failed: {type(error).__name__}: {said[:400]}"
    on_cpu = all(not tensor.is_cuda for tensor in arguments)
    if on_cpu and any(word in said.lower() for word in ("cuda", "gpu", "active driver", "nvidia")):
        text += "; a definition runs wherever its case is judged, and this is a CPU: write it in plain PyTorch"
    elif "out of" in said and (
        free := [item for item in operator.line.inputs if "int" in item.dtype and not item.below]
    ):
        text += (
            f"; if {free[0].name} holds indices, bound them in the signature: {free[0].name}[...]: {free[0].dtype} < V"
        )
    elif "Float8" in said:
        text += "; PyTorch has no arithmetic on 8-bit floats: cast them in the definition, x.float()"
    return operator.error(text, line=(lines or [0])[-1] or 0)


def checked(
    operator: DefinedOperator, specs: Sequence[TensorSpec], results: Any, inputs: Tensors
) -> list[torch.Tensor]:
    """The results as a list, as declared. Raises UsageError."""
    import torch

    values = list(results.values()) if isinstance(results, dict) else results
    found = list(values) if isinstance(values, tuple | list) else [values]
    declared = ", ".join(spec.name for spec in specs)
    if len(found) != len(specs):
        raise operator.error(f"the definition returns {len(found)} results, the signature has {len(specs)}: {declared}")
    device = next(iter(inputs.values())).device
    for spec, tensor in zip(specs, found, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise operator.error(f"the definition returns a {type(tensor).__name__} for {spec.name}, not a tensor")
        if tuple(tensor.shape) != spec.shape:
            raise operator.error(
                f"the definition returns {spec.name} with shape {tuple(tensor.shape)}, the signature says {spec.shape}"
            )
        if tensor.is_floating_point() is not is_float(spec.dtype):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise operator.error(f"the definition returns {kind} for {spec.name}, the signature says {spec.dtype}")
        if tensor.device != device:
            raise operator.error(f"the definition returns {spec.name} on {tensor.device}; its inputs are on {device}")
    return [tensor.detach() for tensor in found]


def is_float(dtype: str) -> bool:
    """Whether a short name is that of a floating-point type."""
    return dtype in UNIT_ROUNDOFF


def error_scales(operator: DefinedOperator, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
    """Per element, the unit in which errors are measured, in float64.

    By default half a unit in the last place of the output's type, at the size of the element plus that of its row: sums
    that cancel err by what their terms were. Integers count by one, those that an open tie decides not at
    all; a declared tolerance is its own unit.
    """
    import torch

    scales = {}
    for spec in operator.signature(case).outputs:
        values = expected[spec.name]
        if (tolerance := operator.tolerances.get(spec.name)) is not None:
            scale = values.double().abs().mul_(tolerance.rtol).add_(tolerance.atol).clamp_min_(1e-300)
        elif is_float(spec.dtype):
            scale = values.abs().add_(usual_magnitude(values)).mul_(UNIT_ROUNDOFF[spec.dtype])
            scale.add_(HALF_SMALLEST[spec.dtype])
        else:
            scale = torch.ones_like(values, dtype=torch.float64)
        scales[spec.name] = scale
    if operator.leaves_ties_open:
        for name, tied in open_ties(operator, case, inputs, expected).items():
            scales[name].masked_fill_(tied, float("inf"))
    return scales


def open_ties(operator: DefinedOperator, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
    """Where a tie of inputs decides an integer of the answer, by output: it changes when inputs differ by next to
    nothing, one way or the other."""
    import torch

    whole = [name for name, values in expected.items() if not values.is_floating_point()]
    found = {name: torch.zeros_like(expected[name], dtype=torch.bool) for name in whole}
    device = next(iter(inputs.values())).device
    random = torch.Generator(device).manual_seed(TIE_SEED)
    floats = [name for name, tensor in inputs.items() if whole and tensor.is_floating_point()]
    for attempt in range(TIE_ATTEMPTS if floats else 0):
        noise = {
            name: torch.randn(inputs[name].shape, generator=random, device=device, dtype=torch.float64)
            for name in floats
        }
        for way in (TIE, -TIE):
            moved = {
                name: way * (1 + inputs[name].double().abs()) * noise[name] + inputs[name].double() for name in floats
            }
            answer = evaluate(operator, case, {**inputs, **moved}, in_float64=True)
            for name in whole:
                found[name] |= answer[name] != expected[name]
        if attempt + 1 == TIE_LOOKS and not any(bool(tied.any()) for tied in found.values()):
            break
    return found


def row_magnitude(values: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of every row, in a shape that broadcasts with `values`; of finite elements."""
    return row_mean(values.nan_to_num(0.0, 0.0, 0.0).square_()).sqrt_()


def usual_magnitude(values: torch.Tensor) -> torch.Tensor:
    """The same, at most twice the mean magnitude: a few huge elements do not excuse errors of all others."""
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    magnitude = row_mean(finite.square()).sqrt_()
    return magnitude.minimum(row_mean(finite.abs_()).mul_(2))


def row_mean(values: torch.Tensor) -> torch.Tensor:
    """Mean of every row, in a shape that broadcasts with `values`."""
    if not values.dim():
        return values.clone()
    first, elements = values.dim() - 1, values.shape[-1]
    while elements < ROW_ELEMENTS and first > 0:
        first -= 1
        elements *= values.shape[first]
    mean: torch.Tensor = values.mean(dim=tuple(range(first, values.dim())), keepdim=True)
    return mean


@contextmanager
def float64_only() -> Iterator[None]:
    """Let every cast to a lower floating-point type, and every new tensor, be float64."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode_class()():
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def mode_class() -> Any:
    """A TorchFunctionMode that turns lower floating-point types in arguments into float64."""
    import torch
    from torch.overrides import TorchFunctionMode

    double = torch.float64
    wide = {
        torch.float16: double, torch.bfloat16: double, torch.float32: double, torch.complex64: torch.complex128,
        torch.float8_e4m3fn: double, torch.float8_e5m2: double,
    }  # fmt: skip

    class Float64Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in CASTS and args and isinstance(args[0], torch.Tensor):
                return args[0].double()
            args = tuple(wide.get(item, item) if isinstance(item, torch.dtype) else item for item in args)
            named = {
                name: wide.get(item, item) if isinstance(item, torch.dtype) else item
                for name, item in (kwargs or {}).items()
            }
            return function(*args, **named)

    return Float64Mode
