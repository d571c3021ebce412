"""Kernels that would pass for unchanged, or be compared with another than the base's own: links, tests, imports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.comparison.base_checkout import BaseCheckout
from pytest_klineage.plugin.comparison.base_tests import named_instead
from pytest_klineage.plugin.comparison.kernel_files import KernelFiles
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


def test_what_lies_outside_of_the_tree_is_passed_over(trees: tuple[Path, Path]) -> None:
    head, base = trees
    outside = head.parent / "outside"
    text = "from . import near\nfrom .near import run\nfrom .. import far\n" + "from " + "." * 40 + "x import y\n"
    above = "".join(f"from {'.' * level} import top\nfrom {'.' * level}top import run\n" for level in range(1, 20))
    for name in ("__init__.py", "near.py"):
        outside.mkdir(exist_ok=True)
        (outside / name).write_text("# outside\n")
    write(head.parent, far_py="")
    (head.parent / "__init__.py").write_text("")
    source = '#include "near.h"\n#include "odd\0.h"\n'
    write(outside, k_py=text + above, k_cpp=source, near_h="new")
    for root in (head, base):
        (root / "kernels").symlink_to(outside)
    checkout = BaseCheckout(head, base)
    for name, written in (("k.py", text + above), ("k.cpp", source)):
        made = kernel(name, written)
        older = checkout.base_kernel(made, head / "tests", [head / "kernels" / name])
        assert older is not None
        assert older.digest == made.digest


@pytest.mark.parametrize("where", ["beside", "path", "finder"])
def test_of_modules_with_a_name_python_takes_one(
    trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Without a sign of which is meant, any that has changed counts."""
    head, base = trees
    text = "import tools_of_mine\n"
    for root, changed in ((head, "new"), (base, "old")):
        write(root, kernels__k_py=text, a__tools_of_mine_py=f"# {changed}\n", b__tools_of_mine_py="# same\n")
    made, at = kernel("k.py", text), [head / "kernels" / "k.py"]
    with pytest.raises(UsageError, match=r"what it imports has changed, .*: a/tools_of_mine\.py$"):
        BaseCheckout(head, base).base_kernel(made, head / "tests", at)
    if where == "beside":
        for root in trees:
            write(root, kernels__tools_of_mine_py="# same\n")
    elif where == "path":
        monkeypatch.syspath_prepend(str(head / "b"))
    else:
        spec = importlib.util.spec_from_file_location("tools_of_mine", head / "b" / "tools_of_mine.py")
        assert spec is not None
        monkeypatch.setitem(sys.modules, "tools_of_mine", importlib.util.module_from_spec(spec))
    older = BaseCheckout(head, base).base_kernel(made, head / "tests", at)
    assert older is not None
    assert older.digest == made.digest


def test_a_kernels_own_files_come_first(trees: tuple[Path, Path]) -> None:
    head, base = trees
    for root, changed in ((head, "new"), (base, "old")):
        for suffix in ("h", "py"):
            write(root, **{f"include__common_{suffix}": "# same\n", f"other__common_{suffix}": f"# {changed}\n"})
        write(root, kernels__k_cpp='#include "common.h"\n', kernels__k_py="import common\n")
        write(root, kernels__n_cpp='#include "mine/parts.h"\n', src__mine__parts_h="same", src__other__parts_h=changed)
    checkout = BaseCheckout(head, base)
    for main, header in (("k.cpp", "common.h"), ("k.py", "common.py"), ("n.cpp", "")):
        paths = [head / "kernels" / main, *([head / "include" / header] if header else [])]
        files = tuple(SourceFile(path.name, path.read_text()) for path in paths)
        made = msgspec.structs.replace(kernel(main, ""), files=files)
        older = checkout.base_kernel(made, head / "tests", paths)
        assert older is not None
        assert older.digest == made.digest


PACKAGE = {
    "__init__.py": "from .fast import run\nfrom .slow import walk\n",
    "fast.py": "def run():\n    pass\n",
    "slow.py": "# {}\n",
    "deep/__init__.py": "from ..slow import walk\n",
    "deep/own.py": "from ..fast import run\n",
}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("from mine.fast import run", False),
        ("from mine.deep.own import run", False),
        ("from mine import run", True),
        ("import mine.fast", True),
        ("from mine.deep import own", True),
        ("from mine.slow import walk", True),
    ],
)
def test_a_package_on_the_way_is_compared_not_followed(trees: tuple[Path, Path], text: str, changed: bool) -> None:
    head, base = trees
    for root in trees:
        write(root, kernels__k_py=text)
        for name, part in PACKAGE.items():
            path = root / "mine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(part.replace("{}", root.name))
    checkout = BaseCheckout(head, base)
    made, at = kernel("k.py", text), [head / "kernels" / "k.py"]
    if changed:
        with pytest.raises(UsageError, match=r"what it imports has changed, .*: mine/slow\.py$"):
            checkout.base_kernel(made, head / "tests", at)
        return
    assert checkout.base_kernel(made, head / "tests", at) is not None
    (base / "mine" / "__init__.py").write_text("from .fast import walk as run\n")
    with pytest.raises(UsageError, match=r"what it imports has changed, .*: mine/__init__\.py$"):
        checkout.base_kernel(made, head / "tests", at)


def test_files_that_end_alike_are_looked_for_once(trees: tuple[Path, Path]) -> None:
    head, _base = trees
    write(head, mine__deep__k_py="", other__k_py="")
    files = KernelFiles(head)
    assert files.ending_with("deep/k.py") == [head / "mine" / "deep" / "k.py"]
    assert files.ending_with("deep/k.py") is files.ending_with("deep/k.py")
