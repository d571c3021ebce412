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
from pytest_klineage.gate.host.cpu import LoadMeter
from pytest_klineage.gate.host.platforms import resolve_platform
from pytest_klineage.records import PLATFORMS, from_json, to_json
from pytest_klineage.records.platform import Machine

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


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_or_its_alias_is_resolved(name: str) -> None:
    assert resolve_platform(name) == name
    assert resolve_platform(name.replace("sm", "sm_").upper()) == name


@pytest.mark.parametrize("name", ["", "tpu", "sm75"])
def test_an_unknown_platform_is_refused(name: str) -> None:
    with pytest.raises(UnknownName, match="auto, cpu, sm100, sm103, sm120, sm80, sm86, sm89, sm90"):
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
        (f"{row(0, '7.5')}; {row(1, '9.0')}", "sm90"),
        (row(0, "8.6"), "sm86"),
        (row(0, "10.3"), "sm103"),
        (row(0, "7.5"), "cpu"),
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


def test_children_are_found_by_their_parent_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux without CONFIG_PROC_CHILDREN does not list them; else our own workers would be others."""
    monkeypatch.setattr(cpu, "_lists_children", lambda: False)
    with waiting_forever() as child:
        family, alone = cpu.family_pids(os.getpid()), cpu.family_pids(child.pid)
        child.kill()
    assert {os.getpid(), child.pid} <= family
    assert alone == {child.pid}


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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("operands", "l2", "last", "flush"),
    [
        (1 * MIB, 1 * MIB, 16 * MIB, 32 * MIB),
        (1 * MIB, 2 * MIB, 480 * MIB, 64 * MIB),
        (100 * MIB, 2 * MIB, 480 * MIB, 208 * MIB),
        (600 * MIB, 2 * MIB, 480 * MIB, 960 * MIB),
    ],
    ids=["small-cache", "a-whole-hosts-cache", "large-operands", "larger-than-the-cache"],
)
def test_what_is_flushed_is_what_a_case_can_have_in_the_caches(operands: int, l2: int, last: int, flush: int) -> None:
    assert cpu.flush_size(operands, {1: 32 << 10, 2: l2, 3: last}) == flush


def test_sizes_of_caches_are_read_by_level(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([(1, "48K"), (1, "32K"), (2, "2048K"), (3, "480M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert cpu.cache_sizes(tmp_path) == {1: 48 << 10, 2: 2 * MIB, 3: 480 * MIB}
    assert cpu.cache_sizes(tmp_path / "none") == {}
    assert cpu.flush_size(1, {}) == 2 * cpu.DEFAULT_CACHE_BYTES


SAPPHIRE_RAPIDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ss ht \
syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid tsc_known_freq pni pclmulqdq ssse3 \
fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt aes xsave avx f16c rdrand hypervisor lahf_lm abm 3dnowprefetch \
invpcid_single ssbd ibrs ibpb stibp ibrs_enhanced fsgsbase tsc_adjust bmi1 hle avx2 smep bmi2 erms invpcid rtm avx512f \
avx512dq rdseed adx smap avx512ifma clflushopt clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves \
avx_vnni avx512_bf16 arat avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg \
avx512_vpopcntdq rdpid cldemote movdiri movdir64b fsrm md_clear serialize tsxldtrk amx_bf16 avx512_fp16 amx_tile \
amx_int8 arch_capabilities

processor\t: 1
flags\t\t: fpu
"""


def test_a_cpu_with_amx_has_the_peak_of_its_tiles() -> None:
    flags = cpu.cpu_flags(SAPPHIRE_RAPIDS)
    assert {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"} <= flags
    assert cpu.peak_flops_per_core(flags, "bf16") == 1024 * cpu.PEAK_HZ
    assert cpu.peak_flops_per_core(flags, "fp32") == 1024 * cpu.PEAK_HZ, "three products of bf16 make one"
    assert cpu.peak_flops_per_core(flags, "int32") == 2048 * cpu.PEAK_HZ


def test_a_cpu_without_amx_has_that_of_its_vectors() -> None:
    flags = cpu.cpu_flags(SAPPHIRE_RAPIDS) - {"amx_tile", "amx_bf16", "amx_int8"}
    assert cpu.peak_flops_per_core(flags, "bf16") == 128 * cpu.PEAK_HZ
    assert cpu.peak_flops_per_core(flags - {"avx512_bf16", "avx512_fp16"}, "bf16") == 64 * cpu.PEAK_HZ
    assert cpu.peak_flops_per_core(cpu.cpu_flags("no such line"), "fp32") == 64 * cpu.PEAK_HZ


def test_the_flags_of_this_machine_are_read() -> None:
    assert cpu.flags_here() == cpu.cpu_flags(Path("/proc/cpuinfo").read_text())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel\t: 9\n",
         "AMD EPYC (family 26, model 2)"),
        ("processor : 0\nmodel name : Neoverse-N1\n", "Neoverse-N1"),
        ("processor : 0\ncpu family : 6\nmodel : 143\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_processor_is_named_with_its_generation(text: str, name: str) -> None:
    assert cpu.cpu_name(text) == name
