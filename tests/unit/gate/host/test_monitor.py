"""Readings of a GPU, and who else is on it, against a fake of nvidia-ml-py: no GPU is here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.gate.host import gpus, neighbours
from pytest_klineage.gate.host.cpu import family_pids
from pytest_klineage.gate.host.monitor import GpuMeter, read_state, summarise, throttle_names
from pytest_klineage.gate.host.neighbours import busy_gpu_reason, foreign_processes, neighbours_note
from pytest_klineage.records import Code, Reason, from_json, to_json
from pytest_klineage.records.device import Gpu, GpuReadings, GpuState, Neighbours, Span

FAKE = Path(__file__).with_name("fake_pynvml.py")
TIMED = Reason(code=Code.ACCEPTED_FASTER, message="1.2x", evidence={"speedup": 1.2})


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake of nvidia-ml-py, fresh, with two H200; all of what was opened must be closed again."""
    spec = importlib.util.spec_from_file_location("pynvml", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for name in (gpus.VISIBLE, gpus.ORDER):
        monkeypatch.delenv(name, raising=False)
    yield module
    assert module.open_count == 0


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py is not installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


def with_smi(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Put an nvidia-smi of ours, and nothing else, on the PATH."""
    tool = directory / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def some_gpu() -> Gpu:
    return Gpu(index=0, uuid="GPU-0a", name="NVIDIA H200", capability="9.0")


# --- readings ---------------------------------------------------------------------------------------------------------


def test_a_full_reading(nvml: Any) -> None:
    nvml.GPUS[0] |= {"utilization": 37, "reasons": 0x4 | 0x20}
    assert read_state(gpus.gpus()[0]) == GpuState(
        sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=121.5, power_limit_w=700, temperature_c=41,
        throttle=("sw_power_cap", "sw_thermal_slowdown"), utilization=0.37, memory_used_bytes=4 << 20,
    )  # fmt: skip


def test_what_is_not_supported_is_none(nvml: Any) -> None:
    gpu = gpus.gpus()[0]
    nvml.GPUS[0] |= dict.fromkeys(("power", "limit", "reasons", "utilization", "used", "clocks", "temperature"))
    assert read_state(gpu) == GpuState()


def test_old_nvml_names_are_the_fallback(nvml: Any) -> None:
    gpu = gpus.gpus()[0]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x8
    del nvml.nvmlDeviceGetCurrentClocksEventReasons
    plain = nvml.nvmlDeviceGetMemoryInfo

    def first_version_only(handle: Any, version: int | None = None) -> Any:
        if version is not None:
            raise nvml.NVMLLibraryMismatchError
        return plain(handle)

    nvml.nvmlDeviceGetMemoryInfo = first_version_only
    state = read_state(gpu)
    assert state.throttle == ("hw_slowdown",)
    assert state.memory_used_bytes == 604 << 20, "with what the driver reserves"


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_a_reading_comes_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = "1455, 3201, 698.37, 700.00, 64, 99, 1024, 0x0000000000000004"
    with_smi(monkeypatch, tmp_path, f'[ "$3" = --id=GPU-0a ] && echo "{row}"')
    state = read_state(some_gpu())
    assert (state.sm_clock_mhz, state.power_w, state.utilization) == (1455, 698.37, 0.99)
    assert (state.throttle, state.memory_used_bytes) == (("sw_power_cap",), 1 << 30)


@pytest.mark.usefixtures("no_nvml")
def test_a_meter_without_nvml_reads_nothing_and_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_smi(monkeypatch, tmp_path, f": > {tmp_path / 'called'}")
    with closing(GpuMeter(some_gpu())) as meter:
        assert meter.sample() == GpuState()
    assert meter.summary() == GpuReadings(readings=0)
    assert not (tmp_path / "called").exists()


def test_a_meter_sums_up_what_it_saw(nvml: Any) -> None:
    with closing(GpuMeter(gpus.gpus()[0])) as meter:
        for clock, reasons in ((1980, 0), (1455, 0x4), (1530, 0x4)):
            nvml.GPUS[0] |= {"clocks": {1: clock, 2: 3201}, "reasons": reasons}
            assert meter.sample().sm_clock_mhz == clock
    found = meter.summary()
    assert (found.readings, found.sm_clock_mhz) == (3, Span(1455, 1530, 1980))
    assert (found.power_limit_w, found.throttle) == (700, {"sw_power_cap": 2})
    assert found.reading_ms is not None
    assert 0 < found.reading_ms.low <= found.reading_ms.median <= found.reading_ms.high
    assert from_json(to_json(found), GpuReadings) == found


def test_a_sample_is_few_questions_and_none_of_the_slow_ones(nvml: Any) -> None:
    gpu = gpus.gpus()[0]
    with closing(GpuMeter(gpu)) as meter:
        nvml.CALLS.clear()
        meter.sample()
        assert len(nvml.CALLS) <= 6
        assert not {"utilization", "used", "processes", "uuid"} & set(nvml.CALLS)


def test_a_meter_keeps_its_samples_and_closes_once(nvml: Any) -> None:
    meter = GpuMeter(gpus.gpus()[0])
    meter.sample()
    meter.close()
    meter.close()
    assert nvml.open_count == 0
    assert meter.sample() == GpuState()
    assert meter.summary().readings == 1


def test_readings_with_gaps_are_summed_up_without_them() -> None:
    found = summarise([GpuState(power_w=100, throttle=()), GpuState(), GpuState(power_w=300, throttle=("gpu_idle",))])
    assert (found.readings, found.power_w, found.sm_clock_mhz) == (3, Span(100, 200, 300), None)
    assert found.throttle == {"gpu_idle": 1}


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, ()), (0x1, ("gpu_idle",)), (0x80, ("hw_power_brake_slowdown",)), (0x400, ("reliability",)),
        (0x48, ("hw_slowdown", "hw_thermal_slowdown")), (1 << 13, ("bit_13",)),
    ],
)  # fmt: skip
def test_bits_have_names(bits: int, names: tuple[str, ...]) -> None:
    assert throttle_names(bits) == names


# --- others -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process numbers here are those of the machine."""
    monkeypatch.setattr(neighbours, "outermost", lambda: True)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """We are in a container; waiting for the driver's average takes no time."""
    monkeypatch.setattr(neighbours, "outermost", lambda: False)
    monkeypatch.setattr(neighbours, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("outside")
def test_processes_outside_of_the_family_are_foreign(nvml: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        family = family_pids(os.getpid())
        assert {os.getpid(), child.pid} <= family
        nvml.GPUS[0]["processes"] = [nvml.process(os.getpid()), nvml.process(child.pid), nvml.process(1, 5 << 30)]
        found = foreign_processes(gpus.gpus()[0], family)
        child.kill()
    assert found.known
    assert [(process.pid, process.memory_bytes) for process in found.processes] == [(1, 5 << 30)]
    assert found.processes[0].command == Path("/proc/1/comm").read_text().strip()


@pytest.mark.usefixtures("outside")
def test_another_gates_worker_waiting_for_the_lock_is_ignored(nvml: Any) -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, "pytest_klineage.worker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # before that its command line may still be empty
        nvml.GPUS[0]["processes"] = [nvml.process(other.pid)]
        assert foreign_processes(gpus.gpus()[0], ()).processes == ()
        other.kill()


@pytest.mark.usefixtures("outside")
def test_an_idle_gpu_is_seen_on_the_machine_itself(nvml: Any) -> None:
    found = foreign_processes(gpus.gpus()[0], (), quiet=True)
    assert (found.known, found.processes, found.utilization) == (True, (), None)
    assert neighbours_note(found) == ""
    assert busy_gpu_reason(TIMED, found, allow=False) is TIMED


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("listed", [[], [4_000_001]], ids=["hidden", "renumbered"])
def test_in_a_container_a_list_without_us_is_not_believed(listed: list[int], nvml: Any) -> None:
    nvml.GPUS[0]["processes"] = [nvml.process(pid) for pid in listed]
    found = foreign_processes(gpus.gpus()[0], [os.getpid()])
    assert (found.known, found.processes, found.utilization) == (False, (), None)
    assert busy_gpu_reason(TIMED, found, allow=False) is TIMED, "a guess costs no verdict"
    assert neighbours_note(found).startswith("whether others used the GPU is unknown: in a container")
    assert "4 MiB" in neighbours_note(found)


@pytest.mark.usefixtures("inside")
def test_in_a_container_a_list_with_us_is_believed(nvml: Any) -> None:
    nvml.GPUS[0]["processes"] = [nvml.process(os.getpid()), nvml.process(4_000_001)]
    found = foreign_processes(gpus.gpus()[0], [os.getpid()])
    assert found.known
    assert [process.pid for process in found.processes] == [4_000_001]


@pytest.mark.usefixtures("inside")
def test_utilization_is_the_second_sign_while_we_are_quiet(nvml: Any) -> None:
    nvml.GPUS[0]["utilization"] = 62
    found = foreign_processes(gpus.gpus()[0], [os.getpid()], quiet=True)
    assert (found.known, found.utilization) == (False, 0.62)
    reason = busy_gpu_reason(TIMED, found, allow=False)
    assert reason.code is Code.INCONCLUSIVE_BUSY
    assert "62 % busy while nothing of ours ran" in reason.message
    assert reason.evidence["idle_utilization"] == 0.62


@pytest.mark.usefixtures("inside")
def test_utilization_that_goes_away_was_our_own(nvml: Any) -> None:
    readings = iter([90, 0])
    plain = nvml.nvmlDeviceGetUtilizationRates

    def falling(handle: Any) -> Any:
        handle["utilization"] = next(readings)
        return plain(handle)

    nvml.nvmlDeviceGetUtilizationRates = falling
    assert foreign_processes(gpus.gpus()[0], (), quiet=True).utilization == 0


def test_a_foreign_process_makes_a_timing_inconclusive(nvml: Any, outside: None) -> None:
    nvml.GPUS[0]["processes"] = [nvml.process(1)]
    found = foreign_processes(gpus.gpus()[0], [os.getpid()])
    reason = busy_gpu_reason(TIMED, found, allow=False)
    assert reason.code is Code.INCONCLUSIVE_BUSY
    assert reason.message.startswith("1 other process computed on the GPU or could have: 1 ")
    assert reason.message.endswith("measured: 1.2x. End it, take another GPU, or allow it: --klineage-busy-limit 1")
    assert (reason.evidence["foreign_processes"], reason.evidence["speedup"]) == (1, 1.2)
    assert busy_gpu_reason(TIMED, found, allow=True) is TIMED
    assert neighbours_note(found).startswith("shared GPU: 1 other process")
    unclear = Reason(code=Code.INCONCLUSIVE_INTERVAL, message="wide")
    assert busy_gpu_reason(unclear, found, allow=False).code is Code.INCONCLUSIVE_BUSY


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_neighbours_are_unknown() -> None:
    found = foreign_processes(some_gpu(), ())
    assert not found.known
    assert "pip install nvidia-ml-py" in found.unknown_because
    assert from_json(to_json(found), Neighbours) == found


def test_a_gpu_that_nvml_has_lost_or_will_not_list_is_unknown(nvml: Any) -> None:
    assert "does not know GPU-0a" in foreign_processes(some_gpu(), ()).unknown_because
    gpu = gpus.gpus()[0]
    nvml.GPUS[0]["processes"] = None
    assert "does not list processes" in foreign_processes(gpu, ()).unknown_because
