"""Finding a kernel's older version: by name and text in the head, at the same place in the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.comparison.base_checkout import BaseCheckout
from pytest_klineage.plugin.comparison.kernel_files import KernelFiles
from pytest_klineage.records import KernelSource, SourceFile, Surface


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_cpp", ".cpp").replace("_h", ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def kernel(*files: tuple[str, str]) -> KernelSource:
    return KernelSource(
        surface=Surface.CPP,
        files=tuple(SourceFile(*file) for file in files),
        entry="walk",
        flags=("-O2",),
        label="mine",
    )


@pytest.fixture
def head(tmp_path: Path) -> Path:
    write(tmp_path / "head", a__k_cpp="new", a__k_h="header", b__k_cpp="new", c__fresh_cpp="fresh")
    write(tmp_path / "base", a__k_cpp="old a", a__k_h="old header", b__k_cpp="old b")
    return tmp_path / "head"


def test_the_older_version_lies_at_the_same_place(head: Path) -> None:
    checkout = BaseCheckout(head, head.parent / "base")
    source = kernel(("k.cpp", "new"), ("k.h", "header"))
    older = checkout.base_kernel(source, head / "a", [head / "a" / "k.cpp", head / "a" / "k.h"])
    assert older is not None
    assert [file.text for file in older.files] == ["old a", "old header"]
    assert (older.entry, older.flags, older.label) == ("walk", ("-O2",), "mine")
    assert older.digest != source.digest


def test_of_equal_files_the_one_that_was_read_counts(head: Path) -> None:
    """A changed kernel's text written over another one, nearer to the test, must not be compared with that."""
    checkout = BaseCheckout(head, head.parent / "base")
    source = kernel(("k.cpp", "new"))
    found = [checkout.base_kernel(source, head / "a", [head / "a" / ".." / folder / "k.cpp"]) for folder in ("a", "b")]
    assert [older.files[0].text for older in found if older is not None] == ["old a", "old b"]
    with pytest.raises(UsageError, match=r"k\.cpp has the text of several files, .*: a/k\.cpp, b/k\.cpp"):
        checkout.base_kernel(source, head / "a")
    write(head.parent / "base", b__k_cpp="old a")
    older = checkout.base_kernel(source, head / "a")
    assert older is not None
    assert older.files[0].text == "old a"


def test_a_copy_beside_the_test_is_no_new_kernel(head: Path) -> None:
    write(head, tests__k_cpp="new")
    write(head.parent / "base", b__k_cpp="old a")
    checkout = BaseCheckout(head, head.parent / "base")
    for at in ([], [head / "tests" / "k.cpp"]):
        older = checkout.base_kernel(kernel(("k.cpp", "new")), head / "tests", at)
        assert older is not None
        assert older.files[0].text == "old a"


def test_a_file_that_the_base_has_not(head: Path) -> None:
    checkout = BaseCheckout(head, head.parent / "base")
    assert checkout.base_kernel(kernel(("fresh.cpp", "fresh")), head) is None
    (head.parent / "base" / "a" / "k.h").unlink()
    older = checkout.base_kernel(kernel(("k.cpp", "new"), ("k.h", "header")), head / "a", [head / "a" / "k.cpp"])
    assert older is not None
    assert [file.name for file in older.files] == ["k.cpp"]


def lines(*numbers: int) -> str:
    return "".join(f"line {number}\n" for number in numbers)


@pytest.mark.parametrize("place", ["c__renamed_cpp", "d__k2_cpp", "a__nearer_cpp"])
def test_a_renamed_kernel_is_compared_with_what_it_was(head: Path, place: str) -> None:
    now, was = lines(*range(7), 20, 21, 22), lines(*range(10))
    write(head, **{place: now})
    write(head.parent / "base", c__was_cpp=was, c__other_cpp=lines(0, 1, 2, 3, 4, 30, 31, 32, 33, 34))
    name = place.rpartition("__")[2].replace("_cpp", ".cpp")
    older = BaseCheckout(head, head.parent / "base").base_kernel(kernel((name, now)), head)
    assert older is not None
    assert [(file.name, file.text) for file in older.files] == [("was.cpp", was)]


