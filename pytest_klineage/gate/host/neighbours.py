"""Who else uses a GPU, and what follows for a timing. Processes of ours, or that wait for our lock, are not meant."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pytest_klineage.gate.findings import fails_anyway
from pytest_klineage.gate.host.monitor import memory_used
from pytest_klineage.gate.host.nvml import Nvml, open_nvml
from pytest_klineage.records import Code, Reason
from pytest_klineage.records.device import Gpu, GpuProcess, Neighbours

OUTERMOST_PID_SPACE = "pid:[4026531836]"
"""The machine's own process namespace has this fixed number (Linux, PROC_PID_INIT_INO); any other is a container's."""
WORKER_MODULE = b"pytest_klineage.worker"
"""In the command line of every process of a gate: one that is not ours waits while we hold the GPU's lock."""
IDLE_UTILIZATION = 0.05
"""What an unused GPU may show: a desktop or a monitor."""
SETTLE_S = 1.2
"""Longer than the driver's sampling period (at most 1 s), after which work that has ended is out of its average."""
CONTAINER = "in a container the driver may hide or renumber processes"


def foreign_processes(gpu: Gpu, own_pids: Collection[int], *, quiet: bool = False) -> Neighbours:
    """Processes with a CUDA context on the GPU that are not ours.

    own_pids: our family, as `family_pids` finds it. quiet: the caller says that nothing of ours runs on the GPU, so
    that utilization is others'; it is then read where the list alone cannot be trusted, which takes up to 1.2 s.
    """
    nvml = open_nvml()
    if nvml is None:
        return Neighbours(known=False, unknown_because="NVML is not there (pip install nvidia-ml-py)")
    with contextlib.closing(nvml):
        handle = nvml.handle(gpu.uuid)
        if handle is None:
            return Neighbours(known=False, unknown_because=f"NVML does not know {gpu.uuid}")
        listed = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        unknown = _doubt(listed, own_pids)
        return Neighbours(
            processes=() if listed is None or unknown else _others(listed, own_pids),
            known=not unknown,
            unknown_because=unknown,
            utilization=_settled_utilization(nvml, handle) if unknown and quiet else None,
            memory_used_bytes=memory_used(nvml, handle),
        )


def busy_gpu_reason(timed: Reason, neighbours: Neighbours, *, allow: bool) -> Reason:
    """The reason of a timing, made inconclusive when others could use the GPU meanwhile and that was not allowed.

    Where it is not known who is there, only a look while nothing of ours ran counts: a guess must not cost an honest
    kernel its verdict.
    """
    if allow or fails_anyway(timed):
        return timed
    who = _who(neighbours)
    if not who:
        return timed
    message = f"{who}; measured: {timed.message}. End it, take another GPU, or allow it: --klineage-busy-limit 1"
    return Reason(code=Code.INCONCLUSIVE_BUSY, message=message, evidence={**timed.evidence, **_evidence(neighbours)})


def neighbours_note(neighbours: Neighbours) -> str:
    """What a verdict says about other processes: which were there, or why that is not known; empty without any."""
    if who := _who(neighbours):
        return f"shared GPU: {who}"
    if neighbours.known:
        return ""
    shown = ""
    if neighbours.memory_used_bytes is not None:
        shown = f"; {neighbours.memory_used_bytes >> 20} MiB of its memory were in use, ours included"
    return f"whether others used the GPU is unknown: {neighbours.unknown_because}{shown}"


def _who(neighbours: Neighbours) -> str:
    if neighbours.processes:
        names = ", ".join(f"{process.pid} {process.command}".rstrip() for process in neighbours.processes[:5])
        count = len(neighbours.processes)
        return f"{count} other process{'' if count == 1 else 'es'} computed on the GPU or could have: {names}"
    if (neighbours.utilization or 0.0) > IDLE_UTILIZATION:
        return f"the GPU was {100 * (neighbours.utilization or 0.0):.0f} % busy while nothing of ours ran on it"
    return ""


def _evidence(neighbours: Neighbours) -> dict[str, float | int | str | bool]:
    found: dict[str, float | int | str | bool] = {"foreign_processes": len(neighbours.processes)}
    if neighbours.utilization is not None:
        found["idle_utilization"] = neighbours.utilization
    if neighbours.memory_used_bytes is not None:
        found["memory_used_bytes"] = neighbours.memory_used_bytes
    return found


def _doubt(listed: list[Any] | None, own_pids: Collection[int]) -> str:
    """Why a list of processes cannot be relied on, or nothing.

    On the machine itself the numbers are right. In a container they are when one of ours is among them; a list without
    us is empty because it is hidden, or holds numbers of another namespace.
    """
    if listed is None:
        return "the driver does not list processes here"
    if outermost() or any(process.pid in own_pids for process in listed):
        return ""
    return CONTAINER


def outermost() -> bool:
    """Whether process numbers here are those of the machine, not of a container."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == OUTERMOST_PID_SPACE
    return False


def _others(listed: list[Any], own_pids: Collection[int]) -> tuple[GpuProcess, ...]:
    foreign = (process for process in listed if process.pid not in own_pids and not _waits_for_us(process.pid))
    return tuple(
        GpuProcess(pid=process.pid, memory_bytes=process.usedGpuMemory, command=_command(process.pid))
        for process in sorted(foreign, key=lambda process: int(process.pid))
    )


def _waits_for_us(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return WORKER_MODULE in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def _settled_utilization(nvml: Nvml, handle: Any) -> float | None:
    """Utilization by others. A high one is read again when work of ours that has just ended is out of the average."""
    for wait_s in (0.0, SETTLE_S):
        time.sleep(wait_s)
        rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is None:
            return None
        if rates.gpu / 100 <= IDLE_UTILIZATION:
            break
    return float(rates.gpu) / 100
