"""What a case demands of a build, and where a build comes from. No compiler is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate import GateSettings
from pytest_klineage.gate.stages import build as building
from pytest_klineage.gate.stages.build import build_kernel, built_reason, resource_reasons, unchecked_notes
from pytest_klineage.records import Build, Code, KernelCase, KernelResources, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import Built, SurfaceFailure, artifacts

GEMM = KernelResources(
    name="_ZN36_GLOBAL__N__379a159f_9_expert_cu_run4gemmILi128EEEvPKf", registers=168, spill_store_bytes=8,
    spill_load_bytes=12, instructions=("mma", "tma_load"),
)  # fmt: skip
EPILOGUE = KernelResources(name="epilogue", registers=40, instructions=("stmatrix",))
BUILD = Build(digest="d", recipe="r", platform="sm90", kernels=(GEMM, EPILOGUE))
SOURCE = KernelSource(surface=Surface.CUDA, files=(SourceFile("k.cu", "//"),), entry="run")


def demanding(**fields: Any) -> KernelCase:
    return KernelCase(operator="gemm", shape={"M": 1}, dtype="bf16", reference="cublas", **fields)


class TestDemands:
    @pytest.mark.parametrize("allowed", [None, 12, 100])
    def test_what_is_allowed_passes(self, allowed: int | None) -> None:
        assert resource_reasons(demanding(max_spills=allowed, requires=("mma", "stmatrix")), BUILD, Surface.CUDA) == ()

    def test_spills_name_the_kernel_and_the_figures(self) -> None:
        (reason,) = resource_reasons(demanding(max_spills=11), BUILD, Surface.CUDA)
        assert reason.code is Code.SPILLS
        assert reason.message == "gemm spills 12 bytes per thread at 168 registers, 11 allowed"
        assert reason.evidence["spill_store_bytes"] == 8

    def test_a_missing_instruction_says_what_is_there(self) -> None:
        (reason,) = resource_reasons(demanding(requires=("wgmma", "mma")), BUILD, Surface.CUDA)
        assert reason.code is Code.MISSING_INSTRUCTION
        assert reason.message == "no kernel has wgmma: found gemm: mma, tma_load; epilogue: stmatrix"

    def test_many_kernels_are_counted_not_listed(self) -> None:
        kernels = tuple(msgspec.structs.replace(EPILOGUE, name=f"k{number}") for number in range(9))
        build = msgspec.structs.replace(BUILD, kernels=kernels)
        (reason,) = resource_reasons(demanding(requires=("mma",)), build, Surface.CUDA)
        assert reason.message.endswith("k3: stmatrix; and 5 more")

    def test_a_build_without_kernels_has_no_instruction_either(self) -> None:
        empty = msgspec.structs.replace(BUILD, kernels=())
        (reason,) = resource_reasons(demanding(requires=("mma",)), empty, Surface.CUDA)
        assert reason.message == "no kernel has mma: there is no GPU kernel in it"
        assert unchecked_notes(demanding(requires=("mma",)), empty, Surface.CUDA) == ()

    def test_unsearched_instructions_cannot_be_required(self) -> None:
        kernels = (GEMM, msgspec.structs.replace(EPILOGUE, instructions=None))
        build = msgspec.structs.replace(BUILD, kernels=kernels)
        assert resource_reasons(demanding(max_spills=100), build, Surface.CUDA) == ()
        with pytest.raises(MissingDependency, match="cuobjdump"):
            resource_reasons(demanding(requires=("mma",)), build, Surface.CUDA)

    def test_what_is_built_when_it_runs_is_said_not_to_be_checked(self) -> None:
        jit = Build(digest="d")
        for demand in ({"requires": ("wgmma",)}, {"max_spills": 0}):
            assert resource_reasons(demanding(**demand), jit, Surface.PYTHON) == ()
            (note,) = unchecked_notes(demanding(**demand), jit, Surface.PYTHON)
            assert "not checked" in note
        assert unchecked_notes(demanding(), jit, Surface.PYTHON) == ()


class TestBuilt:
    def test_the_worst_kernel_is_named(self) -> None:
        reason = built_reason(BUILD)
        assert reason.code is Code.ACCEPTED_BUILT
        assert reason.message == "built for sm90: 2 kernels, at most 168 registers, 12 bytes spilled"

    def test_without_kernels_it_says_so(self) -> None:
        assert "no GPU kernel" in built_reason(Build(digest="d")).message


class FakeBackend:
    """Builds nothing, and counts how often it is asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.built = root, 0

    def recipe(self, source: KernelSource, *, platform: str) -> str:
        return f"recipe-{platform}"

    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        self.built += 1
        build = Build(digest="d", recipe=self.recipe(source, platform=platform), platform=platform)
        return artifacts.publish(self.root, b"code", source, build)


class TestArtifacts:
    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBackend:
        backend = FakeBackend(tmp_path / "build")
        monkeypatch.setattr(building, "surface_backend", lambda name: backend)
        return backend

    def settings(self, tmp_path: Path, stage: str) -> GateSettings:
        return GateSettings(stage=stage, artifacts=tmp_path / "built", cache_dir=tmp_path / "cache")

    def test_the_compile_stage_writes_and_a_judgement_takes(self, backend: FakeBackend, tmp_path: Path) -> None:
        build_kernel(SOURCE, "sm90", self.settings(tmp_path, "compile"))
        assert (tmp_path / "built/recipe-sm90/kernel.so").read_bytes() == b"code"
        taken = build_kernel(SOURCE, "sm90", self.settings(tmp_path, "all"))
        assert backend.built == 1
        assert taken.build.artifact

    def test_what_is_not_there_is_built_and_not_written(self, backend: FakeBackend, tmp_path: Path) -> None:
        built = build_kernel(SOURCE, "sm120", self.settings(tmp_path, "all"))
        assert (backend.built, built.build.artifact) == (1, "")
        assert not (tmp_path / "built").exists()

    def test_the_compile_stage_builds_even_what_is_there(self, backend: FakeBackend, tmp_path: Path) -> None:
        for _ in range(2):
            build_kernel(SOURCE, "sm90", self.settings(tmp_path, "compile"))
        assert backend.built == 2

    def test_a_damaged_one_is_not_built_over(self, backend: FakeBackend, tmp_path: Path) -> None:
        build_kernel(SOURCE, "sm90", self.settings(tmp_path, "compile"))
        (tmp_path / "built/recipe-sm90/kernel.so").write_bytes(b"other")
        with pytest.raises(SurfaceFailure, match="is refused"):
            build_kernel(SOURCE, "sm90", self.settings(tmp_path, "all"))
        assert backend.built == 1


@pytest.mark.parametrize(
    ("symbol", "function"),
    [
        ("epilogue", "epilogue"),
        ("_Z4gemmPKfS0_Pfiii", "gemm"),
        (GEMM.name, "gemm"),
        ("_ZN7cutlass4gemm6kernel4GemmINS_1AEEEvT_", "Gemm"),
        ("_ZL4gemmPf", "gemm"),
        ("_ZNK5outer5innerEv", "inner"),
        ("_Z", "_Z"),
    ],
)
def test_a_kernel_is_called_by_its_own_name(symbol: str, function: str) -> None:
    assert KernelResources(name=symbol, registers=1).function == function
