"""GPUs for pytest-xdist's workers: each is given one by UUID before it starts. When it may time is the lock's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import KlineageError

if TYPE_CHECKING:
    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records.device import Gpu

OWN_NUMBER = "PYTEST_XDIST_AUTO_NUM_WORKERS"
"""pytest-xdist's own variable for what `-n auto` means."""


class Distribution:
    """Hands out the GPUs of a platform to the workers of this machine. Does nothing unless klineage is in use."""

    def __init__(self, session: KlineageSession) -> None:
        self._session = session

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """What there is to hand out; nothing on a CPU, and nothing in a worker, whose choice has been made."""
        return () if self._session.is_worker else session_gpus(self._session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Name a GPU in the environment that each worker of this machine will start with.

        Before the worker imports anything, so before CUDA can be initialised. Its replacement after a crash is started
        with the same environment. A variable that the user has set for a worker (`--tx`) stays.
        """
        if not self.gpus:
            return
        from pytest_klineage.gate.host.gpus import VISIBLE

        here = [spec for spec in specs if spec.popen and not spec.via]
        for number, spec in enumerate(here):
            spec.env.setdefault(VISIBLE, self.gpus[number % len(self.gpus)].uuid)

    def pytest_report_header(self, config: pytest.Config) -> str | None:
        """One line with the GPUs, when workers share them out."""
        workers = num_workers(config)
        if not workers or not self.gpus:
            return None
        count = len(self.gpus)
        shared = f"{workers} workers on {count} GPU{'' if count == 1 else 's'}"
        names = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in self.gpus[:workers])
        return f"klineage: {shared}: {names}" + (" (timed in turns)" if workers > count else "")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` is one worker per GPU on a GPU platform; whatever pytest-xdist makes of it otherwise."""
    # Asked before pytest_configure, so there is no session yet.
    from pytest_klineage.plugin.session import KlineageSession

    session = KlineageSession(config)
    if OWN_NUMBER in os.environ or session.settings.gate.get("stage") == "compile":
        # Builds want cores, not GPUs.
        return None
    return len(session_gpus(session)) or None


def session_gpus(session: KlineageSession) -> tuple[Gpu, ...]:
    """The GPUs of the session's platform; none when the user asked for nothing of ours, and none on a CPU.

    What is wrong with a platform's name, or with the machine, is said where kernels are judged.
    """
    if not session.settings.given:
        return ()
    from pytest_klineage.gate.host.gpus import gpus_for

    try:
        return () if session.platform == "cpu" else gpus_for(session.platform)
    except KlineageError:
        return ()


def num_workers(config: pytest.Config) -> int:
    """How many processes pytest-xdist is going to start; 0 when it is absent or not asked to."""
    total = 0
    for spec in config.getoption("tx", None) or ():
        count, star, _ = spec.partition("*")
        total += int(count) if star and count.isdecimal() else 1
    return total if config.pluginmanager.hasplugin("dsession") else 0
