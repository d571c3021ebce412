"""When is an output right: errors in units of honest rounding, bounded by a multiple of what an honest run makes.

error  = max over elements of |actual - expected| / rounding_unit
bound  = SLACK * max(1, error of the honest low-precision run)

The unit is per element, so a spike in one place does not excuse an error in another. Masks of NaN and of both
infinities must match exactly. The idea that a kernel may err a small multiple of what an honest low-precision run errs
is that of FlashAttention's tests; the per-element unit is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_klineage.operators.base import Operator
from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors

SLACK = 10.0
"""How many times the honest error a kernel may make: summation order alone gives factors up to about 6."""

UNIT_ROUNDOFF = {
    "fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3,
}  # fmt: skip

HALF_SMALLEST = {
    "fp64": 2.0**-1074, "fp32": 2.0**-150, "fp16": 2.0**-25, "bf16": 2.0**-134, "fp8_e4m3": 2.0**-10,
    "fp8_e5m2": 2.0**-17,
}  # fmt: skip
"""Rounding error of a result that is too small to be a normal number."""


class Expected:
    """The oracle's answer for one set of inputs, with the bound that follows from the honest run.

    `outputs` are float64 (or integer) tensors by name; `bounds` are errors in rounding units by name, given where the
    honest run of another problem of the same distribution has set them.
    """

    def __init__(
        self, operator: Operator, case: KernelCase, inputs: Tensors, bounds: dict[str, float] | None = None
    ) -> None:
        self.operator, self.case, self.inputs = operator, case, inputs
        self.outputs = operator.oracle(case, inputs)
        if operator.exact:
            self.units: Tensors = {}
            self.bounds = dict.fromkeys(self.outputs, 0.0)
            return
        self.units = operator.rounding_unit(case, inputs, self.outputs)
        fixed = operator.fixed_bounds(case) if bounds is None else bounds
        self.bounds = {name: fixed[name] for name in self.outputs if name in fixed}
        if len(self.bounds) < len(self.outputs):
            honest, slacks = operator.honest(case, inputs), operator.slacks(case)
            self.bounds |= {
                name: slacks.get(name, SLACK) * max(1.0, largest_error(honest[name], expected, self.units[name]))
                for name, expected in self.outputs.items()
                if name not in fixed
            }

    def errors(self, actual: Tensors) -> dict[str, float]:
        """Largest error of every output in rounding units; infinite where the masks of non-finite values differ."""
        if self.operator.exact:
            return self.operator.violations(self.case, self.inputs, self.outputs, actual)
        return {
            name: largest_error(actual[name], expected, self.units[name]) for name, expected in self.outputs.items()
        }

    def accepts(self, actual: Tensors) -> bool:
        """True when no output errs by more than its bound."""
        return all(error <= self.bounds[name] for name, error in self.errors(actual).items())


def largest_error(actual: torch.Tensor, expected: torch.Tensor, unit: torch.Tensor) -> float:
    """max |actual - expected| / unit; infinity when NaN or infinities do not stand in the same places."""
    import torch

    # A boolean that was never written may be neither true nor false; its byte says so.
    actual = actual.view(torch.uint8) if actual.dtype is torch.bool else actual
    difference = (actual.double() - expected).abs_().div_(unit)
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
