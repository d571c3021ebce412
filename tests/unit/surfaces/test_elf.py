"""What a library exports, read without loading it, against what the loader finds."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure
from pytest_klineage.surfaces.cpp import CppBackend
from pytest_klineage.surfaces.elf import MAGIC, check_entry, exported_names, needed_libraries

TEXT = """
#include "klineage.h"
#include <math.h>
static int hidden(const klineage_call *) { return 1; }
extern "C" int unseen(const klineage_call *) __attribute__((visibility("hidden")));
extern "C" int unseen(const klineage_call *) { return 2; }
extern "C" int run(const klineage_call *call) { return hidden(call) + unseen(call) + (int)lgamma(call->num_inputs); }
extern "C" int also(const klineage_call *) { return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with names that are exported, hidden, local, and of others."""
    source = KernelSource(surface=Surface.CPP, files=(SourceFile("k.cpp", TEXT),), entry="run", flags=("-O0",))
    return CppBackend().build(source, tmp_path_factory.mktemp("cache"), platform="cpu", timeout_s=60).artifact


def test_names_are_those_that_the_loader_finds(library: Path) -> None:
    names = exported_names(library.read_bytes())
    assert names is not None
    assert {"run", "also"} <= names
    assert not {"hidden", "unseen", "lgamma", "r", ""} & names
    loaded = ctypes.CDLL(str(library))
    for name in names:
        assert loaded[name]


def test_needed_libraries_are_those_of_the_linker(library: Path) -> None:
    assert "libm.so.6" in needed_libraries(library.read_bytes())
    assert all(re.fullmatch(r"lib[\w+]+\.so\.\d+|ld-[\w.-]+", name) for name in needed_libraries(library.read_bytes()))


def test_a_missing_entry_says_how_to_declare_it(library: Path) -> None:
    check_entry(library.read_bytes(), "run")
    with pytest.raises(SurfaceFailure, match='extern "C" int walk') as caught:
        check_entry(library.read_bytes(), "walk")
    assert caught.value.code is Code.ENTRY_MISSING


@given(st.binary(), st.booleans())
def test_other_bytes_are_left_to_the_loader(content: bytes, marked: bool) -> None:
    names = exported_names(MAGIC + content if marked else content)
    assert names is None or names == frozenset()
    assert needed_libraries(MAGIC + content if marked else content) == frozenset()
    check_entry(content, "run")


@given(st.integers(0, 20_000))
def test_a_library_that_is_cut_short_is_no_fault_of_ours(length: int) -> None:
    assert exported_names(MAGIC + bytes(length)) in (None, frozenset())
