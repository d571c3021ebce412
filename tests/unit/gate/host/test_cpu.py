"""The machine: platform names, what is known of the CPU, and how busy others keep it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.gate import Gate
from pytest_klineage.gate.host import cpu
from pytest_klineage.gate.host.cpu import LoadMeter, resolve_platform
from pytest_klineage.records import PLATFORMS, from_json, to_json
from pytest_klineage.records.platform import ALIASES, Machine

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
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py is not installed, so that nvidia-smi is asked."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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


def row(number: int, capability: str) -> str:
    """A line of nvidia-smi about one GPU."""
    return f"echo '{number}, GPU-{number}, NVIDIA GPU, {capability}, 81559, 580.95.05, Disabled, Enabled'"


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (row(0, "9.0"), "sm90"),
        (f"{row(0, '12.0')}; {row(1, '9.0')}", "sm120"),
        (f"{row(0, '8.6')}; {row(1, '9.0')}", "sm90"),
        (row(0, "8.6"), "cpu"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "cpu"),
        ("exit 1", "cpu"),
    ],
)
def test_auto_takes_the_first_gpu_that_can_be_judged_on(
    script: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_tool(monkeypatch, tmp_path, script)
    assert resolve_platform("auto") == expected
    assert resolve_platform("AUTO") == expected


@pytest.mark.usefixtures("no_nvml")
def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_platform("auto") == "cpu"


@pytest.mark.usefixtures("no_nvml")
def test_a_gate_for_a_gpu_that_is_not_there_is_refused_as_misuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"sm90 needs a GPU of compute capability 9\.0"):
        Gate("sm90")


def test_the_machine_has_cores_and_a_cache_of_plausible_size() -> None:
    assert 1 <= cpu.usable_cores() <= (os.cpu_count() or 1)
    assert 1 << 18 <= cpu.last_level_cache_bytes() <= 1 << 34


def test_the_record_of_the_machine_names_what_was_used() -> None:
    machine = cpu.describe_cpu({"torch": "2.0"}, {"threads": "2"})
    assert machine.platform == "cpu"
    assert machine.device
    assert {"python", "system", "torch"} <= set(machine.software)
    assert machine.settings == {"threads": "2"}
    assert from_json(to_json(machine), Machine) == machine


def test_only_what_others_use_is_foreign_load() -> None:
    before = cpu.family_ticks(os.getpid())
    subprocess.run([sys.executable, "-c", BURN, "0.4"], check=True)
    assert cpu.family_ticks(os.getpid()) - before >= 0.1 * os.sysconf("SC_CLK_TCK"), "a child's time is ours"
    # A grandchild whose parent has ended belongs to another family.
    subprocess.run([sys.executable, "-c", ORPHAN, BURN], check=True)
    meter = LoadMeter()
    time.sleep(0.8)
    foreign = meter.foreign_share()
    cores = os.cpu_count() or 1
    assert foreign >= 0.3 / cores


SUMS = "sum(range(3_000_000))"


def test_the_work_of_this_process_and_its_children_is_its_own() -> None:
    before = cpu.family_ticks(os.getpid())
    subprocess.run([sys.executable, "-c", SUMS], check=True)
    while cpu.family_ticks(os.getpid()) == before:
        sum(range(100_000))
    assert cpu.family_ticks(os.getpid()) > before


def test_the_work_of_a_living_child_counts_too() -> None:
    with waiting_forever() as child:
        before = cpu.family_ticks(os.getpid())
        while cpu.family_ticks(child.pid) == 0:
            pass
        assert cpu.family_ticks(os.getpid()) > before
        child.kill()


def waiting_forever() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"while True: {SUMS}"])


def test_the_machine_has_worked_at_least_as_much_as_this_process() -> None:
    assert cpu.machine_ticks() >= cpu.family_ticks(os.getpid()) > 0


def test_the_share_of_others_lies_between_none_and_all() -> None:
    meter = cpu.LoadMeter()
    assert 0.0 <= meter.foreign_share() <= 1.0
    sum(range(1_000_000))
    assert 0.0 <= meter.foreign_share() <= 1.0


def test_a_process_that_is_gone_has_used_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert cpu.family_ticks(child.pid) == 0
