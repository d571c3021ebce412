"""What a surface is: how source becomes loadable, and how a loaded kernel is called. No surface lives here."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import msgspec

from pytest_klineage.errors import KlineageError
from pytest_klineage.records import Build, Code, KernelSource, Placement, Slot, Surface

Invoke: TypeAlias = Callable[[], Any]
"""Runs a kernel once on the slot it is bound to; returns None, or tensors when the kernel returns its outputs."""


class SurfaceFailure(KlineageError):
    """A kernel that cannot be built, loaded or run. It becomes a reason in a verdict; it never reaches a user."""

    def __init__(self, code: Code, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.log = code, message, log


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that can be loaded: where it lies and how it was made."""

    artifact: Path
    build: Build


class Memory:
    """A mapped arena inside a worker: its address, and its bytes for those who want a buffer."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class SurfaceBackend(ABC):
    """One language. Instances are stateless; `build` runs in the judge, `load` in a worker."""

    surface: ClassVar[Surface]
    platforms: ClassVar[tuple[str, ...]]
    needs_torch: ClassVar[bool]
    """Whether the worker must have torch loaded. One that need not has no library to lean on."""

    @abstractmethod
    def build(self, source: KernelSource, cache: Path, *, timeout_s: float) -> Built:
        """Build, or take from the cache. Raises SurfaceFailure with the compiler's own words."""

    @abstractmethod
    def load(self, artifact: Path, entry: str, module: str) -> Loaded:
        """Load in this process. Raises SurfaceFailure when the entry is missing."""


class Loaded(ABC):
    """A kernel in this process."""

    @abstractmethod
    def bind(self, memory: Memory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        """Prepare a call on one slot, so that the timed call does nothing but call."""


def data_address(memory: Memory, placement: Placement) -> int:
    """Address of a tensor's first element in this process."""
    return memory.address + placement.offset
