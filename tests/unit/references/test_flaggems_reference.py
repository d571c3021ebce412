"""The flaggems reference without FlagGems: its folder by case, what its database says, and what it refuses.

FlagGems itself needs a GPU. A module of its name stands in where only its functions' names and arguments are looked at.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_klineage import MissingDependency, UsageError, make_case, operator
from pytest_klineage.references import REFERENCES, TrialTensors, UnsupportedCase, reference
from pytest_klineage.references.flaggems import FlagGemsReference, check_triton, configurations, tuned_in

torch = pytest.importorskip("torch")


@operator("a[M,K], b[K,N] -> c[M,N]")
def mm(a, b):  # type: ignore[no-untyped-def]  # a definition as users write it
    return a @ b


@operator("x[M,N] -> y[M,N]")
def softmax(x):  # type: ignore[no-untyped-def]
    return x.softmax(-1)


MM = make_case(mm, (4, 8, 16), "bf16", "flaggems")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base folder for what is tuned; variables that are set meanwhile are taken back."""
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("FLAGGEMS_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "flag_gems", raising=False)
    return tmp_path


def test_a_case_has_a_folder_of_its_own(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tuned_in(MM)
    tuned_in(MM)  # a process that is asked again stays in its folder
    assert os.environ["FLAGGEMS_CACHE_DIR"] == str(own_folder / MM.id)
    assert os.environ["TRITON_CACHE_DIR"] == str(own_folder / MM.id / "triton")
    monkeypatch.setitem(sys.modules, "flag_gems", ModuleType("flag_gems"))
    tuned_in(MM)
    with pytest.raises(UsageError, match="each case needs a process of its own"):
        tuned_in(make_case(mm, (4, 8, 32), "bf16", "flaggems"))


def test_the_tuners_choice_is_read_from_its_database(tmp_path: Path) -> None:
    folder = tmp_path / "config_cache"
    folder.mkdir()
    with sqlite3.connect(folder / "TunedConfig_H200_triton_3_6.db") as database:
        table = f"mm_kernel_general_{'a' * 32}-{'b' * 32}"
        database.execute(f'create table "{table}" (key_0 integer, BLOCK_M integer, num_warps integer)')
        database.execute(f'insert into "{table}" values (4096, 128, 8)')
        database.execute(f'create table "mm_kernel_general_{"c" * 32}_benchmark" (p50 real)')
    assert configurations(tmp_path) == {"tuned.mm_kernel_general": "BLOCK_M 128, num_warps 8"}
    assert configurations(tmp_path / "nowhere") == {}


def test_products_in_fp32_are_refused() -> None:
    chosen = REFERENCES["flaggems"]
    chosen.check(make_case(softmax, (4, 8), "fp32", "flaggems"), "sm90")
    with pytest.raises(UnsupportedCase, match="compared in bf16 and fp16, not in fp32"):
        chosen.check(make_case(mm, (4, 8, 16), "fp32", "flaggems"), "sm90")
    with pytest.raises(UsageError, match="not on cpu"):
        chosen.check(MM, "cpu")


def test_another_triton_is_a_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.1"))  # type: ignore[arg-type]
    check_triton()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.0"))  # type: ignore[arg-type]
    with pytest.raises(MissingDependency, match=r"triton 3\.6"):
        check_triton()


def test_its_own_entries_are_charged_alone(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for FlagGems: its functions are PyTorch's."""
    gems, ops = ModuleType("flag_gems"), SimpleNamespace(mm=torch.mm, addmm=torch.addmm, bmm=torch.bmm)
    gems.ops, gems.mm = ops, torch.mm  # type: ignore[attr-defined]
    monkeypatch.setattr("pytest_klineage.references.flaggems.imported", lambda module, name, _remedy: {
        ("flag_gems", "ops"): ops, ("flag_gems", "mm"): torch.mm, ("triton", "__version__"): "3.6.0",
    }[module, name])  # fmt: skip
    inputs = {"a": torch.ones(4, 8), "b": torch.ones(8, 16)}
    chosen = reference("flaggems")
    assert isinstance(chosen, FlagGemsReference)
    variants = chosen.variants(MM, TrialTensors("sm90", inputs, {"c": torch.zeros(4, 16)}))
    assert list(variants) == ["flaggems.generic", "flaggems.hopper", "torch"]
    assert set(variants) & set(chosen.countable(MM)) == {"flaggems.generic", "flaggems.hopper"}
    for variant in variants.values():
        (result,) = (variant(inputs, {}) or {}).values()
        assert torch.equal(result, torch.full((4, 16), 8.0))
    assert "hopper" not in "".join(chosen.variants(MM, TrialTensors("sm120", inputs, {"c": torch.zeros(4, 16)})))
