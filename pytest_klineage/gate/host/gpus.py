"""GPUs: which there are, which of them CUDA may see, and which one fits a platform. Their state is in meters.py."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.gate.host.cpu import usable_cores
from pytest_klineage.gate.host.nvml import Nvml, open_nvml, smi_rows
from pytest_klineage.records import Machine
from pytest_klineage.records.device import Gpu
from pytest_klineage.records.platform import gpu_platform, gpu_platforms

LEAST_DRIVER = 570
"""The first branch of the driver that runs CUDA 12.8: its functions are all that is asked of it."""
LEAST_CUDA = (12, 8)
"""The same with NVIDIA's forward-compatibility package: an older driver that says it runs CUDA 12.8."""
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
SMI_FIELDS = (
    "index", "uuid", "name", "compute_cap", "memory.total", "driver_version", "mig.mode.current", "persistence_mode",
)  # fmt: skip
OTHERWISE = "or judge on the CPU with --klineage-platform cpu"


class NoGpu(UsageError):
    """No GPU of this machine can be used for a platform; the message says why, and what to do next."""


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see, in its order. Raises UsageError as `visible_gpus` does."""
    return visible_gpus(all_gpus(), os.environ)


def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows, in PCI order: from NVML, else from nvidia-smi, else none."""
    nvml = open_nvml()
    if nvml is None:
        return tuple(_from_smi())
    with closing(nvml):
        return tuple(_from_nvml(nvml))


