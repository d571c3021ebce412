"""A process stands still on request; one that goes on by itself is seen, whatever stopped it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pytest_klineage.worker import stopping
from pytest_klineage.worker.stopping import Stopper

BUSY = """
import threading
for _ in range(2):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print("busy", flush=True)
while True:
    pass
"""


@pytest.fixture
def busy() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def works(pid: int, used_ns: int) -> bool:
    """Whether a process uses more than what a stopped one may, within as long as a busy machine can take."""
    deadline = time.monotonic() + 5
    while stopping.used_ns(pid) - used_ns <= stopping.AWAKE_NS and time.monotonic() < deadline:
        time.sleep(0.01)
    return stopping.used_ns(pid) - used_ns > stopping.AWAKE_NS


@pytest.fixture
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system on which no cgroup can be made."""
    monkeypatch.setattr(stopping, "unified_root", lambda: None)


def test_a_stopped_process_stands_still_and_goes_on(busy: int) -> None:
    stopper = Stopper(busy)
    for _ in range(2):
        stopper.stop()
        used = stopping.used_ns(busy)
        time.sleep(0.05)
        assert stopping.used_ns(busy) - used < stopping.AWAKE_NS
        assert not stopper.broke_out()
        stopper.go_on()
        assert works(busy, used)
        assert not stopper.broke_out(), "it may run"
    stopper.close()


@pytest.mark.usefixtures("without_groups")
def test_a_process_that_is_continued_by_somebody_else_is_seen(busy: int) -> None:
    stopper = Stopper(busy)
    assert stopper.group is None
    stopper.stop()
    used = stopping.used_ns(busy)
    os.kill(busy, signal.SIGCONT)
    assert works(busy, used)
    assert "processor time" in stopper.broke_out()
    stopper.close()


@pytest.mark.usefixtures("without_groups")
def test_a_process_that_was_continued_and_sleeps_is_seen() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        stopper = Stopper(process.pid)
        stopper.stop()
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.02)
        assert "runs although" in stopper.broke_out()
        stopper.close()
        process.kill()


def test_a_stopped_group_cannot_be_continued_from_inside(busy: int) -> None:
    stopper = Stopper(busy)
    if stopper.group is None:
        stopper.close()
        pytest.skip("no cgroup of version 2 can be made here")
    group = stopper.group
    stopper.stop()
    used = stopping.used_ns(busy)
    os.kill(busy, signal.SIGCONT)
    time.sleep(0.1)
    assert stopping.used_ns(busy) - used < stopping.AWAKE_NS
    assert not stopper.broke_out()
    stopper.close()
    os.kill(busy, signal.SIGKILL)
    os.waitpid(busy, 0)
    stopping.forget_empty_groups(group.parent)
    assert not group.exists()


def test_a_process_that_has_ended_stands_still() -> None:
    with subprocess.Popen(["true"]) as process:
        stopper = Stopper(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is left as it is, for its parent to read
        stopper.stop()
        assert not stopper.broke_out()
        stopper.close()


@pytest.mark.usefixtures("without_groups")
def test_cpu_time_of_a_stopping_thread_is_forgiven(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A halted virtual machine shows its thread as stopped, and counts on."""
    readings = iter([500_000, 1_000_000, 4_000_000, 4_000_000, 6_000_000])
    last = 6_000_000
    monkeypatch.setattr(stopping, "used_ns", lambda _pid: next(readings, last))
    stopper = Stopper(busy)
    stopper.stop()
    assert not stopper.broke_out()
    stopper.close()


@pytest.mark.parametrize(("used", "passed", "worked"), [(7, 9, 7), (9, 7, 7), (7, 0.9, 0), (0.9, 7, 0)])
def test_work_that_no_stop_ends_is_counted(
    busy: int, monkeypatch: pytest.MonkeyPatch, used: float, passed: float, worked: float
) -> None:
    """In ms: the processor time until all threads stand still, and no more than has passed."""
    readings, clock = iter([0]), iter([0])
    monkeypatch.setattr(stopping, "used_ns", lambda _pid: next(readings, int(used * 1e6)))
    monkeypatch.setattr(stopping.time, "monotonic_ns", lambda: next(clock, int(passed * 1e6)))
    stopper = Stopper(busy)
    assert stopper.stop() == worked * 1e6
    monkeypatch.undo()
    stopper.close()
