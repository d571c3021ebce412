"""What a surface is: how source becomes loadable, and how a loaded kernel is called."""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import msgspec

from pytest_klineage.errors import KlineageError
from pytest_klineage.records import Build, Code, KernelSource, Placement, Slot, Surface

if TYPE_CHECKING:
    import torch

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


class MappedMemory(Protocol):
    """A mapped arena inside a worker, in host or device memory."""

    address: int
    stream: int
    """The CUDA stream that calls go to; 0 on a CPU."""

    @property
    def bytes(self) -> torch.Tensor:
        """All of it as a tensor of bytes."""


class Memory:
    """A mapped arena in host memory: its address, and its bytes for those who want a buffer."""

    stream = 0

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    @functools.cached_property
    def bytes(self) -> torch.Tensor:
        """All of it as a tensor of bytes."""
        import torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)


class SurfaceBackend(ABC):
    """One language. Instances are stateless; `build` runs in the judge, `load` in a worker.

    A package registers one of its own under the entry point `pytest_klineage.surfaces`.
    """

    surface: ClassVar[Surface]
    """Its name; of another package's, a plain string."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of another package's: suffixes of files that are meant when the user names no surface."""
    platforms: ClassVar[tuple[str, ...]]
    needs_torch: ClassVar[bool]
    """Whether the worker must have torch loaded. One that need not has no library to lean on."""
    allow_processes: ClassVar[bool] = False
    """Whether a worker may start processes, as a just-in-time compiler does."""

    def recipe(self, source: KernelSource, *, platform: str) -> str:
        """Build-request digest, independent of the installed toolchain; empty for a surface without artifacts.

        It covers source, flags, ABI header and architecture, and leaves out compilers and the versions of headers
        that are asked for by name: a machine without a compiler must come to the same one. Raises SurfaceFailure for
        a source that cannot be built, such as one with a flag that is not allowed.
        """
        return ""

    @abstractmethod
    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        """Build for a platform ("cpu", "sm90", "sm120"), or take from the cache; no device is needed.

        Raises SurfaceFailure with the compiler's own words.
        """

    @abstractmethod
    def load(self, artifact: Path, entry: str, module: str) -> LoadedKernel:
        """Load in this process. Raises SurfaceFailure when the entry is missing."""


class LoadedKernel(ABC):
    """A kernel in this process."""

    copied_under_the_clock: ClassVar[bool] = True
    """Whether what it returns is copied to the outputs as a part of its call: nothing can be computed after that."""

    @abstractmethod
    def bind(self, memory: MappedMemory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        """Prepare a call on one slot, so that the timed call does nothing but call."""


def data_address(memory: MappedMemory, placement: Placement) -> int:
    """Address of a tensor's first element in this process."""
    return memory.address + placement.offset
