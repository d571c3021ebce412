"""Reading a kernel's source: what a path or a name stands for, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import Surface
from pytest_klineage.surfaces import MAX_SOURCE_BYTES, SURFACES, read_source, surface_backend


@pytest.mark.parametrize(
    ("suffix", "surface"),
    [(".cpp", Surface.CPP), (".cc", Surface.CPP), (".cxx", Surface.CPP), (".py", Surface.PYTHON)],
)
def test_the_suffix_says_the_surface(suffix: str, surface: Surface, tmp_path: Path) -> None:
    path = tmp_path / f"tile{suffix}"
    path.write_text("text")
    source = read_source(path)
    assert (source.surface, source.entry, source.label) == (surface, "run", "tile")
    assert source.main is not None
    assert (source.main.name, source.main.text) == (f"tile{suffix}", "text")


def test_what_the_caller_says_counts_more_than_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "tile.txt"
    path.write_text("text")
    source = read_source(str(path), surface="cpp", entry="sgemm", flags=("-O2",), label="mine")
    assert (source.surface, source.entry, source.flags, source.label) == (Surface.CPP, "sgemm", ("-O2",), "mine")


def test_further_files_stand_behind_the_main_one(tmp_path: Path) -> None:
    for name in ("main.cpp", "b.h", "a.h"):
        (tmp_path / name).write_text(name)
    source = read_source(tmp_path / "main.cpp", also=(tmp_path / "b.h", str(tmp_path / "a.h")))
    assert [file.name for file in source.files] == ["main.cpp", "b.h", "a.h"]


@pytest.mark.parametrize("text", ["torch:mm", "flash_attn.ops.triton:layer_norm", "_m:_f"])
def test_a_module_and_a_function_need_no_file(text: str) -> None:
    source = read_source(text)
    assert (source.surface, source.files, source.label) == (Surface.PYTHON, (), text)
    assert (source.module, source.entry) == tuple(text.split(":"))


def test_where_a_file_comes_from_does_not_change_its_digest(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tile.cpp").write_text("text")
        digests.add(read_source(tmp_path / name / "tile.cpp", label=name).digest)
    assert len(digests) == 1


def test_an_unknown_suffix_is_refused_with_the_surfaces(tmp_path: Path) -> None:
    (tmp_path / "tile.txt").write_text("")
    with pytest.raises(
        UsageError, match=r"tile\.txt: the suffix says no surface.*cpp.*python.*package\.module:function"
    ):
        read_source(tmp_path / "tile.txt")


def test_an_unknown_surface_is_refused_with_the_surfaces(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Valid: cpp, cuda, python, tilelang, triton"):
        read_source(tmp_path / "tile.cpp", surface="fortran")
    with pytest.raises(UnknownName, match="Valid: cpp, cuda, python"):
        surface_backend("fortran")


def test_every_surface_of_the_records_can_be_built() -> None:
    assert set(SURFACES) == set(Surface)
    assert all(backend.surface == name for name, backend in SURFACES.items())


def test_a_cuda_file_is_known_by_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "tile.cu").write_text("")
    assert read_source(tmp_path / "tile.cu").surface is Surface.CUDA


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.cpp cannot be read: No such file"):
        read_source(tmp_path / "missing.cpp")


def test_a_missing_further_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text("")
    with pytest.raises(UsageError, match=r"tile\.h cannot be read"):
        read_source(tmp_path / "main.cpp", also=(tmp_path / "tile.h",))


def test_a_directory_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "tile.cpp").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        read_source(tmp_path / "tile.cpp")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tile.cpp").write_bytes(b"int x;\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_source(tmp_path / "tile.cpp")


def test_a_file_too_large_for_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tile.cpp").write_bytes(b" " * (MAX_SOURCE_BYTES + 1))
    with pytest.raises(UsageError, match="larger than"):
        read_source(tmp_path / "tile.cpp")


@pytest.mark.parametrize("name", SURFACES)
def test_every_surface_is_registered_under_its_own_name(name: str) -> None:
    assert surface_backend(name).surface.value == name
    assert surface_backend(name).platforms
