"""Platform: the class of machine a case runs on, and the record of the machine that was really used."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import extensions
from pytest_klineage.records.architectures import GPU_PLATFORMS, GpuPlatform

PLATFORMS = ("cpu", *GPU_PLATFORMS)
"""Names a user may give; `auto` is resolved to one of them before any record is made. Packages may add others."""
SPELLED = re.compile(r"sm_?(\d+)[af]?")
"""Ways to write a GPU platform: sm90, sm_90, sm90a, sm_90a."""


def platform_name(name: str) -> str:
    """The canonical name of a platform. Raises UnknownName, which lists the valid ones."""
    spelled = SPELLED.fullmatch(name.lower())
    canonical = f"sm{spelled[1]}" if spelled else name.lower()
    if canonical not in PLATFORMS and canonical not in extensions("platforms"):
        raise UnknownName("platform", name, (*PLATFORMS, *extensions("platforms"), "auto"))
    return canonical


def gpu_platforms() -> dict[str, GpuPlatform]:
    """Every platform that is a GPU, shipped first. Raises UsageError for a package's entry that is no GPU platform."""
    return GPU_PLATFORMS | {name: _registered(name) for name in extensions("platforms") if name not in GPU_PLATFORMS}


def gpu_platform(name: str) -> GpuPlatform:
    """A platform that is a GPU, shipped or of another package. Raises UnknownName, and UsageError as above."""
    if name in GPU_PLATFORMS:
        return GPU_PLATFORMS[name]
    if name not in extensions("platforms"):
        raise UnknownName("GPU platform", name, gpu_platforms())
    return _registered(name)


def covers(platforms: Collection[str], name: str) -> bool:
    """Whether `platforms` have one: what runs on every shipped GPU runs on those of other packages too."""
    if name in platforms:
        return True
    return name in extensions("platforms") and set(GPU_PLATFORMS) <= set(platforms)


def _registered(name: str) -> GpuPlatform:
    """A platform of another package."""
    extension = extensions("platforms")[name]
    found = extension.load()
    if not isinstance(found, GpuPlatform) or found.name != name:
        said = f"a platform {found.name}" if isinstance(found, GpuPlatform) else repr(found)
        raise UsageError(f"{extension.package} registers the platform {name}; it is {said}, not a GpuPlatform of it")
    return found


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement ran on. Two results compare only when `device` is the same."""

    platform: str
    """Canonical platform name."""
    device: str
    """Product name of the GPU, or of the CPU."""
    device_uuid: str = ""
    """UUID of the GPU; empty on a CPU."""
    cores: int = 0
    """CPU cores this process may use."""
    cache_bytes: int = 0
    """Size of the last-level cache (CPU) or of the L2 (GPU), 0 when unknown."""
    software: dict[str, str] = {}
    """Names and versions: python, torch, the compiler, the driver."""
    settings: dict[str, str] = {}
    """Backend flags and thread counts in force in the workers."""
