"""GPUs, against a fake of nvidia-ml-py and of nvidia-smi: no GPU is here. What real ones answer is in its own words."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_klineage.errors import MissingDependency, UnknownName, UsageError
from pytest_klineage.gate.host import gpus, monitor, neighbours, survey
from pytest_klineage.gate.host.gpus import NoGpu, check_toolchain, choose_gpu, describe_gpu, visible_gpus
from pytest_klineage.gate.host.hosts import CompileOnlyHost, DeviceHost, host_for
from pytest_klineage.gate.host.monitor import read_state
from pytest_klineage.gate.host.platforms import resolve_platform
from pytest_klineage.records import Peaks, from_json, to_json
from pytest_klineage.records.architectures import GPU_PLATFORMS
from pytest_klineage.records.device import Gpu, GpuState

FAKE = Path(__file__).with_name("fake_pynvml.py")
SMI_ROW = "0, GPU-abc, NVIDIA H200, 9.0, 143771, 580.95.05, Disabled, Enabled"


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


def some_gpu(number: int = 0, **differences: Any) -> Gpu:
    known = {"index": number, "uuid": f"GPU-{number}a", "name": "NVIDIA H200", "capability": "9.0", "driver": "580.1"}
    return Gpu(**known | differences)


# --- the fake is true -------------------------------------------------------------------------------------------------


def test_the_fake_has_the_names_and_parameters_of_nvidia_ml_py(nvml: ModuleType) -> None:
    real = real_pynvml()
    if real is None:
        pytest.skip("nvidia-ml-py is not installed")
    for name, value in vars(nvml).items():
        if name.startswith("nvml") and callable(value):
            assert list(inspect.signature(value).parameters) == list(
                inspect.signature(inspect.unwrap(getattr(real, name))).parameters
            )
        elif name.startswith("NVML_") or name == "nvmlMemory_v2":
            assert value == getattr(real, name)
        elif name.startswith("NVML"):
            assert issubclass(getattr(real, name), real.NVMLError) == issubclass(value, nvml.NVMLError)
    for position, name in enumerate(monitor.THROTTLE):
        words = "".join(word.capitalize() for word in name.split("_"))
        constants = [getattr(real, f"nvmlClocks{kind}Reason{words}", None) for kind in ("Event", "Throttle")]
        assert 1 << position in constants, name


def real_pynvml() -> Any:
    """The real nvidia-ml-py under another name, whatever stands in for it; None when it is not installed."""
    for folder in sys.path:
        path = Path(folder, "pynvml.py")
        if path.is_file():
            spec = importlib.util.spec_from_file_location("real_pynvml", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["real_pynvml"] = module  # it looks itself up by its name
            try:
                spec.loader.exec_module(module)
            finally:
                del sys.modules["real_pynvml"]
            return module
    return None


# --- which GPUs there are ---------------------------------------------------------------------------------------------


def test_nvml_tells_what_a_gpu_is(nvml: Any) -> None:
    found = gpus.gpus()
    assert found[0] == Gpu(
        index=0, uuid=nvml.GPUS[0]["uuid"], name="NVIDIA H200", capability="9.0", memory_bytes=150754820096,
        l2_bytes=60 << 20, driver="580.95.05", cuda="13.0", mig=False, persistence=True,
    )  # fmt: skip
    assert [gpu.index for gpu in found] == [0, 1]
    assert from_json(to_json(found[0]), Gpu) == found[0]


def test_what_the_driver_does_not_say_is_left_open(nvml: Any) -> None:
    nvml.GPUS[:] = [nvml.gpu(0, mig=None, persistence=None, total=None, name=b"NVIDIA L4", capability=(8, 9))]
    nvml.CUDA = 0
    (gpu,) = gpus.gpus()
    assert (gpu.mig, gpu.persistence, gpu.memory_bytes, gpu.l2_bytes, gpu.cuda) == (False, None, 0, 48 << 20, "")
    assert (gpu.name, gpu.capability) == ("NVIDIA L4", "8.9")


def test_a_gpu_outside_the_container_is_absent(nvml: Any) -> None:
    nvml.GPUS[0]["hidden"] = True
    (gpu,) = gpus.gpus()
    assert gpu.index == 1
    assert visible_gpus([gpu], {gpus.VISIBLE: "0"}) == (gpu,), "CUDA counts what it was handed"


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = "1, GPU-def, NVIDIA L4, 8.9, [N/A], 580.95.05, [N/A], [N/A]"
    with_smi(monkeypatch, tmp_path, f"echo '{SMI_ROW}'; echo '{other}'")
    first, second = gpus.gpus()
    assert (first.uuid, first.memory_bytes, first.mig, first.persistence) == ("GPU-abc", 143771 << 20, False, True)
    assert (second.capability, second.memory_bytes, second.mig, second.persistence) == ("8.9", 0, False, None)
    assert first.cuda == ""


def test_nvidia_smi_is_asked_where_nvml_cannot_be_loaded(
    nvml: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.DRIVER = ""
    with_smi(monkeypatch, tmp_path, f"echo '{SMI_ROW}'")
    assert [gpu.uuid for gpu in gpus.gpus()] == ["GPU-abc"]


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize("script", ["exit 9", f"echo '{SMI_ROW}'; exit 6", "echo 'No devices were found'", "echo"])
def test_a_failing_nvidia_smi_lists_no_gpu(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_smi(monkeypatch, tmp_path, script)
    assert gpus.gpus() == ()


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_and_nvidia_smi_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == ()
    assert read_state(some_gpu()) == GpuState()


THREE = [some_gpu(0, uuid="GPU-aa01"), some_gpu(1, uuid="GPU-aa02"), some_gpu(2, uuid="GPU-bb03")]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("0", [0]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2]), ("GPU-bb03,0", [2, 0]), ("GPU-b", [2]), ("GPU-aa02", [1]),
        ("", []), ("-1", []), ("NoDevFiles", []), ("7", []), ("1,7,0", [1]), ("GPU-aa", []), ("bb03", []),
        ("0,0,1", [0]), ("1,GPU-aa02,0", [1]), ("MIG-aa01", []), ("2,", [2]),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_read_as_cuda_reads_it(wish: str, expected: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(THREE, {gpus.VISIBLE: wish})] == expected


def test_without_the_variable_all_are_visible() -> None:
    assert visible_gpus(THREE, {}) == tuple(THREE)


def test_indices_of_different_gpus_need_a_named_order() -> None:
    mixed = [some_gpu(0, name="NVIDIA L4", capability="8.9", uuid="GPU-l4"), some_gpu(1)]
    with pytest.raises(UsageError, match=r"NVIDIA H200, NVIDIA L4.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(mixed, {gpus.VISIBLE: "0"})
    assert visible_gpus(mixed, {gpus.VISIBLE: "0", gpus.ORDER: "PCI_BUS_ID"}) == (mixed[0],)
    assert visible_gpus(mixed, {gpus.VISIBLE: "GPU-1a"}) == (mixed[1],)


# --- which GPU a platform takes ---------------------------------------------------------------------------------------


def test_a_platform_takes_the_first_visible_gpu_that_fits(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.GPUS[:] = [
        nvml.gpu(0, name="Tesla T4", capability=(7, 5)), nvml.gpu(1, mig=[1, 1]), nvml.gpu(2),
        nvml.gpu(3), nvml.gpu(4, name="NVIDIA GeForce RTX 5090", capability=(12, 0)),
    ]  # fmt: skip
    assert choose_gpu("sm90").index == 2
    assert choose_gpu("sm120").index == 4
    assert resolve_platform("auto") == "sm90"
    monkeypatch.setenv(gpus.VISIBLE, f"{nvml.GPUS[4]['uuid']},{nvml.GPUS[3]['uuid']}")
    assert choose_gpu("sm90").index == 3
    assert resolve_platform("AUTO") == "sm120"


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        (
            {"name": "NVIDIA L4", "capability": (8, 9)},
            ["sm90 asked, this machine has sm_89 NVIDIA L4", "--klineage-platform sm89 or cpu"],
        ),
        (
            {"name": "NVIDIA GeForce RTX 5090", "capability": (12, 0)},
            ["sm90 asked, this machine has sm_120 NVIDIA GeForce RTX 5090", "--klineage-platform sm120 or cpu"],
        ),
        ({"mig": [1, 1]}, ["MIG", "sudo nvidia-smi -i 0 -mig 0", "--klineage-platform cpu"]),
    ],
)
def test_a_gpu_that_does_not_fit_is_named_with_the_next_step(
    differences: dict[str, Any], words: list[str], nvml: Any
) -> None:
    nvml.GPUS[:] = [nvml.gpu(0, **differences)]
    with pytest.raises(NoGpu) as refused:
        choose_gpu("sm90")
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [
        ("580.95.05", 13000, True), ("600.1", 0, True), ("570.124.06", 12080, True), ("575.57.08", 12090, True),
        ("565.57.01", 12070, False), ("565.57.01", 12080, True), ("565.57.01", 13000, True),
    ],
)  # fmt: skip
def test_the_driver_must_run_cuda_12_8(driver: str, cuda: int, fits: bool, nvml: Any) -> None:
    nvml.DRIVER, nvml.CUDA = driver, cuda
    assert resolve_platform("auto") == ("sm90" if fits else "cpu")
    if fits:
        assert choose_gpu("sm90").driver == driver
    else:
        with pytest.raises(NoGpu, match=r"driver 565\.57\.01 .* does not run CUDA 12\.8; install driver 570 or newer"):
            choose_gpu("sm90")


@pytest.mark.parametrize("name", GPU_PLATFORMS)
def test_auto_takes_the_platform_of_every_product(name: str, nvml: Any) -> None:
    item = GPU_PLATFORMS[name]
    assert item.products
    for product in item.products:
        nvml.GPUS[:] = [nvml.gpu(0, name=product.name, capability=tuple(map(int, item.capability.split("."))))]
        assert resolve_platform("auto") == name
        assert choose_gpu(name).l2_bytes == product.l2_mib << 20


@pytest.mark.parametrize(
    ("cuda", "toolchain", "starts"),
    [
        ("12.8", "nvcc 13.0.88, g++ 12.2.0", False), ("12.8", "nvcc 12.9.86, g++ 12.2.0", True),
        ("12.8", "TileLang 0.1.8, nvcc 13.0.88, g++ 12.2.0", False), ("13.0", "nvcc 13.2.1, g++ 12.2.0", True),
        ("12.8", "Triton 3.6.0, cuobjdump 13.2.86", True), ("", "nvcc 13.0.88", True), ("13.0", "", True),
    ],
)  # fmt: skip
def test_an_older_driver_runs_no_newer_toolkit(cuda: str, toolchain: str, starts: bool) -> None:
    gpu = some_gpu(driver="570.124.06", cuda=cuda)
    if starts:
        check_toolchain(gpu, toolchain)
    else:
        with pytest.raises(MissingDependency, match=r"570\.124\.06 .*runs CUDA 12\.8 and not what nvcc 13\.0\.88"):
            check_toolchain(gpu, toolchain)


def test_a_machine_without_a_gpu_says_what_to_do(nvml: Any) -> None:
    nvml.GPUS.clear()
    with pytest.raises(NoGpu, match=r"capability 12\.0; the driver shows none: `pytest-klineage doctor`"):
        choose_gpu("sm120")
    assert resolve_platform("auto") == "cpu"


def test_hidden_gpus_differ_from_absent_ones(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "MIG-00000000")
    with pytest.raises(NoGpu, match=f"{gpus.VISIBLE}=MIG-00000000 hides all 2 of this machine"):
        choose_gpu("sm90")


@pytest.mark.parametrize("name", ["cpu", "sm75", ""])
def test_only_gpu_platforms_have_gpus(name: str) -> None:
    with pytest.raises(UnknownName, match="sm100, sm103, sm120, sm80, sm86, sm89, sm90"):
        choose_gpu(name)


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("NVIDIA H200", 60), ("NVIDIA H100 80GB HBM3", 50), ("NVIDIA H100 PCIe", 50), ("NVIDIA GeForce RTX 5090", 96),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 128), ("NVIDIA B200", 0),
    ],
)  # fmt: skip
def test_the_l2_cache_comes_from_a_table(name: str, mebibytes: int) -> None:
    assert gpus.l2_bytes(name) == mebibytes << 20


def test_the_machine_of_a_gpu(nvml: Any) -> None:
    machine = describe_gpu(choose_gpu("sm90"), {"torch": "2.11.0", "cuda": "13.0 (runtime)"}, {"threads": "4"})
    assert (machine.platform, machine.device, machine.device_uuid) == ("sm90", "NVIDIA H200", nvml.GPUS[0]["uuid"])
    assert machine.cache_bytes == 60 << 20
    assert machine.cores >= 1
    assert {"python", "system"} < set(machine.software)
    assert (machine.software["driver"], machine.software["torch"]) == ("580.95.05", "2.11.0")
    assert machine.software["cuda"] == "13.0 (runtime)", "what the workers say wins"
    assert machine.settings == {"threads": "4"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process numbers here are those of the machine."""
    monkeypatch.setattr(neighbours, "outermost", lambda: True)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """We are in a container; waiting for the driver's average takes no time."""
    monkeypatch.setattr(neighbours, "outermost", lambda: False)
    monkeypatch.setattr(neighbours, "SETTLE_S", 0.0)


