"""The machine that is measured on: its platform, its CPU, and how busy others keep it. GPUs are in gpus.py."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from pathlib import Path

from pytest_klineage.gate.host.locks import machine_lock as machine_lock  # callers know it by this place
from pytest_klineage.records import Machine, platform_name

DEFAULT_CACHE_BYTES = 32 << 20
"""Assumed size of the last-level cache where the system does not say."""
PEAK_FLOPS_PER_CORE = 64 * 6.0e9
"""Fused multiply-adds of two 512-bit units at 6 GHz: no CPU core of today is faster in fp32."""
PEAK_BYTES_PER_CORE = 1.0e12
"""More than any core reads from its cache per second."""


def resolve_platform(name: str) -> str:
    """The canonical platform; "auto" takes that of the first visible GPU that can be judged on, else cpu.

    Raises UnknownName, and UsageError when "auto" cannot tell which GPUs are visible.
    """
    if name.lower() != "auto":
        return platform_name(name)
    # GPUs are looked for only when nobody has named the platform.
    from pytest_klineage.gate.host.gpus import best_platform

    return best_platform()


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache
def last_level_cache_bytes() -> int:
    """Size of the largest cache that sysfs names for CPU 0."""
    sizes = [DEFAULT_CACHE_BYTES // 4]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes) if len(sizes) > 1 else DEFAULT_CACHE_BYTES


def processor_name() -> str:
    """Product name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_cpu(software: dict[str, str], settings: dict[str, str]) -> Machine:
    """The record of this machine for the cpu platform."""
    return Machine(
        platform="cpu",
        device=processor_name(),
        cores=usable_cores(),
        cache_bytes=last_level_cache_bytes(),
        software={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            **software,
        },
        settings=settings,
    )


class LoadMeter:
    """How much of the machine's CPU time others used since the meter was made: processes outside this one's family.

    Reads /proc/stat and /proc/PID/stat (proc(5)), whose unit is a clock tick of usually 10 ms.
    """

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._started = time.monotonic()
        self._busy, self._own = machine_ticks(), family_ticks(os.getpid())

    def foreign_share(self) -> float:
        """Between 0 (the machine was ours) and 1 (it was all others')."""
        seconds = time.monotonic() - self._started
        foreign = (machine_ticks() - self._busy) - (family_ticks(os.getpid()) - self._own)
        return min(1.0, max(0.0, foreign / self._ticks / (seconds * (os.cpu_count() or 1)))) if seconds > 0 else 0.0


def machine_ticks() -> int:
    """Clock ticks that all cores have been busy, or were taken by a hypervisor, since boot; 0 where unknown."""
    with contextlib.suppress(OSError, ValueError):
        user, nice, system, _idle, _wait, irq, soft, steal = Path("/proc/stat").read_text().split()[1:9]
        return sum(map(int, (user, nice, system, irq, soft, steal)))
    return 0


def family_ticks(pid: int) -> int:
    """Clock ticks that a process, its living descendants and their ended children have used."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15]))
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += family_ticks(int(child))
    return total