def visible_gpus(found: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of `found` that CUDA_VISIBLE_DEVICES names, by index or by (the beginning of) a UUID.

    As in CUDA, the list ends at the first entry that names nothing, or what it has named before. Raises UsageError for
    indices on a machine of different GPUs, where CUDA counts the fastest first unless CUDA_DEVICE_ORDER says otherwise.
    """
    if VISIBLE not in environment:
        return tuple(found)
    words = [word.strip() for word in environment[VISIBLE].split(",")]
    kinds = sorted({gpu.name for gpu in found})
    if len(kinds) > 1 and any(map(str.isdecimal, words)) and environment.get(ORDER) != "PCI_BUS_ID":
        raise UsageError(
            f"{VISIBLE}={environment[VISIBLE]} is ambiguous on a machine of different GPUs ({', '.join(kinds)}): "
            f"name UUIDs as nvidia-smi -L prints them, set {ORDER}=PCI_BUS_ID, {OTHERWISE}"
        )
    chosen: list[Gpu] = []
    for word in words:
        gpu = _named(word, found)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def platform_of(gpu: Gpu) -> str:
    """The platform that a GPU is, or nothing."""
    return next((item.name for item in gpu_platforms().values() if item.capability == gpu.capability), "")


def unfit(gpu: Gpu) -> str:
    """Why a GPU cannot be judged on, with what would change that; empty when it can."""
    if gpu.mig:
        return (
            f"{gpu.name} is cut into MIG instances, which share clocks and power with their neighbours; "
            f"undo it with `sudo nvidia-smi -i {gpu.index} -mig 0`"
        )
    if numbers(gpu.driver) < (LEAST_DRIVER,) and numbers(gpu.cuda) < LEAST_CUDA:
        return (
            f"the driver {gpu.driver or '(unknown)'} of {gpu.name} does not run CUDA {'.'.join(map(str, LEAST_CUDA))}; "
            f"install driver {LEAST_DRIVER} or newer"
        )
    return ""


def check_toolchain(gpu: Gpu, toolchain: str) -> None:
    """Raise MissingDependency when what a toolchain has built does not start under this GPU's driver.

    A program of one major version of CUDA runs on drivers of that version and of later ones, and on no earlier.
    """
    nvcc, cuda = re.search(r"\bnvcc ([\d.]+)", toolchain), numbers(gpu.cuda)[:1]
    if nvcc is None or not cuda or numbers(nvcc[1])[:1] <= cuda:
        return
    raise MissingDependency(
        f"a toolkit for the driver {gpu.driver} of {gpu.name}, which runs CUDA {gpu.cuda} and not what nvcc {nvcc[1]} "
        "builds,",
        f"apt-get install cuda-toolkit-{cuda[0]}-8   (and export CUDA_HOME=/usr/local/cuda-{cuda[0]}.8)",
    )


def best_platform() -> str:
    """The platform of the first visible GPU that can be judged on, or "cpu". Raises UsageError as `gpus` does."""
    return next((platform_of(gpu) for gpu in gpus() if platform_of(gpu) and not unfit(gpu)), "cpu")


def gpus_for(name: str) -> tuple[Gpu, ...]:
    """The visible GPUs of a platform, in CUDA's order; at least one. Raises NoGpu, UnknownName."""
    wanted = gpu_platform(name).capability
    seen = gpus()
    if not seen:
        raise NoGpu(f"platform {name} needs a GPU of compute capability {wanted}; {_nothing_seen()}")
    matching = [gpu for gpu in seen if gpu.capability == wanted]
    if not matching:
        there = ", ".join(dict.fromkeys(f"{architecture(gpu)} {gpu.name}" for gpu in seen))
        others = [known for known in gpu_platforms() if any(platform_of(gpu) == known for gpu in seen)]
        instead = " or ".join([*others, "cpu"])
        raise NoGpu(f"{name} asked, this machine has {there}; take another machine, or --klineage-platform {instead}")
    fit = tuple(gpu for gpu in matching if not unfit(gpu))
    if not fit:
        raise NoGpu(f"platform {name}: {unfit(matching[0])}, {OTHERWISE}")
    return fit


def choose_gpu(name: str) -> Gpu:
    """The first visible GPU of a platform, such as "sm90". Raises NoGpu without one."""
    return gpus_for(name)[0]


def architecture(gpu: Gpu) -> str:
    """The name that compilers have for a GPU's architecture, such as sm_90."""
    return f"sm_{gpu.capability.replace('.', '')}"


def describe_gpu(gpu: Gpu, software: dict[str, str], settings: dict[str, str]) -> Machine:
    """The record of this machine when a GPU of it is judged on. `software` may name what the workers have reported."""
    return Machine(
        platform=platform_of(gpu) or architecture(gpu),
        device=gpu.name,
        device_uuid=gpu.uuid,
        cores=usable_cores(),
        cache_bytes=gpu.l2_bytes,
        software={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            **{name: version for name, version in (("driver", gpu.driver), ("cuda", gpu.cuda)) if version},
            **software,
        },
        settings=settings,
    )


def l2_bytes(name: str) -> int:
    """Size of the L2 cache of a product, 0 when it is not in our table."""
    known = next((row for item in gpu_platforms().values() if (row := item.product(name))), None)
    return known.l2_mib << 20 if known else 0


def _named(word: str, found: Sequence[Gpu]) -> Gpu | None:
    """The GPU that one entry of CUDA_VISIBLE_DEVICES means, or None."""
    if word.isdecimal():
        return found[int(word)] if int(word) < len(found) else None
    matching = [gpu for gpu in found if word.startswith("GPU-") and gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _nothing_seen() -> str:
    hidden = all_gpus()
    if hidden:
        return (
            f"{VISIBLE}={os.environ.get(VISIBLE, '')} hides all {len(hidden)} of this machine: unset it, or name the "
            f"UUID of a whole GPU as nvidia-smi -L prints it, {OTHERWISE}"
        )
    return f"the driver shows none: `pytest-klineage doctor` says what is missing, {OTHERWISE}"


def _from_nvml(nvml: Nvml) -> Iterator[Gpu]:
    driver, cuda = nvml.text("nvmlSystemGetDriverVersion"), nvml.ask("nvmlSystemGetCudaDriverVersion")
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            # In a container: a GPU of the machine that was not handed in.
            continue
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        name, mig = nvml.text("nvmlDeviceGetName", handle), nvml.ask("nvmlDeviceGetMigMode", handle)
        persistence = nvml.ask("nvmlDeviceGetPersistenceMode", handle)
        yield Gpu(
            index=index,
            uuid=nvml.text("nvmlDeviceGetUUID", handle),
            name=name,
            capability=".".join(map(str, nvml.ask("nvmlDeviceGetCudaComputeCapability", handle) or ())),
            memory_bytes=memory.total if memory else 0,
            l2_bytes=l2_bytes(name),
            driver=driver,
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            mig=bool(mig and mig[0]),
            persistence=None if persistence is None else bool(persistence),
        )


def _from_smi() -> Iterator[Gpu]:
    for row in smi_rows(SMI_FIELDS):
        if {"index", "uuid", "name", "compute_cap"} <= row.keys():
            yield Gpu(
                index=int(row["index"]),
                uuid=row["uuid"],
                name=row["name"],
                capability=row["compute_cap"],
                memory_bytes=int(row.get("memory.total", 0)) << 20,
                l2_bytes=l2_bytes(row["name"]),
                driver=row.get("driver_version", ""),
                mig=row.get("mig.mode.current") == "Enabled",
                persistence=row["persistence_mode"] == "Enabled" if "persistence_mode" in row else None,
            )


def numbers(version: str) -> tuple[int, ...]:
    """The parts of a version, such as (12, 8); empty when there are none."""
    return tuple(map(int, re.findall(r"\d+", version)))
