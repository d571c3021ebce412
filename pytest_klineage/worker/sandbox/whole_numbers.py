"""`torch.arange` without the framework: it makes indices, which are no work, and refuses what it would have to compute.

Between numbers with fractions it multiplies and adds; whole ones are written by Python.
"""

from __future__ import annotations

import array
import ctypes
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPERATOR = "aten::arange.start_out"
"""All others of the name are made of this one."""
KINDS = {"torch.int64": "q", "torch.int32": "i", "torch.float32": "f", "torch.float64": "d"}
"""By type, the letter that Python's arrays have for it; of other types a copy is converted."""
KEPT = 16
"""Ranges that are kept, so that a call with the same numbers costs a copy."""


def stand_in(refuse: Callable[..., None]) -> Callable[..., Any]:
    """The replacement; it calls `refuse` for numbers with fractions."""

    def arange(start: Any, end: Any, step: Any = 1, *, out: torch.Tensor) -> torch.Tensor:
        if not (whole(start) and whole(step)):
            refuse()
        written(out, numbers(int(start), bound(end, step), int(step), KINDS.get(str(out.dtype), "q")))
        return out

    return arange


def whole(number: Any) -> bool:
    """Whether a number has no fraction. Raises ValueError for what is no number."""
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def bound(end: Any, step: Any) -> int:
    """The whole number at which counting ends. Raises RuntimeError, as the framework does, for none."""
    if step == 0 or not math.isfinite(end):
        raise RuntimeError(f"unsupported range: to {end} in steps of {step}")
    return math.ceil(end) if step > 0 else math.floor(end)


@functools.lru_cache(maxsize=KEPT)
def numbers(start: int, end: int, step: int, kind: str) -> array.array[Any]:
    """Every step-th number. Raises RuntimeError, as the framework does, where steps lead away from the end."""
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    return array.array(kind, range(start, end, step))


def written(out: torch.Tensor, values: array.array[Any]) -> None:
    """Write numbers into a tensor, which takes their count as its shape."""
    import torch

    if out.numel() != len(values):
        out.resize_(len(values))
    if str(out.dtype) in KINDS and out.is_contiguous():
        ctypes.memmove(out.data_ptr(), values.buffer_info()[0], len(values) * values.itemsize)
    elif values:
        out.copy_(torch.frombuffer(values, dtype=torch.int64).view(out.shape))