@pytest.mark.parametrize("kept", [range(4), range(10)])
def test_what_little_resembles_or_has_stayed_is_no_rename(head: Path, kept: range) -> None:
    now, was = lines(*kept, *range(20, 30 - len(kept))), lines(*range(10))
    write(head, c__renamed_cpp=now)
    write(head.parent / "base", c__was_cpp=was)
    if len(kept) == 10:
        write(head, c__was_cpp=was)
    assert BaseCheckout(head, head.parent / "base").base_kernel(kernel(("renamed.cpp", now)), head) is None


def test_a_rename_keeps_its_suffix(head: Path) -> None:
    write(head, c__renamed_cpp=lines(*range(9)))
    write(head.parent / "base", c__was_h=lines(*range(9)))
    assert BaseCheckout(head, head.parent / "base").base_kernel(kernel(("renamed.cpp", lines(*range(9)))), head) is None


def test_files_that_the_head_no_longer_names(head: Path) -> None:
    """A kernel that has taken its header in would else be compared with nothing: the base could not be built."""
    write(head, d__k_cpp="merged", d__other_h="not the kernel's")
    base = head.parent / "base"
    write(base, d__k_cpp='#include "k.h"\n#include "klineage.h"\n', d__k_h='  # include "inner.h"', d__inner_h="inner")
    write(base, d__other_h="not the kernel's")
    (base / "d" / "mod.py").write_text("import torch\nfrom helper import loop\n")
    (base / "d" / "helper.py").write_text("import mod\n")
    (head / "d" / "mod.py").write_text("changed")
    checkout = BaseCheckout(head, base)
    older = [checkout.base_kernel(kernel(file), head / "d") for file in (("k.cpp", "merged"), ("mod.py", "changed"))]
    names = [[file.name for file in source.files] for source in older if source is not None]
    assert names == [["k.cpp", "k.h", "inner.h"], ["mod.py", "helper.py"]]


def test_a_kernel_that_has_not_changed_is_that(head: Path) -> None:
    text = '#include "k.h"\n'
    for tree in (head, head.parent / "base"):
        write(tree, d__k_cpp=text, d__k_h="found by the compiler elsewhere")
    source = kernel(("k.cpp", text))
    older = BaseCheckout(head, head.parent / "base").base_kernel(source, head / "d")
    assert older is not None
    assert older.digest == source.digest


def test_text_that_is_in_no_file(head: Path) -> None:
    checkout = BaseCheckout(head, head.parent / "base")
    with pytest.raises(UsageError, match=r"no file of head has the name and the text of k\.cpp"):
        checkout.base_kernel(kernel(("k.cpp", "made up")), head)
    module = KernelSource(surface=Surface.PYTHON, files=(), entry="run", module="package.module")
    with pytest.raises(UsageError, match="an installed module"):
        checkout.base_kernel(module, head)


def test_nested_base_and_hidden_folders_are_ignored(head: Path) -> None:
    write(head, base__k_cpp="only base", venv__k_cpp="only venv")
    (head / "venv" / "pyvenv.cfg").touch()
    write(head / ".hidden", k_cpp="only hidden")
    files = BaseCheckout(head, head / "base").files
    assert [files.locate(SourceFile("k.cpp", text), head) for text in ("only base", "only venv", "only hidden")] == [
        None, None, None,
    ]  # fmt: skip
    assert KernelFiles(head).locate(SourceFile("k.cpp", "only base"), head) == head / "base" / "k.cpp"


def test_a_checkout_stands_for_the_whole_repository(tmp_path: Path) -> None:
    """pytest's root directory may be a part of it."""
    write(tmp_path / "head", part__k_cpp="new")
    write(tmp_path / "base", part__k_cpp="old")
    for name in ("head", "base"):
        (tmp_path / name / ".git").mkdir()
    older = BaseCheckout(tmp_path / "head" / "part", tmp_path / "base").base_kernel(kernel(("k.cpp", "new")), tmp_path)
    assert older is not None
    assert older.files[0].text == "old"


def test_what_is_no_base(head: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        BaseCheckout(head, head / "nowhere")
    with pytest.raises(UsageError, match="is the tree under test"):
        BaseCheckout(head, head)


def test_a_base_that_is_no_text(head: Path) -> None:
    (head.parent / "base" / "a" / "k.cpp").write_bytes(b"\xff\xfe")
    checkout, path = BaseCheckout(head, head.parent / "base"), head / "a" / "k.cpp"
    with pytest.raises(UsageError, match=r"the base's k\.cpp cannot be read"):
        checkout.base_kernel(kernel(("k.cpp", "new")), head / "a", [path])
