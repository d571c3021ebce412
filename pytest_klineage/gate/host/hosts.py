"""Where a judgement takes place, the CPU or one GPU: lock, cache, environment and record, and who else is there."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import closing
from typing import NamedTuple

import msgspec

from pytest_klineage.gate.findings import busy_reason
from pytest_klineage.gate.host.cpu import (
    KEPT_MEMORY,
    PEAK_BYTES_PER_CORE,
    LoadMeter,
    cache_sizes,
    describe_cpu,
    family_pids,
    flags_here,
    flush_size,
    peak_flops_per_core,
)
from pytest_klineage.gate.host.gpus import check_toolchain, choose_gpu, describe_gpu
from pytest_klineage.gate.host.monitor import GpuMeter
from pytest_klineage.gate.host.neighbours import busy_gpu_reason, foreign_processes, neighbours_note
from pytest_klineage.gate.host.nvml import open_nvml
from pytest_klineage.gate.host.threads import Binding, binding_here
from pytest_klineage.records import Gpu, GpuReadings, Machine, Neighbours, Peaks, Reason, gpu_platform

GPU_FLUSH_BYTES = 256 << 20
"""What Triton's do_bench writes between two calls: four times the L2 of an H200."""


class MemoryInfo(NamedTuple):
    """Free and total device memory, in bytes."""

    free_bytes: int
    total_bytes: int


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen beside a timing."""

    foreign_load: float = 0.0
    """Share of the machine's CPU time that others used; 0 on a GPU."""
    neighbours: Neighbours | None = None
    readings: GpuReadings | None = None

    def judge(self, timed: Reason, limit: float) -> Reason:
        """The reason of a timing, made inconclusive when others disturbed it; a `limit` of 1 allows everything."""
        if self.neighbours is not None:
            return busy_gpu_reason(timed, self.neighbours, allow=limit >= 1)
        return busy_reason(timed, self.foreign_load, limit)

    def notes(self) -> tuple[str, ...]:
        """What a verdict should say about it."""
        note = neighbours_note(self.neighbours) if self.neighbours is not None else ""
        return (note,) if note else ()


class DeviceMonitor(ABC):
    """Looks at a place while something is timed there; close it."""

    @abstractmethod
    def sample(self) -> None:
        """Take a reading, between two timed blocks."""

    @abstractmethod
    def finish(self) -> Environment:
        """What was seen."""

    def close(self) -> None:  # noqa: B027 - a CPU has nothing to let go of
        """Let go of what was opened."""


class CpuMonitor(DeviceMonitor):
    """Counts the CPU time of other processes."""

    def __init__(self) -> None:
        self._meter = LoadMeter()

    def sample(self) -> None:
        """Nothing: the system keeps the count."""

    def finish(self) -> Environment:
        """The share of others."""
        return Environment(foreign_load=self._meter.foreign_share())


class GpuMonitor(DeviceMonitor):
    """Reads clocks, power and temperature, and who else has a context on the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._meter = gpu, GpuMeter(gpu)

    def sample(self) -> None:
        """Read the GPU."""
        self._meter.sample()

    def finish(self) -> Environment:
        """The readings in a few figures, and the others."""
        found = foreign_processes(self._gpu, family_pids(os.getpid()))
        return Environment(neighbours=found, readings=self._meter.summary())

    def close(self) -> None:
        """Let go of NVML."""
        self._meter.close()


class Host(ABC):
    """The CPU or a GPU."""

    device: str
    """Where tensors lie: "cpu" or "cuda"."""
    lock: str
    """Name of its machine-wide lock."""
    environment: dict[str, str]
    """Variables for the processes that work there."""

    @abstractmethod
    def flush_bytes(self, operand_bytes: int) -> int:
        """Bytes to write between two calls on so many bytes of operands, so that each starts from memory."""

    @abstractmethod
    def machine(self, software: dict[str, str], threads: int) -> Machine:
        """The record of this machine."""

    @abstractmethod
    def preload(self, *, needs_torch: bool) -> str:
        """Which template a worker is forked from."""

    @abstractmethod
    def bound(self, threads: int, dtype: str) -> Peaks:
        """What no such machine exceeds on numbers of a type: what is faster has not been computed."""

    def peaks(self, threads: int, dtype: str) -> Peaks:
        """What this machine allows, by its data sheet; the bound without one."""
        return self.bound(threads, dtype)

    product: str = ""
    """The row of the table of GPUs that `peaks` come from; empty where they are a bound of the platform's."""

    def notes(self) -> tuple[str, ...]:
        """What a reader of times must know of it."""
        return ()

    def check_toolchain(self, toolchain: str) -> None:  # noqa: B027 - a CPU runs what was built on it
        """Raise MissingDependency for a toolchain whose programs do not start here."""

    @abstractmethod
    def monitor(self) -> DeviceMonitor:
        """Begin to look at the place."""

    def binding(self, threads: int) -> Binding:
        """Where OpenMP's threads are bound: nowhere, unless it is the CPU that is timed."""
        return Binding()

    def memory(self) -> MemoryInfo | None:
        """The GPU's memory; None where there is no GPU, or it is not known."""
        return None


