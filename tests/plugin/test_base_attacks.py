"""Kernels that would pass for unchanged, or be compared with another than the base's own: links, tests, imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.comparison.base_checkout import BaseCheckout
from pytest_klineage.plugin.comparison.base_tests import named_instead
from pytest_klineage.records import KernelSource, SourceFile, Surface


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_cpp", ".cpp").replace("_py", ".py").replace("_h", ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def kernel(name: str, text: str) -> KernelSource:
    surface = Surface.PYTHON if name.endswith(".py") else Surface.CPP
    return KernelSource(surface=surface, files=(SourceFile(name, text),), entry="run", label="mine")


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("head", "base"):
        (tmp_path / name / "tests").mkdir(parents=True)
    return tmp_path / "head", tmp_path / "base"


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_is_compared_with_the_file_it_replaced(trees: tuple[Path, Path]) -> None:
    head, base = trees
    write(base, kernels__k_cpp="fast", kernels__old__k_cpp="slowest")
    write(head, kernels__old__k_cpp="slow")
    (head / "kernels" / "k.cpp").symlink_to("old/k.cpp")
    checkout = BaseCheckout(head, base)
    at = head / "tests" / ".." / "kernels" / "k.cpp"
    older = checkout.base_kernel(kernel("k.cpp", "slow"), head / "tests", [at])
    assert older is not None
    assert older.files[0].text == "fast"
    assert checkout.became_a_link(at)
    assert not checkout.became_a_link(head / "kernels" / "old" / "k.cpp")


def test_a_link_that_was_one_or_is_new_is_followed(trees: tuple[Path, Path]) -> None:
    head, base = trees
    for root, text in ((head, "new"), (base, "old")):
        write(root, kernels__real__k_cpp=text)
        (root / "kernels" / "k.cpp").symlink_to("real/k.cpp")
    (head / "kernels" / "fresh.cpp").symlink_to("real/k.cpp")
    (head.parent / "elsewhere").symlink_to(head)
    checkout = BaseCheckout(head.parent / "elsewhere", base)
    for name in ("k.cpp", "fresh.cpp"):
        at = head.parent / "elsewhere" / "kernels" / name
        older = checkout.base_kernel(kernel(name, "new"), head / "tests", [at])
        assert older is not None
        assert older.files[0].text == "old"
        assert not checkout.became_a_link(at)


# --- tests ------------------------------------------------------------------------------------------------------------

NAMES = """
import pytest

class TestMine:
    @pytest.mark.parametrize("size", [1, 2])
    def test_k(self, kernel_gate, size):
        kernel_gate("../kernels/{}")

def test_other(kernel_gate):
    kernel_gate("../kernels/other.cpp")
"""


def named(trees: tuple[Path, Path], now: str, was: str, names: tuple[str, ...] = ("TestMine", "test_k")) -> object:
    head, base = trees
    write(head, tests__test_k_py=NAMES.replace("{}", now))
    write(base, tests__test_k_py=NAMES.replace("{}", was))
    at = head / "tests" / "../kernels" / now
    instead, own = named_instead(at, head / "tests" / "test_k.py", BaseCheckout(head, base), names)
    return (instead.resolve().relative_to(base).as_posix() if instead else "", own)


def test_a_repointed_test_is_compared_with_its_own_kernel(trees: tuple[Path, Path]) -> None:
    head, base = trees
    write(base, kernels__k_cpp="fast", kernels__v2__k_cpp="an experiment", kernels__other_cpp="other")
    write(head, kernels__v2__k_cpp="slow")
    assert named(trees, "v2/k.cpp", "k.cpp") == ("kernels/k.cpp", False)
    instead = base / "kernels" / "k.cpp"
    older = BaseCheckout(head, base).base_kernel(
        kernel("k.cpp", "slow"), head / "tests", [head / "kernels" / "v2" / "k.cpp"], instead
    )
    assert older is not None
    assert older.files[0].text == "fast"


def test_a_test_that_names_it_still_or_is_new_changes_nothing(trees: tuple[Path, Path]) -> None:
    head, base = trees
    write(base, kernels__k_cpp="fast")
    assert named(trees, "k.cpp", "k.cpp") == ("", True)
    assert named(trees, "v2/k.cpp", "k.cpp", ("TestMine", "test_fresh")) == ("", True)
    (base / "tests" / "test_k.py").unlink()
    assert named_instead(head / "k.cpp", head / "absent.py", BaseCheckout(head, base), ("test_k",)) == (None, True)


ONE = '''
def test_k(kernel_gate):
    """{}"""
    kernel_gate({})
'''


def choice(trees: tuple[Path, Path], now: str, was: str, said: str = "It is fast.") -> tuple[Path | None, bool]:
    """What the base's test names instead of kernels/k.cpp, both calls written out."""
    head, base = trees
    for root, called in ((head, now), (base, was)):
        write(root, tests__test_k_py=ONE.replace("{}", said, 1).replace("{}", called))
    return named_instead(
        head / "tests" / "../kernels/k.cpp", head / "tests" / "test_k.py", BaseCheckout(head, base), ("test_k",)
    )


