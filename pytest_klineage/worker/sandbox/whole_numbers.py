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
REFUSED = 'it computes what has fractions; this case asks for a kernel of its own (library="forbid")'
KINDS = {"torch.int64": "q", "torch.int32": "i", "torch.float32": "f", "torch.float64": "d"}
"""By type, the letter that Python's arrays have for it; of other types a copy is converted."""
KEPT = 16
"""Ranges that are kept, so that a call with the same numbers costs a copy."""


def stand_in(refuse: Callable[..., None]) -> Callable[..., Any]:
    """The replacement; it calls `refuse` for numbers with fractions."""

    def arange(start: Any, end: Any, step: Any = 1, *, out: torch.Tensor) -> torch.Tensor:
        if not (whole(start) and whole(step)):
            refuse()
        kind = str(out.dtype)
        # In this type the framework drops the fraction of the end as well.
        last = int(end) if kind == "torch.int64" and math.isfinite(end) else bound(end, step)
        written(out, numbers(int(start), last, int(step), KINDS.get(kind, "q")))
        return out

    return arange


def whole(number: Any) -> bool:
    """Whether a number has no fraction. Raises ValueError for what is no number."""
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def bound(end: float, step: float) -> int:
    """The whole number before which counting ends. Raises RuntimeError, as the framework does, for none."""
    if not math.isfinite(end):
        raise RuntimeError(f"unsupported range: to {end}")
    return math.ceil(end) if step > 0 else math.floor(end)


@functools.lru_cache(maxsize=KEPT)
def numbers(start: int, end: int, step: int, kind: str) -> array.array[Any]:
    """Every step-th number. Raises RuntimeError, as the framework does, where steps do not lead to the end."""
    if step == 0 or (end - start) * step < 0:
        raise RuntimeError("step must be nonzero, and lead from the start to the end")
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
