"""Records of a GPU: what it is, its state while it was timed, and who else used it. How to ask is in gate/."""

from __future__ import annotations

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of this machine. Its UUID names it everywhere: indices change with CUDA_VISIBLE_DEVICES."""

    index: int
    """The driver's own number, in PCI order."""
    uuid: str
    """As CUDA and NVML write it, with "GPU-" in front."""
    name: str
    """Product name: an H100 PCIe is not an H200."""
    capability: str
    """Compute capability, such as "9.0"."""
    memory_bytes: int = 0
    """Size of the device memory, 0 when unknown."""
    l2_bytes: int = 0
    """Size of the L2 cache, 0 when unknown."""
    driver: str = ""
    """Version of the driver, such as "580.95.05"."""
    cuda: str = ""
    """Newest CUDA that the driver runs, such as "13.0"; empty when unknown."""
    mig: bool = False
    """Whether the GPU is cut into instances (MIG)."""
    persistence: bool | None = None
    """Whether the driver stays loaded between programs; None when unknown."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a GPU. What the driver did not say is None."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    """The driver's own average, on data-centre GPUs over about a second."""
    power_limit_w: float | None = None
    """The limit in force."""
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None
    """Why the clocks are not higher: names of NVML's clock event reasons; empty when nothing holds them back."""
    utilization: float | None = None
    """Share of the driver's last sampling period, up to one second, in which a kernel ran: 0 to 1."""
    memory_used_bytes: int | None = None
    """Memory in use by everybody, without what the driver keeps for itself."""


class Span(msgspec.Struct, frozen=True):
    """Smallest, middle and largest of some readings."""

    low: float
    median: float
    high: float


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU did while it was timed: a summary of readings taken between timed blocks."""

    readings: int
    sm_clock_mhz: Span | None = None
    memory_clock_mhz: Span | None = None
    power_w: Span | None = None
    power_limit_w: float | None = None
    temperature_c: Span | None = None
    throttle: dict[str, int] = {}
    """In how many readings each reason held the clocks back."""
    reading_ms: Span | None = None
    """What one reading cost: wall time of its calls to the driver."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has a CUDA context on a GPU."""

    pid: int
    memory_bytes: int | None = None
    """Device memory it holds; None where the driver does not say."""
    command: str = ""
    """Its short name; empty where it is not ours to see."""


class Neighbours(msgspec.Struct, frozen=True, kw_only=True):
    """Who else uses a GPU, as far as that can be known."""

    processes: tuple[GpuProcess, ...] = ()
    """Processes outside of our family that may compute at any time."""
    known: bool = True
    """Whether `processes` is all there is. In a container the driver may hide or renumber processes."""
    unknown_because: str = ""
    """Why `known` is False."""
    utilization: float | None = None
    """0 to 1, where it was looked at while nothing of ours ran; else None."""
    memory_used_bytes: int | None = None
    """Memory in use by everybody, when that was looked at."""
