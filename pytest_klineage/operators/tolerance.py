"""When is an output right: errors in units of `error_scale`, bounded by a multiple of the baseline's.

error  = max over elements of |actual - expected| / error_scale
bound  = SLACK * max(1, error of baseline_output, a run in the case's own precision)

On a CPU the root of the mean square of a shipped operator's errors is bounded as well (`RMS_SLACK`). Where an answer is
beyond its type's range, an infinity is right.
The unit is per element, so a spike in one place does not excuse an error in another. Of operators that users define,
the baseline also says how many elements may err by how much (`many_errors`), so that one element that is hard to
compute does not excuse all others. Masks of NaN and of both infinities must match exactly. The idea that a kernel may
err a small multiple of what a low-precision run errs is that of FlashAttention's tests; the per-element unit
is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_klineage.operators.base import Operator
from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors

SLACK = 10.0
"""How many times the baseline's error a kernel may make: summation order alone gives factors up to about 6."""

RMS_SLACK, LEAST_RMS, RMS_ELEMENTS = 3.0, 0.4, 1024
"""The same for the root of the mean square of so many elements at least, which summation order hardly moves, and what
is taken for the baseline's where that is smaller: about what rounding to the output's type makes."""

NEAR_LIMIT = 1 / 64
"""How near to the end of a type's range, relatively, an answer leaves open whether it is infinite."""

LENIENCE = 3.0
"""How many times its bound a kernel may err on undeclared inputs: they are there for gross errors."""

LEVEL = 4.0
"""Between two levels at which elements are counted, in errors of the baseline."""

ZERO_ROUNDOFF = 1e-30
"""What rounding an input of zero may change, so that a jump of the function there shows."""
ZERO_TIE = 1e-6
"""The same for outputs of integers: by so much, that a tie of zeros is broken even after an exponential."""

MISROUNDED = 1 / 16
"""Share of an output of 8-bit floats that may be another number than the nearest. Where their rounding is the error,
its size does not tell rounding from cutting off; in float32 one element in 100,000 falls on the other side."""

UNIT_ROUNDOFF = {
    "fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3,
}  # fmt: skip

HALF_SMALLEST = {
    "fp64": 2.0**-1074, "fp32": 2.0**-150, "fp16": 2.0**-25, "bf16": 2.0**-134, "fp8_e4m3": 2.0**-10,
    "fp8_e5m2": 2.0**-17,
}  # fmt: skip
"""Rounding error of a result that is too small to be a normal number."""


