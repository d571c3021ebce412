"""Device memory that two processes share, and the context both need for it.

Memory is made with CUDA's virtual memory management and travels as a file descriptor, as host memory does: no process
needs the other's id, so every worker can live in a process namespace of its own. (cudaIpcMemHandle cannot do that.)
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import DeviceOutOfMemory, HarnessError, MissingDependency

if TYPE_CHECKING:
    import torch

ADDRESS_ALIGNMENT = 0
"""Let the driver choose."""


def initialise() -> None:
    """Make the first visible GPU's primary context current. Raises MissingDependency for what keeps CUDA away."""
    import torch

    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise MissingDependency("cuda-bindings", "pip install 'pytest-klineage[cuda]'")
    if not torch.cuda.is_available():
        raise MissingDependency(
            "a PyTorch that sees the GPU", "pip install torch   (its CUDA build; then run pytest-klineage doctor)"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call] # torch has no types here
    torch.zeros(1, device="cuda")


def call(function: Any, *arguments: Any) -> Any:
    """A function of the driver API. Raises DeviceOutOfMemory, or HarnessError with the driver's name for the error."""
    from cuda.bindings import driver

    error, *values = function(*arguments)
    if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise DeviceOutOfMemory(f"{getattr(function, '__name__', function)} found no memory")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise HarnessError(f"{getattr(function, '__name__', function)} failed: {error.name}")
    return values[0] if values else None


class DeviceMemory:
    """A piece of device memory in this process: its address, and its bytes as a tensor. Free it with `close`."""

    def __init__(self, handle: Any, num_bytes: int, *, stream: int = 0) -> None:
        from cuda.bindings import driver

        self._handle, self.num_bytes = handle, num_bytes
        self.stream = stream
        """The stream that calls on this memory go to, as an integer."""
        self.address = int(call(driver.cuMemAddressReserve, num_bytes, ADDRESS_ALIGNMENT, 0, 0))
        call(driver.cuMemMap, self.address, num_bytes, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location = location()
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(driver.cuMemSetAccess, self.address, num_bytes, [access], 1)
        self.bytes: torch.Tensor = tensor_over(self.address, num_bytes)

    def close(self) -> None:
        """Give the memory back. No tensor over it may be used afterwards."""
        import torch
        from cuda.bindings import driver

        torch.cuda.synchronize()
        call(driver.cuMemUnmap, self.address, self.num_bytes)
        call(driver.cuMemAddressFree, self.address, self.num_bytes)
        call(driver.cuMemRelease, self._handle)


def location() -> Any:
    """The first visible GPU, as the driver names a place for memory."""
    from cuda.bindings import driver

    memory_location = driver.CUmemLocation()
    memory_location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory_location.id = 0
    return memory_location


def allocate(num_bytes: int) -> tuple[DeviceMemory, int]:
    """Device memory of at least `num_bytes`, and a file descriptor by which another process can map it."""
    from cuda.bindings import driver

    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = kind
    wanted.location = location()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = int(call(driver.cuMemGetAllocationGranularity, wanted, minimum))
    num_bytes = -(-num_bytes // step) * step
    handle = call(driver.cuMemCreate, num_bytes, wanted, 0)
    memory = DeviceMemory(handle, num_bytes)
    return memory, int(call(driver.cuMemExportToShareableHandle, handle, kind, 0))


def attach(fd: int, num_bytes: int, *, stream: int) -> DeviceMemory:
    """Map the memory behind a descriptor that `allocate` made in another process; closes the descriptor."""
    from cuda.bindings import driver

    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = call(driver.cuMemImportFromShareableHandle, fd, kind)
    os.close(fd)
    return DeviceMemory(handle, num_bytes, stream=stream)


class _Bytes:
    """What torch needs to see foreign device memory (the CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def tensor_over(address: int, num_bytes: int) -> torch.Tensor:
    """A tensor of bytes over device memory of this process."""
    import torch

    return torch.as_tensor(_Bytes(address, num_bytes), device="cuda")
