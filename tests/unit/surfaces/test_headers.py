"""The package's own headers for kernels: frozen, found in a source, part of its recipe, and complete for nvcc."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import native
from pytest_klineage.surfaces.cuda import CudaBackend
from pytest_klineage.surfaces.native import INCLUDE_DIR, shared_headers
from pytest_klineage.surfaces.toolkit import find_toolkit

V1 = INCLUDE_DIR / "klineage" / "sm90" / "v1"
FROZEN = {
    "cluster": "2cd3d5c4d41e7007cf28e2206449ec049b7474cb5e111d2ebcee141c8646831e",
    "ldmatrix": "ac9c5d4c75d7753d549cd4be8ad50f3e0f13c0c28f364a0cac7416c649ff694b",
    "mbarrier": "8175f6cd7429a47e815145a4725880abf84e05b44f73df93d64cdf99ca836cb3",
    "tensor_map": "5a7a509e175d8fcc3c0c31139592ee25028b50165b56ae038e3c2872518c2d90",
    "tma": "c09c604dfb8e88fbdb0a4aa96e6c9693eed1ee34de3222a3bf8262bf255edb8a",
    "wgmma": "f82a8ef41143d5221d7cf0c41cdaf2b11a2a85396bb59919015c01dbafcda7f8",
}  # fmt: skip
"""Digests of version 1. A change belongs into a new version: published kernels are named by their own text alone."""
EMPTY = '#include "klineage.h"\nextern "C" int run(const klineage_call *) { return 0; }\n'


def source(*texts: str) -> KernelSource:
    files = tuple(SourceFile(f"kernel{position}.cu", text) for position, text in enumerate(texts))
    return KernelSource(surface=Surface.CUDA, files=files, entry="run")


def include(name: str) -> str:
    return f'#include "klineage/sm90/v1/{name}.cuh"\n'


def test_version_1_is_frozen() -> None:
    found = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in V1.iterdir()}
    assert found == FROZEN


def test_every_file_of_a_source_is_searched() -> None:
    found = shared_headers(source(include("tma") + EMPTY, include("wgmma") + include("tma")))
    assert [header.name for header in found] == ["klineage/sm90/v1/tma.cuh", "klineage/sm90/v1/wgmma.cuh"]
    assert [header.digest for header in found] == [FROZEN["tma"], FROZEN["wgmma"]]


def test_a_computed_include_is_found() -> None:
    assert shared_headers(source('#define TMA "klineage/sm90/v1/tma.cuh"\n#include TMA\n'))


@pytest.mark.parametrize("text", [EMPTY, include("nothing"), '#include "klineage/sm90/v0/tma.cuh"\n'])
def test_a_source_without_headers_has_no_digest(text: str) -> None:
    assert shared_headers(source(text)) == ()


def test_headers_that_headers_include_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "klineage" / "sm90" / "v1"
    folder.mkdir(parents=True)
    (folder / "a.cuh").write_text(include("b"))
    (folder / "b.cuh").write_text(include("a"))
    monkeypatch.setattr(native, "INCLUDE_DIR", tmp_path)
    assert [header.name[-5:] for header in shared_headers(source(include("a")))] == ["a.cuh", "b.cuh"]


def test_a_changed_header_is_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "klineage" / "sm90" / "v1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native, "INCLUDE_DIR", tmp_path)
    with_one, without = source(include("a") + EMPTY), source(EMPTY)
    (folder / "a.cuh").write_text("// one\n")
    first = [CudaBackend().recipe(one, platform="sm90") for one in (with_one, without)]
    (folder / "a.cuh").write_text("// two\n")
    second = [CudaBackend().recipe(one, platform="sm90") for one in (with_one, without)]
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_nvcc_takes_them_and_the_record_names_them(tmp_path: Path) -> None:
    try:
        find_toolkit()
    except MissingDependency as error:
        pytest.skip(str(error))
    text = "".join(include(name) for name in FROZEN) + EMPTY
    text += "__global__ void sync() { klineage::sm90::cluster_sync(); }\n"
    build = CudaBackend().build(source(text), tmp_path, platform="sm90", timeout_s=120).build
    assert build.log == ""
    assert build.includes == {f"klineage/sm90/v1/{name}.cuh": f"sha256 {digest}" for name, digest in FROZEN.items()}
