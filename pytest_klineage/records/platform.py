"""Platform: the class of machine a case runs on, and the record of the machine that was really used."""

from __future__ import annotations

import msgspec

from pytest_klineage.errors import UnknownName

PLATFORMS = ("cpu", "sm90", "sm120")
"""Names a user may give; `auto` is resolved to one of them before any record is made."""

ALIASES = {"sm90a": "sm90", "sm_90": "sm90", "sm_90a": "sm90", "sm120a": "sm120", "sm_120": "sm120", "sm_120a": "sm120"}


def platform_name(name: str) -> str:
    """The canonical name of a platform. Raises UnknownName, which lists the valid ones."""
    canonical = ALIASES.get(name.lower(), name.lower())
    if canonical not in PLATFORMS:
        raise UnknownName("platform", name, (*PLATFORMS, "auto"))
    return canonical


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
