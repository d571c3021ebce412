"""KernelCase: what is to be computed, at which size and type, and which implementation it is compared with."""

from __future__ import annotations

import ast
import hashlib
import warnings
from enum import StrEnum
from typing import TypeAlias

import msgspec

from pytest_klineage.errors import UnknownName, UsageError

Option: TypeAlias = bool | int | float | str

DTYPES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Short names of data types and their size in bytes."""

INSTRUCTIONS = (
    "bulk_copy", "cluster", "cp_async", "ldmatrix", "mbarrier", "mma", "multicast", "setmaxnreg", "stmatrix",
    "tcgen05", "tma_load", "tma_prefetch", "tma_reduce", "tma_store", "wgmma",
)  # fmt: skip
"""Matrix and asynchronous instructions of GPUs that a case may require; surfaces/resources.py knows their opcodes."""


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of an operator that comes from a user's file or from another package."""

    source: str
    """File and name, such as "tests/test_softmax.py:softmax"; the file is relative to its project's root."""
    digest: str
    """SHA-256 over the file without its tests, in hexadecimal: see `definition_digest`."""
    package: str = ""
    """The distribution that registers it, with its version, such as "mylib 1.2"; empty for a file of the user's."""


class DefinitionFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a trusted worker process needs to import a definition on this machine. Never part of a record."""

    path: str = ""
    """The defining file; empty for operators that this package ships."""
    files: dict[str, str] = {}
    """Absolute paths of the files that references are functions of, by their names in the case."""
    search: tuple[str, ...] = ()
    """The judge's `sys.path`."""


def definition_digest(text: str) -> str:
    """SHA-256 over a file's lines without its test functions and test classes.

    So a definition stays the same when a test beside it changes. Text that is no Python is taken whole.
    """
    lines = text.splitlines()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an odd escape, which would else be an error under -W error
            body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and is_test(node.name):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            for index in range(first - 1, node.end_lineno or node.lineno):
                lines[index] = ""
    kept = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(kept.encode()).hexdigest()


def is_test(name: str) -> bool:
    """Whether pytest collects a function or class of this name by default."""
    return name.startswith(("test", "Test"))


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