class CpuHost(Host):
    """The cores of this machine."""

    device, lock = "cpu", "cpu"

    def __init__(self) -> None:
        self.environment = dict(KEPT_MEMORY)

    def flush_bytes(self, operand_bytes: int) -> int:
        return flush_size(operand_bytes, cache_sizes())

    def machine(self, software: dict[str, str], threads: int) -> Machine:
        return describe_cpu(software, {"threads": str(threads)})

    def preload(self, *, needs_torch: bool) -> str:
        return "torch" if needs_torch else "none"

    def bound(self, threads: int, dtype: str) -> Peaks:
        return Peaks(
            flops=peak_flops_per_core(flags_here(), dtype) * threads, bytes=PEAK_BYTES_PER_CORE * threads
        )  # fmt: skip

    def monitor(self) -> DeviceMonitor:
        return CpuMonitor()

    def binding(self, threads: int) -> Binding:
        return binding_here(threads)


class DeviceHost(Host):
    """One GPU. Raises NoGpu, with the cause, without one of the platform."""

    device = "cuda"

    def __init__(self, platform: str) -> None:
        self.gpu, self.kind = choose_gpu(platform), gpu_platform(platform)
        row = self.kind.product(self.gpu.name)
        self.product = row.name if row else ""
        self.lock = self.gpu.uuid
        self.environment = {"CUDA_VISIBLE_DEVICES": self.gpu.uuid}

    def flush_bytes(self, operand_bytes: int) -> int:
        """The same for all: an L2 is hardly larger than the operands of most cases."""
        return GPU_FLUSH_BYTES

    def machine(self, software: dict[str, str], threads: int) -> Machine:
        return describe_gpu(self.gpu, software, {"threads": str(threads)})

    def preload(self, *, needs_torch: bool) -> str:
        """Always with torch: its profiler names the kernels that the device executes."""
        return "torch"

    def bound(self, threads: int, dtype: str) -> Peaks:
        return self.kind.bound(self.gpu.name)

    def peaks(self, threads: int, dtype: str) -> Peaks:
        return self.kind.peaks(self.gpu.name, dtype)

    def notes(self) -> tuple[str, ...]:
        if self.product:
            return ()
        name = self.kind.name
        return (f"{self.gpu.name} is in no table of data sheets: its floor is that of the fastest {name} there",)

    def check_toolchain(self, toolchain: str) -> None:
        check_toolchain(self.gpu, toolchain)

    def monitor(self) -> DeviceMonitor:
        return GpuMonitor(self.gpu)

    def memory(self) -> MemoryInfo | None:
        """As the driver counts it."""
        nvml = open_nvml()
        if nvml is None:
            return None
        with closing(nvml):
            memory = nvml.ask("nvmlDeviceGetMemoryInfo", nvml.handle(self.gpu.uuid))
        return None if memory is None else MemoryInfo(int(memory.free), int(memory.total))


class CompileOnlyHost(Host):
    """Compile-only target; this host lacks the GPU."""

    device, lock = "cpu", "build"

    def __init__(self, platform: str) -> None:
        self.platform, self.environment = platform, {}

    def flush_bytes(self, operand_bytes: int) -> int:
        return 0

    def machine(self, software: dict[str, str], threads: int) -> Machine:
        """This machine's CPU under the name of the platform that it builds for."""
        return msgspec.structs.replace(describe_cpu(software, {}), platform=self.platform, device="built only")

    def preload(self, *, needs_torch: bool) -> str:
        return "none"

    def bound(self, threads: int, dtype: str) -> Peaks:
        return gpu_platform(self.platform).bound("")

    def monitor(self) -> DeviceMonitor:
        return CpuMonitor()


def host_for(platform: str, stage: str) -> Host:
    """The place of a platform. Raises NoGpu when a whole judgement needs a GPU that is not here."""
    if platform == "cpu":
        return CpuHost()
    return CompileOnlyHost(platform) if stage == "compile" else DeviceHost(platform)
