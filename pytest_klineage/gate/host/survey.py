"""What this machine has for GPUs: the GPUs, their state, and the libraries for them, which are not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_klineage.errors import UsageError
from pytest_klineage.gate.host.cpu import family_pids
from pytest_klineage.gate.host.gpus import VISIBLE, all_gpus, architecture, platform_of, unfit, visible_gpus
from pytest_klineage.gate.host.monitor import read_state
from pytest_klineage.gate.host.neighbours import IDLE_UTILIZATION, foreign_processes
from pytest_klineage.records.device import Gpu, GpuState


class GpuPart(NamedTuple):
    """One part for GPUs: there or not, and the command that would add it."""

    name: str
    present: bool
    detail: str
    remedy: str = ""


class OptionalLibrary(NamedTuple):
    """An optional library: the module that is imported, the distributions that bring it, and what it is for."""

    module: str
    distributions: tuple[str, ...]
    purpose: str

    @property
    def remedy(self) -> str:
        return f"pip install {self.distributions[0]}"


LIBRARIES = (
    OptionalLibrary("pynvml", ("nvidia-ml-py",), "clocks, power and processes of GPUs"),
    OptionalLibrary("cuda.bindings", ("cuda-bindings",), "memory that processes share on a GPU"),
    OptionalLibrary("triton", ("triton",), "Triton kernels"),
    OptionalLibrary("tilelang", ("tilelang",), "TileLang kernels"),
    OptionalLibrary("flashinfer", ("flashinfer-python",), "the reference flashinfer"),
    OptionalLibrary("fla", ("flash-linear-attention", "fla-core"), "the reference fla"),
)


def gpu_parts() -> Iterator[GpuPart]:
    """Every GPU with its state, then every optional library. Changes nothing; takes a second or two."""
    found = all_gpus()
    if not found:
        yield GpuPart("GPU", False, "NVML and nvidia-smi show none; only the cpu platform can run")
    try:
        seen = visible_gpus(found, os.environ)
    except UsageError as error:
        yield GpuPart("visible GPUs", False, str(error))
        seen = found
    for gpu in found:
        yield from _gpu_parts(gpu, visible=gpu in seen)
    for library in LIBRARIES:
        version = library_version(library)
        detail = version or f"not installed; for {library.purpose}"
        yield GpuPart(library.distributions[0], bool(version), detail, library.remedy)


def library_version(library: OptionalLibrary) -> str:
    """The installed version of a library, "unknown" when it is there without metadata, empty when it is not there."""
    if not importable(library.module):
        return ""
    for distribution in library.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown version"


def importable(module: str) -> bool:
    """Whether a module or package is on the path. Only looks: nothing of it is imported, not even its parents."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or not rest:
        return spec is not None
    inside = Path(*rest)
    return any(Path(folder, inside).is_dir() for folder in spec.submodule_search_locations or ())


def _gpu_parts(gpu: Gpu, *, visible: bool) -> Iterator[GpuPart]:
    name, problem = f"GPU {gpu.index}", unfit(gpu)
    known = platform_of(gpu) or f"{architecture(gpu)}, no platform of ours"
    size = f"{gpu.memory_bytes / (1 << 30):.0f} GiB"
    cache = f", L2 {gpu.l2_bytes >> 20} MiB" if gpu.l2_bytes else ""
    versions = f"driver {gpu.driver or 'unknown'}" + (f" for CUDA {gpu.cuda}" if gpu.cuda else "")
    hidden = "" if visible else f", hidden by {VISIBLE}"
    usable = bool(platform_of(gpu)) and not problem
    yield GpuPart(name, usable, f"{gpu.name} ({known}), {size}{cache}, {versions}, {gpu.uuid}{hidden}", problem)
    yield GpuPart(f"{name} now", True, _state_line(read_state(gpu)))
    yield _use_part(gpu, name)
    if gpu.persistence is False:
        detail = "off: the driver is loaded again for every program, and clocks start low"
        yield GpuPart(f"{name} persistence", False, detail, f"sudo nvidia-smi -i {gpu.index} -pm 1")


def _state_line(state: GpuState) -> str:
    """A reading in one line, without what the driver did not say."""
    facts = [
        f"SM {state.sm_clock_mhz:.0f} MHz" if state.sm_clock_mhz is not None else "",
        f"memory {state.memory_clock_mhz:.0f} MHz" if state.memory_clock_mhz is not None else "",
        f"{state.power_w:.0f} W" if state.power_w is not None else "",
        f"limit {state.power_limit_w:.0f} W" if state.power_limit_w is not None else "",
        f"{state.temperature_c:.0f} C" if state.temperature_c is not None else "",
        f"held back by: {', '.join(state.throttle) or 'nothing'}" if state.throttle is not None else "",
    ]
    return ", ".join(word for word in facts if word) or "the driver says nothing about clocks and power"


def _use_part(gpu: Gpu, name: str) -> GpuPart:
    """Whether somebody uses the GPU. Nothing of ours runs on it now, so every use is somebody else's."""
    others = foreign_processes(gpu, family_pids(os.getpid()), quiet=True)
    if others.processes:
        listed = ", ".join(f"{process.pid} {process.command}".rstrip() for process in others.processes)
        return GpuPart(
            f"{name} use", False, f"busy: {listed}", "end these processes, or name another GPU in " + VISIBLE
        )
    busy = f"{100 * others.utilization:.0f} % busy" if others.utilization is not None else "use unknown"
    if (others.utilization or 0.0) > IDLE_UTILIZATION:
        return GpuPart(f"{name} use", False, f"{busy}, by processes that cannot be seen from here")
    used = "" if others.memory_used_bytes is None else f", {others.memory_used_bytes >> 20} MiB in use"
    said = "no other process" if others.known else f"{busy} ({others.unknown_because})"
    return GpuPart(f"{name} use", True, said + used)