class Expected:
    """The oracle's answer for one set of inputs, with the bound that follows from the baseline.

    `outputs` are float64 (or integer) tensors by name; `bounds` are errors in rounding units by name. With `rounded`,
    what rounding the inputs once changes in the outputs, the units are larger by that and the bounds are lenient.
    """

    def __init__(
        self, operator: Operator, case: KernelCase, inputs: Tensors, rounded: Callable[[Tensors], Tensors] | None = None
    ) -> None:
        self.operator, self.case, self.inputs = operator, case, inputs
        self.outputs = operator.oracle(case, inputs)
        self.bounds: dict[str, float] = {}
        self.counts: dict[str, list[int]] = {}
        """By output, how many elements of the baseline err by more than 1, LEVEL, LEVEL squared, ... units."""
        self.roundings: dict[str, float] = {}
        """By output of 8-bit floats, how many elements may be another number than the nearest."""
        self.rms_bounds: dict[str, float] = {}
        """By output, what the root of the mean square of errors may be, where that is bounded."""
        if operator.exact:
            self.units: Tensors = {}
            self.bounds = dict.fromkeys(self.outputs, 0.0)
            return
        more = rounded(self.outputs) if rounded else {}
        self.units = operator.error_scale(case, inputs, self.outputs)
        self.units |= {name: self.units[name] + more[name] for name in more}
        fixed = operator.fixed_bounds(case)
        if not rounded:
            self.bounds = {name: fixed[name] for name in self.outputs if name in fixed}
        if len(self.bounds) < len(self.outputs):
            self._bound(operator.slacks(case), fixed, LENIENCE if rounded else 1.0)

    def _bound(self, slacks: dict[str, float], fixed: dict[str, float], lenience: float) -> None:
        """Bounds from the baseline, of outputs that have none yet; `fixed` are those that the user declares."""
        baseline = self.operator.baseline_output(self.case, self.inputs)
        for name, expected in self.outputs.items():
            if name in self.bounds:
                continue
            if lenience == 1:
                expected = self.outputs[name] = with_infinities(expected, baseline[name])
            actual = at_limit(baseline[name], expected)
            errors = error_tensor(actual, expected, self.units[name])
            error = largest(errors, actual, expected)
            moved = error == 0 and self.operator.moves_alone(self.case)
            slack = fixed[name] if name in fixed else 0.0 if moved else slacks.get(name, SLACK)
            self.bounds[name] = slack and lenience * slack * max(1.0, error)
            if errors.device.type == "cpu" and errors.numel() >= RMS_ELEMENTS and not self.operator.counts_errors:
                self.rms_bounds[name] = RMS_SLACK * max(LEAST_RMS, root_mean_square(errors))
            if self.operator.counts_errors and lenience == 1:
                self.counts[name] = levels(errors, error)
            if baseline[name].is_floating_point() and baseline[name].element_size() == 1 and lenience == 1:
                found = misrounded(baseline[name], expected)
                self.roundings[name] = max(SLACK * found, MISROUNDED * expected.numel(), 1.0)

    def errors(self, actual: Tensors) -> dict[str, float]:
        """Largest error of every output in rounding units; infinite where the masks of non-finite values differ.

        Where more elements err than may, as many bounds as they exceed what is allowed to so many.
        """
        if self.operator.exact:
            return self.operator.mismatch_count(self.case, self.inputs, self.outputs, actual)
        return {name: self._error(name, actual[name]) for name in self.outputs}

    def _error(self, name: str, actual: torch.Tensor) -> float:
        actual = at_limit(actual, self.outputs[name])
        errors = error_tensor(actual, self.outputs[name], self.units[name])
        error = largest(errors, actual, self.outputs[name])
        if name in self.rms_bounds and error <= self.bounds[name]:
            times = root_mean_square(errors) / self.rms_bounds[name]
            return max(error, self.bounds[name] * times) if times > 1 else error
        if name in self.roundings and error <= self.bounds[name]:
            return max(error, self.bounds[name] * misrounded(actual, self.outputs[name]) / self.roundings[name])
        if name not in self.counts or not SLACK * LEVEL < error <= self.bounds[name]:
            return error
        return max(error, self.bounds[name] * many_errors(errors, self.counts[name]))

    def accepts(self, actual: Tensors) -> bool:
        """True when no output errs by more than its bound."""
        return all(error <= self.bounds[name] for name, error in self.errors(actual).items())


