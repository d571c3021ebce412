"""Waiting for a processor is kept apart from sleeping and from working, by the system's own account."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_klineage.worker.host.scheduling import waited_ns

SECONDS = 1.0
SPINS, SLEEPS = "while True: pass", "time.sleep(60)"
BEGINS = "import os, time; os.sched_setaffinity(0, {{{core}}}); print('ready', flush=True)\n"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").is_file(), reason="this system keeps no account of waiting"
)


@contextlib.contextmanager
def pinned(*programs: str) -> Iterator[list[int]]:
    """Python programs that share one processor, and have begun."""
    begins = BEGINS.format(core=min(os.sched_getaffinity(0)))
    started = [
        subprocess.Popen([sys.executable, "-c", begins + program], stdout=subprocess.PIPE, text=True)
        for program in programs
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def waits(pid: int) -> int:
    """What a process waits while it is watched, in ns."""
    before = waited_ns(pid)
    time.sleep(SECONDS)
    return waited_ns(pid) - before


def test_two_that_share_a_processor_wait_for_one_another() -> None:
    with pinned(SPINS, SPINS) as (one, _other):
        assert waits(one) > 0.2 * SECONDS * 1e9


def test_one_that_sleeps_waits_for_nothing() -> None:
    with pinned(SLEEPS, SPINS) as (sleeper, _other):
        assert waits(sleeper) < 0.05 * SECONDS * 1e9


def test_a_process_that_is_gone_has_waited_for_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert waited_ns(process.pid) == 0
