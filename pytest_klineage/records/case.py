"""KernelCase: what is to be computed, at which size and type, and which implementation it is compared with."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records.definition import Definition

Option: TypeAlias = bool | int | float | str

DTYPES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Short names of data types and their size in bytes."""

INSTRUCTIONS = (
    "bulk_copy", "cluster", "cp_async", "ldmatrix", "mbarrier", "mma", "multicast", "setmaxnreg", "stmatrix",
    "tma_load", "tma_prefetch", "tma_reduce", "tma_store", "wgmma",
)  # fmt: skip
"""Matrix and asynchronous instructions of GPUs that a case may require; surfaces/resources.py knows their opcodes."""


class LibraryPolicy(StrEnum):
    """What to do with a candidate whose work is done by a library or by the framework."""

    FORBID = "forbid"
    """Reject it: the case asks for a kernel (default)."""
    LABEL = "label"
    """Judge it, and say so in the verdict."""
    ALLOW = "allow"
    """Judge it like any kernel."""


class KernelCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operator at one shape and data type against one reference. Build it with `operators.make_case`."""

    operator: str
    """Name of the operator, such as "gemm"."""
    shape: dict[str, int]
    """Size of every named axis, in the operator's order."""
    dtype: str
    """Short name of the main data type, a key of DTYPES."""
    reference: str
    """Name of the implementation that decides what is fast, such as "torch"."""
    options: dict[str, Option] = {}
    """The operator's options that differ from their defaults, such as {"causal": True}."""
    at_least: float = 1.0
    """The speedup over the reference that the kernel must reach, up to the gate's margin."""
    library: LibraryPolicy = LibraryPolicy.FORBID
    also_shapes: tuple[dict[str, int], ...] = ()
    """Further shapes at which the kernel must be right; they are not timed."""
    max_spills: int | None = None
    """Bytes of registers per thread that each GPU kernel may spill to local memory; None for any number."""
    requires: tuple[str, ...] = ()
    """Names of INSTRUCTIONS; each must occur in one of the GPU kernels at least."""
    definition: Definition | None = None
    """Where the operator was defined; None for those that this package ships."""
    reference_variants: tuple[str, ...] = ()
    """Further functions beside a reference that is a function, as "module:function"; the fastest is compared with."""
    reference_prepare: str = ""
    """A function that converts the inputs for such a reference, untimed."""

    def __post_init__(self) -> None:
        if self.at_least <= 0:
            raise UsageError(f"at_least must be positive, got {self.at_least}")
        if self.max_spills is not None and self.max_spills < 0:
            raise UsageError(f"max_spills must not be negative, got {self.max_spills}")
        for name in self.requires:
            if name not in INSTRUCTIONS:
                raise UnknownName("instruction", name, INSTRUCTIONS)

    @property
    def id(self) -> str:
        """Stable name for tables and test ids, such as "gemm-4096x4096x4096-bf16"."""
        parts = [self.operator, "x".join(str(size) for size in self.shape.values()), self.dtype]
        for name, value in sorted(self.options.items()):
            parts.append(name if value is True else f"{name}={value}" if not isinstance(value, str) else value)
        return "-".join(parts)

    def at_shape(self, shape: dict[str, int]) -> KernelCase:
        """The same case at another shape, without further shapes."""
        return msgspec.structs.replace(self, shape=shape, also_shapes=())
