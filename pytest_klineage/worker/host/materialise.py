"""Turning what a Python kernel returned into bytes in the arena, by our own hand and only from plain tensors.

The methods used here are taken from the C type before any candidate is imported, so that replacing `torch.Tensor.copy_`
or setting attributes on an instance changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from pytest_klineage.records import Code, Slot
from pytest_klineage.records.messages import ReturnedTensor
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
DETACH: Callable[..., Any] = _base.detach


def materialise(result: Any, memory: MappedMemory, slot: Slot) -> tuple[ReturnedTensor, ...]:
    """Copy returned tensors into the slot's outputs. Raises SurfaceFailure naming the output that is amiss."""
    values = list(result.values()) if type(result) is dict else result
    tensors = list(values) if isinstance(values, tuple | list) else [values]
    if len(tensors) != len(slot.outputs):
        raise SurfaceFailure(
            Code.OUTPUT_COUNT, f"the kernel returned {len(tensors)} outputs, the operator has {len(slot.outputs)}"
        )
    found = []
    for tensor, placement in zip(tensors, slot.outputs, strict=True):
        view = tensor_view(memory, placement)
        check(tensor, view, placement.spec.name)
        tensor = DETACH(tensor)
        strides = tuple(STRIDE(tensor))
        if strides == tuple(STRIDE(view)) and not IS_NEG(tensor) and not memory.stream:
            # The framework would start its threads for this; waiting for them is no part of the kernel.
            ctypes.memmove(DATA_PTR(view), DATA_PTR(tensor), placement.num_bytes)
        else:
            COPY(view, tensor)
        found.append(ReturnedTensor(address=DATA_PTR(tensor), num_bytes=extent_bytes(tensor, strides), strides=strides))
    return tuple(found)


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


def extent_bytes(tensor: torch.Tensor, strides: tuple[int, ...]) -> int:
    """Bytes from a tensor's first to past its last element."""
    shape = SHAPE.__get__(tensor)
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return int((last + 1) * ELEMENT_SIZE(tensor))