# --- what doctor says -------------------------------------------------------------------------------------------------


def parts() -> dict[str, survey.GpuPart]:
    return {part.name: part for part in survey.gpu_parts()}


@pytest.mark.usefixtures("outside")
def test_doctor_names_gpus_state_and_use(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.GPUS[1] |= {"mig": [1, 1], "persistence": 0, "reasons": 0x4, "processes": [nvml.process(1)]}
    monkeypatch.setenv(gpus.VISIBLE, "0")
    found = parts()
    assert found["GPU 0"].present
    for word in ("NVIDIA H200 (sm90)", "140 GiB", "L2 60 MiB", "driver 580.95.05 for CUDA 13.0", nvml.GPUS[0]["uuid"]):
        assert word in found["GPU 0"].detail
    state = "SM 1980 MHz, memory 3201 MHz, 122 W, limit 700 W, 41 C, held back by: nothing"
    assert found["GPU 0 now"].detail == state
    assert found["GPU 0 use"].detail == "no other process, 4 MiB in use"
    assert "GPU 0 persistence" not in found
    assert not found["GPU 1"].present
    assert "-mig 0" in found["GPU 1"].remedy
    assert "hidden by CUDA_VISIBLE_DEVICES" in found["GPU 1"].detail
    assert "held back by: sw_power_cap" in found["GPU 1 now"].detail
    assert found["GPU 1 use"].detail.startswith("busy: 1 ")
    assert found["GPU 1 persistence"].remedy == "sudo nvidia-smi -i 1 -pm 1"


@pytest.mark.usefixtures("inside")
def test_doctor_says_when_use_is_unknown_or_comes_from_elsewhere(nvml: Any) -> None:
    nvml.GPUS[1]["utilization"] = 80
    found = parts()
    assert found["GPU 0 use"].present
    assert found["GPU 0 use"].detail.startswith("0 % busy (in a container the driver may hide")
    assert not found["GPU 1 use"].present
    assert found["GPU 1 use"].detail.startswith("80 % busy, by processes that cannot be seen")


def test_doctor_says_that_there_is_no_gpu_or_none_of_ours(nvml: Any) -> None:
    nvml.GPUS[:] = [nvml.gpu(0, name="Tesla T4", capability=(7, 5))]
    assert not parts()["GPU 0"].present
    assert "sm_75, no platform of ours" in parts()["GPU 0"].detail
    nvml.GPUS.clear()
    assert not parts()["GPU"].present


def test_doctor_survives_indices_that_can_be_read_in_two_ways(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.GPUS[0] |= {"name": "NVIDIA L4", "capability": (8, 9)}
    monkeypatch.setenv(gpus.VISIBLE, "0")
    assert "PCI_BUS_ID" in parts()["visible GPUs"].detail


def test_optional_libraries_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("cuda/bindings/__init__.py", "tilelang/__init__.py"):
        (tmp_path / module).parent.mkdir(parents=True)
        (tmp_path / module).write_text("raise SystemExit('imported')")
    metadata = tmp_path / "tilelang-0.1.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    absent = survey.OptionalLibrary("no_such_module_of_ours", ("no-such-library",), "nothing")
    monkeypatch.setattr(survey, "LIBRARIES", (*survey.LIBRARIES, absent))
    found = parts()
    assert (found["tilelang"].present, found["tilelang"].detail) == (True, "0.1.8")
    assert found["cuda-bindings"].present
    assert found["no-such-library"] == survey.GpuPart(
        "no-such-library", False, "not installed; for nothing", "pip install no-such-library"
    )


def test_half_a_package_is_not_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not survey.importable("cuda.bindings")
    assert not survey.importable("no_such_module_of_ours.part")


# --- what a judgement takes from the table ----------------------------------------------------------------------------


def test_a_known_product_has_the_figures_of_its_data_sheet(nvml: Any) -> None:
    position = DeviceHost("sm90")
    assert (position.product, position.notes()) == ("NVIDIA H200", ())
    assert position.peaks(1, "bf16") == Peaks(flops=989.4e12, bytes=4.8e12)
    assert position.bound(1, "bf16") == Peaks(flops=2 * 1978.9e12, bytes=12e12)


def test_an_unknown_product_is_held_to_the_fastest_and_named(nvml: Any) -> None:
    nvml.GPUS[:] = [nvml.gpu(0, name="NVIDIA H20")]
    position = DeviceHost("sm90")
    assert position.product == ""
    assert position.peaks(1, "bf16") == Peaks(flops=989.4e12, bytes=4.9e12)
    (note,) = position.notes()
    assert "NVIDIA H20" in note


def test_a_place_for_building_is_bound_by_its_platform() -> None:
    assert CompileOnlyHost("sm100").bound(1, "bf16").flops == 2 * 5000e12


def test_a_place_refuses_what_its_driver_does_not_run(nvml: Any) -> None:
    nvml.DRIVER, nvml.CUDA = "570.124.06", 12080
    position = host_for("sm90", "all")
    position.check_toolchain("nvcc 12.8.93, g++ 12.2.0")
    with pytest.raises(MissingDependency, match=r"cuda-toolkit-12-8"):
        position.check_toolchain("nvcc 13.0.88, g++ 12.2.0")
    host_for("cpu", "all").check_toolchain("nvcc 13.0.88")
