"""Which platform a name, or "auto", means on this machine."""

from __future__ import annotations

from pytest_klineage.records import platform_name


def resolve_platform(name: str) -> str:
    """The canonical platform; "auto" takes that of the first visible GPU that can be judged on, else cpu.

    Raises UnknownName, and UsageError when "auto" cannot tell which GPUs are visible.
    """
    if name.lower() != "auto":
        return platform_name(name)
    # GPUs are looked for only when no platform is named.
    from pytest_klineage.gate.host.gpus import best_platform

    return best_platform()
