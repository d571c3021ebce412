"""Readings of a GPU: clocks, power, temperature, and what holds clocks back. Who else is on it is in neighbours.py."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from statistics import median
from typing import Any

from pytest_klineage.gate.host.nvml import Nvml, open_nvml, smi_rows
from pytest_klineage.records.device import Gpu, GpuReadings, GpuState, Span

THROTTLE = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting", "board_limit", "reliability",
)  # fmt: skip
"""Names of the bits of NVML's clock event reasons, from the lowest (nvml.h, nvmlClocksEventReason...)."""
CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU, MEMORY_V2 = 1, 2, 0, 0x02000028
"""NVML's own numbers (nvml.h), which never change; the last asks for used memory without what the driver reserves."""
SMI_FIELDS = (
    "clocks.sm", "clocks.mem", "power.draw", "enforced.power.limit", "temperature.gpu", "utilization.gpu",
    "memory.used", "clocks_event_reasons.active",
)  # fmt: skip


def read_state(gpu: Gpu) -> GpuState:
    """One full reading: from NVML, else from a run of nvidia-smi, else one without any figure."""
    nvml = open_nvml()
    if nvml is None:
        rows = smi_rows(SMI_FIELDS, gpu.uuid)
        return _state_from_smi(rows[0]) if rows else GpuState()
    with closing(nvml):
        handle = nvml.handle(gpu.uuid)
        return GpuState() if handle is None else _state_from_nvml(nvml, handle, full=True)


class GpuMeter:
    """Readings of one GPU while it is timed; close it.

    Take a sample at the end of each timed block, before the GPU goes idle: clocks and reasons are those of the moment.
    A sample is six calls to NVML. No file is opened and no process started; what it cost is in the summary. Without
    NVML a meter reads nothing: nvidia-smi would disturb what is timed. Not for several threads at once.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._nvml = open_nvml()
        self._handle: Any = self._nvml.handle(gpu.uuid) if self._nvml else None
        self._states: list[GpuState] = []
        self._costs_ms: list[float] = []

    def sample(self) -> GpuState:
        """Read the GPU and remember it: clocks, power, its limit, temperature, reasons; not utilization or memory."""
        if self._nvml is None or self._handle is None:
            return GpuState()
        started = time.perf_counter()
        state = _state_from_nvml(self._nvml, self._handle, full=False)
        self._costs_ms.append(1e3 * (time.perf_counter() - started))
        self._states.append(state)
        return state

    def summary(self) -> GpuReadings:
        """All samples in a few figures."""
        return summarise(self._states, self._costs_ms)

    def close(self) -> None:
        """Let go of NVML; a second call does nothing. The summary stays."""
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            nvml.close()


def summarise(states: Iterable[GpuState], costs_ms: Iterable[float] = ()) -> GpuReadings:
    """Readings in a few figures: smallest, median and largest of each, and how often each reason was in force."""
    taken = list(states)
    limits = [state.power_limit_w for state in taken if state.power_limit_w is not None]
    return GpuReadings(
        readings=len(taken),
        sm_clock_mhz=_span(state.sm_clock_mhz for state in taken),
        memory_clock_mhz=_span(state.memory_clock_mhz for state in taken),
        power_w=_span(state.power_w for state in taken),
        power_limit_w=min(limits, default=None),
        temperature_c=_span(state.temperature_c for state in taken),
        throttle=dict(sorted(Counter(name for state in taken for name in state.throttle or ()).items())),
        reading_ms=_span(costs_ms),
    )


def throttle_names(bits: int) -> tuple[str, ...]:
    """The reasons in one of NVML's bit masks. A bit that is newer than this table is called by its number."""
    positions = range(bits.bit_length())
    return tuple(
        THROTTLE[position] if position < len(THROTTLE) else f"bit_{position}"
        for position in positions
        if bits >> position & 1
    )


def _span(values: Iterable[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    return Span(min(known), median(known), max(known)) if known else None


def _state_from_nvml(nvml: Nvml, handle: Any, *, full: bool) -> GpuState:
    """A reading; with `full` also what says more about others than about a timing, and costs more."""
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:
        # The name before driver 535.
        reasons = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    utilization = nvml.ask("nvmlDeviceGetUtilizationRates", handle) if full else None
    return GpuState(
        sm_clock_mhz=nvml.ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM),
        memory_clock_mhz=nvml.ask("nvmlDeviceGetClockInfo", handle, CLOCK_MEMORY),
        power_w=_watts(nvml.ask("nvmlDeviceGetPowerUsage", handle)),
        power_limit_w=_watts(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        temperature_c=nvml.ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU),
        throttle=None if reasons is None else throttle_names(reasons),
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_bytes=memory_used(nvml, handle) if full else None,
    )


def memory_used(nvml: Nvml, handle: Any) -> int | None:
    """Bytes in use by everybody on a GPU, without what the driver reserves where it tells them apart."""
    for options in ({"version": nvml.constant("nvmlMemory_v2", MEMORY_V2)}, {}):
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, **options)
        if memory is not None:
            return int(memory.used)
    return None


def _state_from_smi(row: dict[str, str]) -> GpuState:
    def number(field: str, scale: float = 1.0) -> float | None:
        return float(row[field]) * scale if field in row else None

    memory = number("memory.used", 1 << 20)
    bits = row.get("clocks_event_reasons.active")
    return GpuState(
        sm_clock_mhz=number("clocks.sm"),
        memory_clock_mhz=number("clocks.mem"),
        power_w=number("power.draw"),
        power_limit_w=number("enforced.power.limit"),
        temperature_c=number("temperature.gpu"),
        throttle=None if bits is None else throttle_names(int(bits, 16)),
        utilization=number("utilization.gpu", 0.01),
        memory_used_bytes=None if memory is None else int(memory),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
