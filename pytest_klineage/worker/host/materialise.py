"""Turning what a Python kernel returned into bytes in the arena, by our own hand and only from plain tensors.

Whose tensors they are decides when: a candidate's are copied under the clock and in the trace, so that nothing can be
computed after them; a reference's are copied afterwards. The methods used here are taken from the C type before any
candidate is imported, so that replacing `torch.Tensor.copy_` or setting attributes on an instance changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from pytest_klineage.records import Code, Placement, Slot
from pytest_klineage.records.messages import ReturnedTensor
from pytest_klineage.references.functions import OutOfPlace
from pytest_klineage.surfaces.base import MappedMemory, SurfaceFailure
from pytest_klineage.surfaces.python import tensor_view

_base: Any = torch._C.TensorBase
COPY: Callable[..., Any] = _base.copy_
STRIDE: Callable[..., tuple[int, ...]] = _base.stride
DATA_PTR: Callable[..., int] = _base.data_ptr
IS_NEG: Callable[..., bool] = _base.is_neg
ELEMENT_SIZE: Callable[..., int] = _base.element_size
SHAPE: Any = _base.shape
DTYPE: Any = _base.dtype
DEVICE: Any = _base.device
LAYOUT: Any = _base.layout
RECORDS: Any = torch.return_types
CONTAINERS = frozenset({tuple, list, *(kind for kind in vars(RECORDS).values() if isinstance(kind, type))})
"""What outputs may be returned in, beside a dict: exactly these types, the last of them those of torch.topk and its
like. No class can derive from those, and looking through any of these runs no code of the candidate's."""
DETACH: Callable[..., Any] = _base.detach


def materialise(result: Any, memory: MappedMemory, slot: Slot) -> tuple[ReturnedTensor, ...]:
    """Copy returned tensors into the slot's outputs. Raises SurfaceFailure naming the output that is amiss."""
    out_of_place = type(result) is OutOfPlace
    tensors = list(dict.values(result)) if out_of_place else returned_tensors(result)
    separate = slot.separate
    placements = slot.outputs if len(tensors) == len(slot.outputs) else separate
    if len(tensors) != len(placements):
        message = f"the kernel returned {len(tensors)} outputs, the operator has {len(separate)}"
        raise SurfaceFailure(Code.OUTPUT_COUNT, message)
    found = []
    for tensor, placement in zip(tensors, placements, strict=True):
        view = tensor_view(memory, placement)
        if placement not in separate and not to_be_copied(tensor, view, placement, may_differ=out_of_place):
            continue
        check(tensor, view, placement.spec.name)
        tensor = DETACH(tensor)
        strides = tuple(STRIDE(tensor))
        if same_order(strides, view) and not IS_NEG(tensor) and not memory.stream:
            # The framework would start its threads for this; waiting for them is no part of the kernel.
            ctypes.memmove(DATA_PTR(view), DATA_PTR(tensor), placement.num_bytes)
        else:
            COPY(view, tensor)
        found.append(ReturnedTensor(address=DATA_PTR(tensor), num_bytes=extent_bytes(tensor, strides), strides=strides))
    return tuple(found)


def returned_tensors(result: Any) -> list[Any]:
    """What a kernel returned, one by one. Raises SurfaceFailure for a container that could compute meanwhile."""
    kind = type(result)
    if kind is dict:
        return list(dict.values(result))
    if kind in CONTAINERS:
        return list(result)
    if isinstance(result, tuple | list | dict):
        named = f"a {kind.__name__}, which is derived from {kind.__mro__[-2].__name__}"
        raise SurfaceFailure(Code.FAKE_TENSOR, f"the kernel returned {named}; return a plain tuple, list or dict")
    return [result]


def to_be_copied(tensor: Any, view: torch.Tensor, placement: Placement, *, may_differ: bool) -> bool:
    """Whether a result for an inout tensor has yet to be copied there: only a reference's may lie elsewhere.

    Raises SurfaceFailure for a kernel that returns another tensor than the one that it was to overwrite.
    """
    name = placement.spec.name
    check(tensor, view, name)
    if DATA_PTR(tensor) == DATA_PTR(view) and STRIDE(tensor) == STRIDE(view):
        return False
    if not may_differ:
        message = f"the kernel returned a new tensor for {name}, which it is to overwrite in place"
        raise SurfaceFailure(Code.OUTPUT_COUNT, message)
    return True


def check(tensor: Any, view: torch.Tensor, name: str) -> None:
    """Raise SurfaceFailure unless `tensor` is a plain dense tensor of the output's device, shape and type."""
    if type(tensor) is not torch.Tensor:
        raise SurfaceFailure(Code.FAKE_TENSOR, f"output {name} is a {type(tensor).__name__}, not a plain torch.Tensor")
    if vars(tensor):
        raise SurfaceFailure(
            Code.FAKE_TENSOR, f"output {name} carries attributes of its own: {sorted(vars(tensor))[:5]}"
        )
    if DEVICE.__get__(tensor) != DEVICE.__get__(view) or LAYOUT.__get__(tensor) is not torch.strided:
        raise SurfaceFailure(Code.FAKE_TENSOR, f"output {name} is not a dense tensor on {DEVICE.__get__(view)}")
    shape, dtype = tuple(SHAPE.__get__(tensor)), DTYPE.__get__(tensor)
    right_shape, right_dtype = tuple(SHAPE.__get__(view)), DTYPE.__get__(view)
    if shape != right_shape:
        raise SurfaceFailure(Code.OUTPUT_SHAPE, f"output {name} has shape {shape}, expected {right_shape}")
    if dtype != right_dtype:
        raise SurfaceFailure(Code.OUTPUT_DTYPE, f"output {name} is {dtype}, expected {right_dtype}")
    overlapping = any(step == 0 and size > 1 for step, size in zip(STRIDE(tensor), shape, strict=True))
    if overlapping:
        raise SurfaceFailure(Code.OUTPUT_STRIDES, f"output {name} repeats one piece of memory (stride 0)")


def same_order(strides: tuple[int, ...], view: torch.Tensor) -> bool:
    """Whether a tensor's elements follow one another as the output's do; the stride of a single one says nothing."""
    return all(
        own == other or size == 1 for own, other, size in zip(strides, STRIDE(view), SHAPE.__get__(view), strict=True)
    )


def extent_bytes(tensor: torch.Tensor, strides: tuple[int, ...]) -> int:
    """Bytes from a tensor's first to past its last element."""
    shape = SHAPE.__get__(tensor)
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return int((last + 1) * ELEMENT_SIZE(tensor))
