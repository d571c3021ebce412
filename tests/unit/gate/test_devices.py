"""The machine: platform names, what is known of the CPU, and the lock that lets one process time at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.gate import Gate, devices
from pytest_klineage.gate.devices import LoadMeter, machine_lock, resolve_platform
from pytest_klineage.records import PLATFORMS, from_json, to_json
from pytest_klineage.records.platform import ALIASES, Machine

WAIT_FOR_LOCK = """
import sys
from pytest_klineage.gate.devices import machine_lock
print("asking", flush=True)
with machine_lock(sys.argv[1], alone=sys.argv[2:] != ["shared"]):
    print("timing", flush=True)
    sys.stdin.readline()
"""

BURN = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""
ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], "2.0"], start_new_session=True)
"""


@pytest.fixture
def no_gpu_known() -> Iterator[None]:
    """What was found out about the GPU is forgotten before and after."""
    devices.compute_capability.cache_clear()
    yield
    devices.compute_capability.cache_clear()


def with_tool(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Put an nvidia-smi of ours, and nothing else, on the PATH."""
    tool = directory / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


@pytest.mark.parametrize("name", [*PLATFORMS, *ALIASES])
def test_a_platform_or_its_alias_is_resolved(name: str) -> None:
    assert resolve_platform(name) == ALIASES.get(name, name)


@pytest.mark.parametrize("name", ["", "tpu", "sm75"])
def test_an_unknown_platform_is_refused(name: str) -> None:
    with pytest.raises(UnknownName, match="auto, cpu, sm120, sm90"):
        resolve_platform(name)


@pytest.mark.usefixtures("no_gpu_known")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 9.0", "sm90"),
        ("echo 12.0; echo 9.0", "sm120"),
        ("echo 8.6", "cpu"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "cpu"),
        ("exit 1", "cpu"),
    ],
)
def test_auto_takes_what_the_first_gpu_offers(
    script: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_tool(monkeypatch, tmp_path, script)
    assert resolve_platform("auto") == expected
    assert resolve_platform("AUTO") == expected


@pytest.mark.usefixtures("no_gpu_known")
def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_platform("auto") == "cpu"


def test_a_gate_for_a_gpu_is_refused_as_misuse() -> None:
    with pytest.raises(UsageError, match="valid here: cpu, auto"):
        Gate("sm90")


def test_the_machine_has_cores_and_a_cache_of_plausible_size() -> None:
    assert 1 <= devices.usable_cores() <= (os.cpu_count() or 1)
    assert 1 << 18 <= devices.last_level_cache_bytes() <= 1 << 34


def test_the_record_of_the_machine_names_what_was_used() -> None:
    machine = devices.describe_cpu({"torch": "2.0"}, {"threads": "2"})
    assert machine.platform == "cpu"
    assert machine.device
    assert {"python", "system", "torch"} <= set(machine.software)
    assert machine.settings == {"threads": "2"}
    assert from_json(to_json(machine), Machine) == machine


@pytest.fixture
def device() -> Iterator[str]:
    """A device that no other test locks."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    (Path(tempfile.gettempdir()) / f"klineage-timing-{name}.lock").unlink(missing_ok=True)


def waiting(device: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_LOCK, device],
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
    (Path(tempfile.gettempdir()) / f"klineage-timing-{other}.lock").unlink()


def test_a_lock_can_be_taken_again(device: str) -> None:
    for _ in range(2):
        with machine_lock(device, alone=True):
            pass


def test_an_error_while_timing_frees_the_lock(device: str) -> None:
    with pytest.raises(ZeroDivisionError), machine_lock(device, alone=True):
        raise ZeroDivisionError
    with machine_lock(device, alone=True):
        pass


def test_builders_share_the_lock_and_keep_a_timing_waiting() -> None:
    device = f"test-{uuid.uuid4().hex}"
    with machine_lock(device, alone=False), machine_lock(device, alone=False):
        waiting = subprocess.Popen(
            [sys.executable, "-c", WAIT_FOR_LOCK, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "asking\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
        together = subprocess.run(
            [sys.executable, "-c", WAIT_FOR_LOCK, device, "shared"],
            input="\n",
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert together.stdout == "asking\ntiming\n"
    assert waiting.stdout.readline() == "timing\n"
    waiting.communicate("\n", timeout=30)


def test_only_what_others_use_is_foreign_load() -> None:
    before = devices.family_ticks(os.getpid())
    subprocess.run([sys.executable, "-c", BURN, "0.4"], check=True)
    assert devices.family_ticks(os.getpid()) - before >= 0.1 * os.sysconf("SC_CLK_TCK"), "a child's time is ours"
    # A grandchild whose parent has ended belongs to another family.
    subprocess.run([sys.executable, "-c", ORPHAN, BURN], check=True)
    meter = LoadMeter()
    time.sleep(0.8)
    foreign = meter.foreign_share()
    cores = os.cpu_count() or 1
    assert foreign >= 0.3 / cores


SUMS = "sum(range(3_000_000))"


def test_the_work_of_this_process_and_its_children_is_its_own() -> None:
    before = devices.family_ticks(os.getpid())
    subprocess.run([sys.executable, "-c", SUMS], check=True)
    while devices.family_ticks(os.getpid()) == before:
        sum(range(100_000))
    assert devices.family_ticks(os.getpid()) > before


def test_the_work_of_a_living_child_counts_too() -> None:
    with waiting_forever() as child:
        before = devices.family_ticks(os.getpid())
        while devices.family_ticks(child.pid) == 0:
            pass
        assert devices.family_ticks(os.getpid()) > before
        child.kill()


def waiting_forever() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"while True: {SUMS}"])


def test_the_machine_has_worked_at_least_as_much_as_this_process() -> None:
    assert devices.machine_ticks() >= devices.family_ticks(os.getpid()) > 0


def test_the_share_of_others_lies_between_none_and_all() -> None:
    meter = devices.LoadMeter()
    assert 0.0 <= meter.foreign_share() <= 1.0
    sum(range(1_000_000))
    assert 0.0 <= meter.foreign_share() <= 1.0


def test_a_process_that_is_gone_has_used_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert devices.family_ticks(child.pid) == 0
