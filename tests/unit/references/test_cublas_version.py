"""The version of cuBLAS in the record: that of the library which is loaded, by its own account; else none."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_klineage.references.cublas import LIBRARIES, CublasReference, loaded_version, loaded_versions
from pytest_klineage.surfaces.cpp import find_compiler

STAND_IN = """
extern "C" int {function}(int part, int *value) {{
    static const int version[] = {{{numbers}}};
    *value = version[part];
    return part == {refused} ? 7 : 0;
}}
"""
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build a library whose function answers as cublasGetProperty does, under a version of CUDA that there is not."""

    def make(file: str, cuda: int, numbers: str, *, function: str = "", refused: int = -1) -> Path:
        source, library = tmp_path / f"{file}.cpp", tmp_path / f"lib{file}.so.{cuda}"
        text = STAND_IN.format(function=function or f"{file}GetProperty", numbers=numbers, refused=refused)
        source.write_text(text)
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([find_compiler(), *flags, str(source), "-o", str(library)], check=True)
        return library

    return make


def test_what_is_loaded_says_its_version(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.CDLL(str(build("cublas", 990, "990, 1, 23")))
    ctypes.CDLL(str(build("cublasLt", 990, "990, 2, 0")))
    monkeypatch.setattr(torch.version, "cuda", "990.1")
    versions = CublasReference().versions()
    assert {name: versions[name] for name in LIBRARIES} == {"cublas": "990.1.23", "cublaslt": "990.2.0"}
    assert {"torch", "cuda", "cudnn"} <= set(versions)


def test_what_is_not_loaded_is_not_loaded_for_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build("cublas", 991, "991, 1, 23")
    monkeypatch.chdir(library.parent)
    assert loaded_version(str(library), "cublasGetProperty") == ""
    assert loaded_versions("991.0") == {}
    ctypes.CDLL(str(library))
    assert loaded_versions("991.0") == {"cublas": "991.1.23"}


def test_a_library_that_does_not_say_has_no_version(build: Build) -> None:
    ctypes.CDLL(str(build("cublas", 992, "1, 2, 3", function="somethingElse")))
    ctypes.CDLL(str(build("cublasLt", 992, "1, 2, 3", refused=2)))
    assert loaded_versions("992.0") == {}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings cuBLAS")
def test_a_torch_without_cuda_has_no_version() -> None:
    versions = CublasReference().versions()
    assert not versions.keys() & set(LIBRARIES)
    assert versions["torch"] == torch.__version__
