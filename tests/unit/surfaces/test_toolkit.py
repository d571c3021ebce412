"""Finding nvcc, its disassembler and header libraries: which of several, what is said without one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.surfaces import toolkit

VERSION_H = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Make a script that answers --version as the toolkit's programs do."""

    def make(name: str, version: str = "13.0.88", folder: str = "bin") -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version[:4]}, V{version}"\n')
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No toolkit and no wheels but those that a test makes; the C++ compiler stays."""
    compiler = toolkit.find_compiler()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "SYSTEM_TOOLKIT", tmp_path / "nowhere")
    packages = {"nvidia": tmp_path / "site/nvidia", "triton": tmp_path / "site/triton"}
    packages |= {name: tmp_path / "site" / name for name in ("cutlass_library", "flashinfer", "tilelang")}
    monkeypatch.setattr(toolkit, "package_folders", lambda name: [packages[name]] if packages[name].exists() else [])


class TestNvcc:
    def test_without_any_the_extra_is_named(self) -> None:
        with pytest.raises(MissingDependency, match="nvcc") as caught:
            toolkit.find_toolkit()
        assert "pytest-klineage[cuda-build]" in caught.value.remedy

    def test_the_order_is_variable_home_path_wheel(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = program("nvcc", folder="site/nvidia/cu13/bin")
        assert toolkit.find_nvcc() == str(wheel)
        on_path = program("nvcc")
        assert toolkit.find_nvcc() == str(on_path)
        home = program("nvcc", folder="home/bin")
        monkeypatch.setenv("CUDA_HOME", str(home.parents[1]))
        assert toolkit.find_nvcc() == str(home)
        named = program("nvcc-of-mine", folder="mine")
        monkeypatch.setenv("CUDACXX", str(named))
        assert toolkit.find_nvcc() == str(named)

    def test_what_cudacxx_names_must_be_there(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        program("nvcc")
        monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
        with pytest.raises(MissingDependency, match="CUDACXX names, '/nowhere/nvcc'"):
            toolkit.find_nvcc()

    @pytest.mark.parametrize(("version", "enough"), [("12.4.131", False), ("12.8.61", True), ("13.0.88", True)])
    def test_an_old_one_is_refused(self, program: Program, version: str, enough: bool) -> None:
        program("nvcc", version)
        if enough:
            assert toolkit.find_toolkit().version == version
        else:
            with pytest.raises(MissingDependency, match=r"12\.8 or newer \(found 12\.4\.131\)"):
                toolkit.find_toolkit()

    def test_a_wheel_says_where_its_libraries_lie(self, program: Program, tmp_path: Path) -> None:
        program("nvcc", folder="site/nvidia/cu13/bin")
        library = tmp_path / "site/nvidia/cu13/lib"
        library.mkdir()
        (library / "libcudart_static.a").touch()
        assert toolkit.find_toolkit().library_dirs == (str(library),)
        (library.parent / "lib64").mkdir()
        assert toolkit.find_toolkit().library_dirs == ()


class TestDisassembler:
    def test_one_program_alone_is_no_toolkit(self, program: Program) -> None:
        program("cuobjdump")
        assert toolkit.find_disassembler() is None

    def test_it_has_a_say_in_the_description(self, program: Program) -> None:
        program("nvcc")
        without = toolkit.find_toolkit().description
        program("cuobjdump", "13.0.85", folder="site/triton/backends/nvidia/bin")
        program("nvdisasm", "13.0.85", folder="site/triton/backends/nvidia/bin")
        found = toolkit.find_toolkit()
        assert found.disassembler is not None
        assert "cuobjdump 13.0.85" not in without
        assert found.description == f"{without}, cuobjdump 13.0.85"
        assert found.disassembler.path.split(":")[0].endswith("triton/backends/nvidia/bin")


class TestHeaders:
    def headers(self, tmp_path: Path, folder: str, *, tools: bool = False) -> Path:
        include = tmp_path / "site" / folder / "include"
        (include / "cutlass").mkdir(parents=True)
        (include / "cutlass" / "version.h").write_text(VERSION_H)
        if tools:
            (include.parent / "tools/util/include").mkdir(parents=True)
        return include

    def test_none_names_the_command(self) -> None:
        with pytest.raises(MissingDependency, match="'cutlass'") as caught:
            toolkit.find_headers("cutlass")
        assert caught.value.remedy == "pip install nvidia-cutlass"

    def test_name_and_version_of_library_and_package(self, tmp_path: Path) -> None:
        bundled = self.headers(tmp_path, "tilelang/3rdparty/cutlass")
        found = toolkit.find_headers("cutlass")
        assert found.folders == (str(bundled),)
        try:
            installed = importlib.metadata.version("tilelang")
        except importlib.metadata.PackageNotFoundError:
            installed = "of unknown version"
        assert found.version == f"4.2.1 (tilelang {installed})"

    def test_the_package_of_its_own_comes_first(self, tmp_path: Path) -> None:
        self.headers(tmp_path, "tilelang/3rdparty/cutlass")
        own = self.headers(tmp_path, "cutlass_library/source", tools=True)
        assert toolkit.find_headers("cutlass").folders == (str(own), str(own.parent / "tools/util/include"))
