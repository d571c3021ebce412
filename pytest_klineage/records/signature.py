"""Signature: the tensors and scalars that a case hands to a kernel, and where they lie in shared memory."""

from __future__ import annotations

import math

import msgspec

from pytest_klineage.records.case import DTYPES


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor argument: logical shape and strides in elements."""

    name: str
    dtype: str
    """A key of records.case.DTYPES."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def dense(name: str, dtype: str, *shape: int) -> TensorSpec:
    """A contiguous row-major tensor."""
    return TensorSpec(name=name, dtype=dtype, shape=shape, strides=contiguous_strides(shape))


def permuted(name: str, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> TensorSpec:
    """A dense tensor of logical `shape` whose memory order is `order` (outermost axis first)."""
    inner = contiguous_strides(tuple(shape[axis] for axis in order))
    strides = [0] * len(shape)
    for position, axis in enumerate(order):
        strides[axis] = inner[position]
    return TensorSpec(name=name, dtype=dtype, shape=shape, strides=tuple(strides))


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a kernel in the order of the native ABI.

    A tensor that is among inputs and outputs is one piece of memory, which the kernel overwrites in place.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: dict[str, float] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_elements * DTYPES[spec.dtype] for spec in (*self.inputs, *self.outputs))

    @property
    def inout(self) -> frozenset[str]:
        """Names of the tensors that are overwritten in place."""
        return frozenset(spec.name for spec in self.inputs) & frozenset(spec.name for spec in self.outputs)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in an arena."""

    spec: TensorSpec
    offset: int
    """Bytes from the arena's start to the first element."""
    num_bytes: int


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One complete set of arguments inside an arena."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    @property
    def inout(self) -> tuple[Placement, ...]:
        """Inputs that the kernel overwrites in place: they are outputs too, at the same offset."""
        offsets = {item.offset for item in self.outputs}
        return tuple(item for item in self.inputs if item.offset in offsets)

    @property
    def separate(self) -> tuple[Placement, ...]:
        """Outputs with memory of their own: what a kernel is given as outputs."""
        offsets = {item.offset for item in self.inputs}
        return tuple(item for item in self.outputs if item.offset not in offsets)


class Arena(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of shared memory with several slots, every tensor between guard bands."""

    num_bytes: int
    guard_bytes: int
    slots: tuple[Slot, ...]
    scalars: dict[str, float] = {}