def with_infinities(expected: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """An answer with infinities where it is beyond the range of the type, which the baseline has, and not near its end.

    As it is where the baseline has none.
    """
    import torch

    if not has_infinities(baseline):
        return expected
    beyond = expected.abs() > (1 + NEAR_LIMIT) * torch.finfo(baseline.dtype).max
    return torch.where(beyond, expected.sign() * float("inf"), expected)


def at_limit(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """`actual`, with finite expected numbers in the place of infinities of their sign, near the end of the range."""
    import torch

    if not has_infinities(actual):
        return actual
    near = expected.isfinite() & (expected.abs() > (1 - NEAR_LIMIT) * torch.finfo(actual.dtype).max)
    return torch.where(near & actual.isinf() & (actual.sign() == expected.sign()), expected, actual)


def has_infinities(values: torch.Tensor) -> bool:
    """Whether some of these numbers, of more than 8 bits, are infinite."""
    return values.is_floating_point() and values.element_size() > 1 and bool(values.isinf().any())


def root_mean_square(errors: torch.Tensor) -> float:
    """Of those that are finite."""
    found = float(errors.norm()) / math.sqrt(errors.numel())
    return found if math.isfinite(found) else float(errors[errors.isfinite()].norm()) / math.sqrt(errors.numel())


def misrounded(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements of 8-bit floats are not the number of their type that is nearest to the expected one."""
    nearest, found = expected.to(actual.dtype).double(), actual.double()
    return int(((nearest != found) & ~(nearest.isnan() & found.isnan())).sum())


def levels(errors: torch.Tensor, largest: float) -> list[int]:
    """How many errors are above 1, LEVEL, LEVEL squared, ..., up to the largest one."""
    found, level = [], 1.0
    above = errors[errors > level] if level <= largest < float("inf") else errors
    while level <= largest < float("inf"):
        found.append(int((above > level).sum()))
        level *= LEVEL
    return found


def many_errors(errors: torch.Tensor, counts: list[int]) -> float:
    """How many times too large the errors of too many elements are; up to 1 is right.

    As many elements as err by more than a level in the baseline may err by more than SLACK times the next one.
    """
    worst = 0.0
    for power, count in enumerate(counts):
        allowed = SLACK * LEVEL ** (power + 1)
        beyond = errors[errors > allowed]
        if beyond.numel() > count:
            worst = max(worst, float(beyond.topk(count + 1).values[-1]) / allowed)
    return worst


def error_tensor(actual: torch.Tensor, expected: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """|actual - expected| / unit of every element."""
    import torch

    # A boolean that was never written may be neither true nor false; its byte says so.
    actual = actual.view(torch.uint8) if actual.dtype is torch.bool else actual
    return (actual.double() - expected).abs_().div_(unit)


def largest_error(actual: torch.Tensor, expected: torch.Tensor, unit: torch.Tensor) -> float:
    """max |actual - expected| / unit; infinity when NaN or infinities do not stand in the same places."""
    return largest(error_tensor(actual, expected, unit), actual, expected)


def largest(difference: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of these errors, of `actual`; infinity when NaN or infinities do not stand in the same places."""
    import torch

    worst = float(difference.max()) if difference.numel() else 0.0
    if worst == worst and worst != float("inf"):
        return worst
    values = actual.double()
    if not torch.equal(values.isnan(), expected.isnan()):
        return float("inf")
    infinite = expected.isinf()
    if not torch.equal(values.isinf(), infinite) or not torch.equal(values[infinite], expected[infinite]):
        return float("inf")
    finite = expected.isfinite()
    return float(difference[finite].max()) if bool(finite.any()) else 0.0


def rounded_inputs(
    operator: Operator, case: KernelCase, inputs: Tensors, expected: Tensors, random: torch.Generator
) -> Tensors:
    """What rounding every input once changes in the outputs, by element and row: root of the mean square of two draws.

    Infinite for an output of integers that changes: there a right kernel may answer otherwise.
    """
    import torch

    found = {name: torch.zeros_like(values, dtype=torch.float64) for name, values in expected.items()}
    for _ in range(2):
        moved = operator.oracle(case, {name: rounding_perturbed(tensor, random) for name, tensor in inputs.items()})
        for name, values in expected.items():
            squares = (moved[name] - values).double().square_()
            found[name].add_(squares.nan_to_num_(0.0, float("inf"), float("inf")), alpha=0.5)
    whole = [name for name, values in expected.items() if not values.is_floating_point()]
    moved = operator.oracle(case, {
        name: rounding_perturbed(tensor, random, ZERO_TIE) for name, tensor in inputs.items()
    }) if whole else {}  # fmt: skip
    for name in whole:
        found[name].add_((moved[name] - expected[name]).double().square_())
    for name, squares in found.items():
        row = squares.mean(dim=-1, keepdim=True) if squares.dim() else squares
        jumps = not expected[name].is_floating_point() and bool((squares > 0).any())
        found[name] = squares + float("inf") if jumps else squares.sqrt_().add_(row.sqrt())
    return found


def rounding_perturbed(tensor: torch.Tensor, random: torch.Generator, zero: float = ZERO_ROUNDOFF) -> torch.Tensor:
    """A tensor of floats in float64, every element off by a rounding error of its type, a zero by about `zero`.

    Others are as they are.
    """
    import torch

    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=random, device=tensor.device).double()
    factor = noise.mul(torch.finfo(tensor.dtype).eps / 2).add_(1)
    return factor.mul_(tensor.double()).add_(noise, alpha=zero)


def summation_variance(squares: torch.Tensor, total: torch.Tensor, terms: float | torch.Tensor) -> torch.Tensor:
    """Expected squared error of adding `terms` products one after the other, in squared unit roundoffs.

    Every partial sum is rounded once. After i of n terms its expected square is (i/n) `squares` + (i/n)^2 `total`^2,
    where `squares` is the sum of the squared terms; summed over i that gives n/2 `squares` + n/3 `total`^2. So terms of
    one sign have a larger unit than terms that cancel. Changes `squares` in place and returns it.
    """
    return squares.div_(2).add_(total.square(), alpha=1 / 3).mul_(terms)


def output_rounding(dtype: str, expected: torch.Tensor) -> torch.Tensor:
    """The largest error of rounding `expected` to `dtype` once."""
    return expected.abs().mul_(UNIT_ROUNDOFF[dtype]).add_(HALF_SMALLEST[dtype])
