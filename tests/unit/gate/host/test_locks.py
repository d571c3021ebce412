"""The lock of a device: one process times at once, on this device, whatever the others' surroundings are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_klineage.gate.host.locks import SHARED_FOLDER, lock_path, machine_lock

WAIT_FOR_LOCK = """
import sys
from pytest_klineage.gate.host.locks import machine_lock
print("asking", flush=True)
with machine_lock(sys.argv[1], alone=sys.argv[2:] != ["shared"]):
    print("timing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def device() -> Iterator[str]:
    """A device that no other test locks."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    lock_path(name).unlink(missing_ok=True)
    lock_path(f"{name}-queue").unlink(missing_ok=True)


def waiting(device: str, *how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_LOCK, device, *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_while_one_process_times_another_waits(device: str) -> None:
    with waiting(device) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        with machine_lock(device, alone=True):
            assert second.stdout.readline() == "asking\n"
            os.set_blocking(second.stdout.fileno(), False)
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(0.3)
            assert second.stdout.readline() == ""
            os.set_blocking(second.stdout.fileno(), True)
        assert second.stdout.readline() == "timing\n"
        second.stdin.close()


def test_what_is_waited_for_the_lock_is_counted(device: str) -> None:
    waits = []
    with waiting(device) as holder:
        assert holder.stdout is not None
        assert [holder.stdout.readline(), holder.stdout.readline()] == ["asking\n", "timing\n"]

        @contextlib.contextmanager
        def counted() -> Iterator[None]:
            started = time.monotonic()
            threading.Timer(0.2, holder.kill).start()
            yield
            waits.append(time.monotonic() - started)

        with machine_lock(device, alone=False, waiting=counted):
            assert len(waits) == 1
    assert waits[0] >= 0.2


def test_the_lock_of_a_killed_process_is_free(device: str) -> None:
    with waiting(device) as holder:
        assert holder.stdout is not None
        assert [holder.stdout.readline(), holder.stdout.readline()] == ["asking\n", "timing\n"]
        holder.kill()
    with machine_lock(device, alone=True):
        pass


def test_two_devices_have_two_locks(device: str) -> None:
    other = f"{device}-2"
    with machine_lock(device, alone=True), machine_lock(other, alone=True):
        pass
    lock_path(other).unlink()
    lock_path(f"{other}-queue").unlink()


def test_a_lock_can_be_taken_again(device: str) -> None:
    for _ in range(2):
        with machine_lock(device, alone=True):
            pass


def test_an_error_while_timing_frees_the_lock(device: str) -> None:
    with pytest.raises(ZeroDivisionError), machine_lock(device, alone=True):
        raise ZeroDivisionError
    with machine_lock(device, alone=True):
        pass


def test_builders_share_the_lock_and_keep_a_timing_waiting(device: str) -> None:
    with machine_lock(device, alone=False), machine_lock(device, alone=False):
        with waiting(device, "shared") as together:
            assert together.stdout is not None
            assert [together.stdout.readline(), together.stdout.readline()] == ["asking\n", "timing\n"]
            together.communicate("\n", timeout=30)
        timing = waiting(device)
        assert timing.stdout is not None
        assert timing.stdout.readline() == "asking\n"
        with pytest.raises(subprocess.TimeoutExpired):
            timing.wait(0.3)
    assert timing.stdout.readline() == "timing\n"
    timing.communicate("\n", timeout=30)


def test_who_waits_for_a_timing_comes_before_later_checks(device: str) -> None:
    with machine_lock(device, alone=False) as lock, waiting(device) as timing:
        assert timing.stdout is not None
        assert timing.stdin is not None
        assert timing.stdout.readline() == "asking\n"
        with pytest.raises(subprocess.TimeoutExpired):
            timing.wait(0.3)
        with waiting(device, "shared") as later:
            assert later.stdout is not None
            assert later.stdout.readline() == "asking\n"
            with pytest.raises(subprocess.TimeoutExpired):
                later.wait(0.3)
            timing.stdin.write("\n")
            timing.stdin.flush()
            lock.give_way()  # comes back only when the timing has ended
            assert timing.wait(30) == 0
            assert later.stdout.readline() == "timing\n"


def test_a_timing_shares_for_a_while(device: str) -> None:
    with machine_lock(device, alone=True) as lock, waiting(device, "shared") as check:
        assert check.stdout is not None
        assert check.stdin is not None
        assert check.stdout.readline() == "asking\n"
        with lock.together():
            assert check.stdout.readline() == "timing\n"
            check.stdin.write("\n")
            check.stdin.flush()
        assert check.wait(30) == 0


def test_a_temporary_folder_of_ones_own_does_not_part_the_lock(device: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with machine_lock(device, alone=True):
        other = subprocess.Popen(
            [sys.executable, "-c", WAIT_FOR_LOCK, device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "asking\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
    assert other.communicate("\n", timeout=30)[0] == "timing\n"
    assert lock_path(device).parent == SHARED_FOLDER


def test_without_a_shared_folder_the_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pytest_klineage.gate.host.locks.SHARED_FOLDER", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert lock_path("cpu").parent == tmp_path


def test_a_lock_is_no_way_to_another_file(device: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    lock_path(device).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), machine_lock(device, alone=True):
        pass
    assert victim.stat().st_mode & 0o777 == 0o600
