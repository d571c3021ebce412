"""The GPU of a measurement outside of the gate: its lock, its environment and its name. Nothing is asked of it here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from evaluators.process import Process
from pytest_klineage.gate import GateSettings
from pytest_klineage.gate.host.hosts import host_for
from pytest_klineage.gate.host.locks import machine_lock


@contextlib.contextmanager
def alone(platform: str) -> Iterator[None]:
    """Hold the lock under which the gate times. Not to be held while the gate judges, which would wait for ever.

    Raises NoGpu when there is no GPU for the platform.
    """
    with machine_lock(host_for(platform, "all").lock, alone=True):
        yield


def process_on(platform: str, module: str, settings: GateSettings) -> Process:
    """A module as a process that sees the gate's GPU, and keeps what libraries compile where the gate's references do.

    Raises NoGpu when there is no GPU for the platform.
    """
    environment = {
        **host_for(platform, "all").environment,
        "TRITON_CACHE_DIR": str(settings.cache_dir / "reference-triton"),
        "FLASHINFER_WORKSPACE_BASE": str(settings.cache_dir / "reference-flashinfer"),
    }
    return Process(module, environment)


def device_name(platform: str) -> str:
    """The product name of the GPU. Raises NoGpu without one for the platform."""
    return host_for(platform, "all").machine({}, 1).device
