"""The machine that is measured on: its CPU, and how busy others keep it. GPUs are in gpus.py."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pytest_klineage.records import Machine

DEFAULT_CACHE_BYTES = 32 << 20
"""Assumed size of the last-level cache where the system does not say."""
DEFAULT_L2_BYTES = 2 << 20
"""The same of a core's L2."""
FLUSH_BYTES = 64 << 20
"""What is written between two calls at least, where twice the last-level cache is more."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""For glibc: large tensors lie in memory that the process keeps, up to 1 GiB of it unused, instead of in pages that the
system clears again for every one of them: a third of an oracle's CPU time, and half of PyTorch's time for a convolution
of 1 ms (950 page faults a call) until the process happens to have freed a larger block."""
PEAK_HZ = 6.0e9
"""No CPU of today has a higher clock; those with matrix units stay below half of it."""
VECTOR_FLOPS = 64
"""Operations per cycle and core of two 512-bit units that multiply and add in fp32."""
FLOAT_UNITS = {
    "avx512_bf16": 128, "avx512_fp16": 128, "amx_tf32": 512, "amx_bf16": 1024, "amx_fp16": 1024, "amx_complex": 1024,
    "amx_fp8": 2048,
}  # fmt: skip
"""Operations per cycle and core of units for short floating-point numbers, by the flag of the CPU that names them. One
AMX tile product of bf16 is 16 x 16 x 32 multiply-adds in 16 cycles."""
INTEGER_UNITS = {"avx_vnni": 128, "avx512_vnni": 256, "amx_int8": 2048}
"""The same for short integers."""
PEAK_BYTES_PER_CORE = 1.0e12
"""More than any core reads from its cache per second."""


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache
def last_level_cache_bytes() -> int:
    """Size of the largest cache that sysfs names for CPU 0."""
    return max(cache_sizes().values(), default=DEFAULT_CACHE_BYTES)


def cache_sizes(folder: Path = CACHES) -> dict[int, int]:
    """Bytes of the data caches of CPU 0 by level, the last level at least a quarter of the default."""
    sizes: dict[int, int] = {}
    for index in folder.glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            level, text = int((index / "level").read_text()), (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            sizes[level] = max(sizes.get(level, 0), int(text.rstrip("KM")) * unit)
    if sizes:
        sizes[max(sizes)] = max(sizes[max(sizes)], DEFAULT_CACHE_BYTES // 4)
    return sizes


def flush_size(operand_bytes: int, sizes: Mapping[int, int]) -> int:
    """Bytes to write so that nothing of a call's operands is left in caches of these `sizes` by level.

    Twice the last level always does. A virtual machine may name the whole host's hundreds of MiB, of which it gets a
    few; writing them takes so long that the threads of what is timed have gone to sleep. What a call can have left in
    a cache is no more than it touches, so FLUSH_BYTES do where the operands are smaller, and four times the L2 and
    twice the operands where they are not.
    """
    last = max(sizes.values(), default=DEFAULT_CACHE_BYTES)
    return min(2 * last, max(FLUSH_BYTES, 4 * sizes.get(2, DEFAULT_L2_BYTES) + 2 * operand_bytes))


def cpu_flags(text: str) -> frozenset[str]:
    """The instruction sets in the text of /proc/cpuinfo: of its first processor."""
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def peak_flops_per_core(flags: Collection[str], dtype: str) -> float:
    """Operations per second that no core with these `flags` exceeds on numbers of a type.

    Floating-point types have one peak: products of fp32 can be put together from a few of bf16.
    """
    units = INTEGER_UNITS if dtype.startswith("int") else FLOAT_UNITS
    return max(VECTOR_FLOPS, *(most for flag, most in units.items() if flag in flags), 0) * PEAK_HZ


@functools.lru_cache
def flags_here() -> frozenset[str]:
    """The instruction sets of this machine; none where the system does not say."""
    with contextlib.suppress(OSError):
        return cpu_flags(Path("/proc/cpuinfo").read_text())
    return frozenset()


def processor_name() -> str:
    """Product name of the CPU, on x86 with its family and model: "AMD EPYC" alone is any of five generations."""
    with contextlib.suppress(OSError):
        if name := cpu_name(Path("/proc/cpuinfo").read_text()):
            return name
    return platform.processor() or platform.machine()


def cpu_name(text: str) -> str:
    """The name in the text of /proc/cpuinfo: of its first processor; empty where it has none."""
    first = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    said = {name.strip(): value.strip() for name, _, value in first}
    family, model = said.get("cpu family"), said.get("model")
    numbers = f" (family {family}, model {model})" if family and model else ""
    return said["model name"] + numbers if said.get("model name") else ""


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
    return sum(map(_ticks, _family(pid)))


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, _stat(pid)[11:15]))
    return 0


def family_pids(pid: int) -> frozenset[int]:
    """A process and its living descendants."""
    return frozenset(_family(pid))


def _family(pid: int) -> list[int]:
    """The same, parents first: what a child that ends meanwhile has used is not counted twice."""
    children = _listed_children if _lists_children() else _children_by_parent()
    found: dict[int, None] = {}
    ahead = [pid]
    while ahead:
        one = ahead.pop()
        if one not in found:
            found[one] = None
            ahead += children(one)
    return list(found)


@functools.cache
def _lists_children() -> bool:
    """Whether Linux was built to list a process's children (CONFIG_PROC_CHILDREN)."""
    return Path("/proc/thread-self/children").exists()


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _children_by_parent() -> Callable[[int], list[int]]:
    """The same from the parent that every process names, read once for all of them."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.setdefault(int(_stat(int(path.name))[1]), []).append(int(path.name))
    return lambda pid: found.get(pid, [])


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says after the process's name, which may hold anything: from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
