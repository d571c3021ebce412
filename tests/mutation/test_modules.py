"""What `make mutants` names is there, and what it finds becomes a page. No module is mutated here."""

from __future__ import annotations

import tomllib
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = tomllib.loads((mutants.HERE / "modules.toml").read_text())


@pytest.mark.parametrize("name", MODULES)
def test_module_and_tests_are_there(name: str) -> None:
    paths = [MODULES[name]["module"], *MODULES[name]["tests"]]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_reasons_are_of_modules_that_are_mutated() -> None:
    assert set(tomllib.loads((mutants.HERE / "reasons.toml").read_text())) <= set(MODULES)


def test_a_section_counts_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "difference", lambda folder, mutant: ("a | b", mutant))
    found = {"m.x_f__mutmut_1": "killed", "m.xǁIndexǁg__mutmut_2": "survived", "m.x_f__mutmut_3": "not tried"}
    text = mutants.section("name", "m.py", found, tmp_path, {"m.xǁIndexǁg__mutmut_2": "no matter"})
    assert "`m.py`: 1 of 2 killed (50.0 %), 1 not tried." in text
    assert "| Index.g | `a \\| b` | `m.xǁIndexǁg__mutmut_2` | no matter |" in text


def test_a_new_section_takes_the_old_ones_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "HERE", tmp_path)
    for name, text in (("b", "old"), ("a", "first"), ("b", "new")):
        mutants.keep(name, f"## {name}\n\n{text}\n")
    page = (tmp_path / "SURVIVORS.md").read_text()
    assert "old" not in page
    assert page.index("first") < page.index("new")