def test_another_way_to_write_a_path_is_no_other_kernel(trees: tuple[Path, Path]) -> None:
    head, base = trees
    for root in (head, base):
        write(root, kernels__k_cpp="fast", kernels__old_cpp="old")
    assert choice(trees, '"../kernels/k.cpp"', '"./../kernels/k.cpp"') == (None, True)
    assert choice(trees, '"../kernels/k.cpp"', '"../kernels/old.cpp" or "../kernels/./old.cpp"') == (
        base / "kernels" / "old.cpp", False,
    )  # fmt: skip


@pytest.mark.parametrize("said", ["It is fast.", "Judges kernels/k.cpp", "fast\\0", "x" * 5000])
def test_a_docstring_names_no_kernel(trees: tuple[Path, Path], said: str) -> None:
    for root in trees:
        write(root, kernels__k_cpp="fast")
    assert choice(trees, '"../kernels/k.cpp"', "KERNEL", said) == (None, True)


def test_a_file_outside_of_the_base_is_not_its_kernel(trees: tuple[Path, Path]) -> None:
    head, base = trees
    write(head, kernels__k_cpp="slow")
    write(head.parent, elsewhere__old_cpp="old")
    (base / "kernels").mkdir()
    (base / "kernels" / "old.cpp").symlink_to(head.parent / "elsewhere" / "old.cpp")
    assert choice(trees, '"../kernels/k.cpp"', '"../kernels/old.cpp"') == (None, False)
    assert choice(trees, '"../kernels/k.cpp"', f'"{head.parent / "elsewhere" / "old.cpp"}"') == (None, False)


def test_several_kernels_that_a_test_has_named_leave_it_open(trees: tuple[Path, Path]) -> None:
    head, base = trees
    write(base, kernels__a_cpp="a", kernels__b_cpp="b", kernels__c_cpp="c")
    text = "def test_k(kernel_gate):\n    for name in ({}):\n        kernel_gate(name)\n"
    for root, files in ((head, ("c",)), (base, ("a", "b"))):
        listed = "".join(f'"../kernels/{name}.cpp", ' for name in files)
        write(root, tests__test_k_py=text.replace("{}", listed))
    at = head / "tests" / "../kernels/c.cpp"
    found = named_instead(at, head / "tests" / "test_k.py", BaseCheckout(head, base), ("test_k",))
    assert found == (None, False)


# --- imports ----------------------------------------------------------------------------------------------------------


def test_what_a_kernel_imports_is_compared_too(trees: tuple[Path, Path]) -> None:
    head, base = trees
    text = "from impl import run\nimport json\n"
    for root, times in ((head, 3), (base, 1)):
        write(root, kernels__k_py=text, lib__impl_py="import deeper\n", lib__deeper_py=f"TIMES = {times}\n")
    older = BaseCheckout(head, base).base_kernel(kernel("k.py", text), head / "tests", [head / "kernels" / "k.py"])
    assert older is not None
    assert [(file.name, file.text) for file in older.files] == [("k.py", text), ("deeper.py", "TIMES = 1\n")]


def test_a_changed_package_leaves_nothing_to_compare(trees: tuple[Path, Path]) -> None:
    head, base = trees
    text = "from mine.fast import run\n"
    for root, times in ((head, 3), (base, 1)):
        write(root, kernels__k_py=text)
        (root / "src" / "mine").mkdir(parents=True)
        (root / "src" / "mine" / "__init__.py").write_text("")
        (root / "src" / "mine" / "fast.py").write_text("from .inner import run\n")
        (root / "src" / "mine" / "inner.py").write_text(f"TIMES = {times}\n")
    checkout = BaseCheckout(head, base)
    at = [head / "kernels" / "k.py"]
    with pytest.raises(UsageError, match=r"what it imports has changed, .*: src/mine/inner\.py$"):
        checkout.base_kernel(kernel("k.py", text), head / "tests", at)
    changed = kernel("k.py", text + "# changed\n")
    (head / "kernels" / "k.py").write_text(text + "# changed\n")
    older = checkout.base_kernel(changed, head / "tests", at)
    assert older is not None
    assert [file.name for file in older.files] == ["k.py"]


def test_others_of_that_name_change_nothing(trees: tuple[Path, Path]) -> None:
    """A module of a package is no module by its last name, and a header beside a kernel is the one that it includes."""
    head, base = trees
    text, source = "import torch, helper\n", '#include "common.h"\n'
    for root, changed in ((head, "new"), (base, "old")):
        write(root, kernels__k_py=text, kernels__k_cpp=source, kernels__common_h="same", other__common_h=changed)
        (root / "mine").mkdir()
        (root / "mine" / "__init__.py").write_text("")
        (root / "mine" / "torch.py").write_text(changed)
    checkout = BaseCheckout(head, base)
    for made in (kernel("k.py", text), kernel("k.cpp", source)):
        older = checkout.base_kernel(made, head / "tests", [head / "kernels" / made.files[0].name])
        assert older is not None
        assert older.digest == made.digest
