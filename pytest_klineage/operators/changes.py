"""What becomes of standard normal numbers in the checks of a user's operator that the user has not declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_klineage.operators.distributions import random_index, signs, uniform

if TYPE_CHECKING:
    import torch


def mixed(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows of a quarter each of magnitude SMALL and HUGE, the others of 0.5 to 2; of a vector, elements."""
    import torch

    shape = (*values.shape[:-1], 1) if values.dim() > 1 else values.shape
    kind, scale = uniform(shape, generator), 4 ** (uniform(shape, generator) - 0.5)
    return values * torch.where(kind < 0.25, SMALL, torch.where(kind < 0.5, HUGE, scale))


def constant(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every second slice along the first axis, from the first one on, holds one number; all of a vector does."""
    if values.dim() < 2:
        return values.flatten()[:1].expand(values.numel()).reshape(values.shape)
    found = values.clone()
    found[::2] = values[::2].flatten(1)[:, :1].view(-1, *[1] * (values.dim() - 1))
    return found


def zeros(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same, of zeros; of other floats about half are zeros, too."""
    found = values.masked_fill(values.abs() < MIDDLE, 0)
    found[:: 2 if values.dim() > 1 else 1] = 0
    return found


def outlier(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One row, of a vector one element, but not the first is of magnitude HUGE: a look at others does not show it."""
    found = values.clone()
    rows = found.view(-1, values.shape[-1] if values.dim() > 1 else 1)
    rows[1 + random_index(len(rows) - 1, generator) if len(rows) > 1 else 0] *= HUGE
    return found


def lone(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of magnitude HUGE; one row in four, of a vector one element in four, of VAST."""
    found = values * HUGE
    rows = found.view(-1, values.shape[-1] if values.dim() > 1 else 1)
    rows[random_index(min(4, len(rows)), generator) :: 4] *= VAST / HUGE
    return found


def whole_range(values: torch.Tensor, generator: torch.Generator, dtype: str) -> torch.Tensor:
    """Integers of all of a type's range, its ends among them where there is room for both."""
    import torch

    limits = torch.iinfo(getattr(torch, dtype))
    found = torch.randint(limits.min, limits.max, values.shape, generator=generator, device=values.device)
    for end in (limits.min, limits.max):
        found.view(-1)[random_index(found.numel(), generator)] = end
    return found


def repeated(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The nearest halves, so that numbers of a row are equal here and there; one zero, not two of either sign."""
    return (values * 2).round() / 2 + 0.0


def eighths(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The nearest eighths: wholes, halves and quarters are where a function may have steps."""
    return (values * 8).round() / 8 + 0.0


def signed_zeros(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Zeros of either sign in about half of the places."""
    return values.masked_fill(values.abs() < MIDDLE, 0.0) * signs(tuple(values.shape), generator).to(values)


LARGE, SMALL, TINY, SHIFT, HUGE, VAST = 30.0, 1e-3, 2.0**-26, 8.0, 1e3, 1e6
"""Of magnitude 30, exp overflows in single precision; of 1000, in double precision. Squares of 30 fit in fp16. Integers
of 16 bits, and fp16, end far below a million, those of 32 bits above. Of products of four numbers of magnitude TINY a
kernel may flush what is no normal number in single precision."""
MIDDLE = 0.6745
"""Half of all standard normal numbers are smaller than that."""
FAR, FAR_IN_16_BITS = 1e3, 100.0
"""In spreads, a mean whose square leaves none of the variance in single precision; 16 bits hold no spread beside it."""
WIDER = {"int16": 327, "int32": 10_000_019, "int64": 10_000_000_000_037}
"""By type, what integers of two digits are multiplied by: odd, so that all bits vary, and within the type's range; of
64 bits within what a double holds, which leaves room for sums."""
BEYOND = 1_400_000_000_000_123
"""What integers of 64 bits and two digits are multiplied by where no double may hold them: below 2**57, which leaves
room for 64 of them."""
CHANGES: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "large": lambda values, generator: values * LARGE,
    "small": lambda values, generator: values * TINY,
    "shifted": lambda values, generator: values + SHIFT,
    "lowered": lambda values, generator: (values - SHIFT) * LARGE,
    "far": lambda values, generator: values + FAR,
    "alone": lone,
    "mixed": mixed,
    "constant": constant,
    "zeros": zeros,
    "outlier": outlier,
    "repeated": repeated,
    "signed_zeros": signed_zeros,
    "eighths": eighths,
    "integers_wide": lambda values, generator: values,
    "integers_beyond": lambda values, generator: values * BEYOND,
    "integers_whole": lambda values, generator: values,
    "integers_constant": constant,
    "integers_zeros": zeros,
    "integers_last": zeros,
}
"""Further distributions of a user's operator, by name: what becomes of standard normal numbers, or of integers and
booleans."""
IN_16_BITS: dict[tuple[str, str], Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    ("small", "fp16"): lambda values, generator: values * SMALL,
    ("far", "bf16"): lambda values, generator: values + FAR_IN_16_BITS,
    ("far", "fp16"): lambda values, generator: values + FAR_IN_16_BITS,
    ("alone", "fp16"): lambda values, generator: values * HUGE,
}
"""What becomes of inputs of these types instead."""
INTEGERS = (
    "integers_wide", "integers_beyond", "integers_whole", "integers_constant", "integers_zeros", "integers_last",
)  # fmt: skip
"""Those that leave floats alone; the first depends on the type, see WIDER, the last one on the signature's bound."""
COMPARED, PAIRED, WHOLE = ("repeated", "signed_zeros"), "integers_beyond", "integers_whole"
"""For definitions alone that only compare, for those that put no more than a few integers together, and for those that
put none together."""
STEPPED = "eighths"
"""For definitions with steps."""
ALONE = "alone"
"""A check for every input of floats, which alone is changed, also a vector or a single number."""
BY_SLICE = ("far", "mixed", "constant", "zeros", "outlier")
"""Those that leave vectors alone beside tensors with more axes: a weight of zeros would hide everything else."""
BY_TURNS = "by_turns"
"""Slices along the first axis as they are and, by turns, after each of TURNS: several checks in one, for further shapes
and other values of options."""
TURNS = ("large", "lowered", "far")
