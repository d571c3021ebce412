"""The exploit corpus' table finds the file behind every test, on shipped operators and on those of a user's file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus_table", ROOT / "suites/gate_quality/test_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["attacks", "fresh", "twins", "open/attacks", "open/twins"])
def test_every_file_has_its_row(suite: ModuleType, folder: str) -> None:
    prefix = "open/" if folder.startswith("open/") else ""
    for path in (ROOT / "tests/exploits" / folder).iterdir():
        if path.suffix in (".cpp", ".py"):
            assert suite.header(prefix + path.stem, "id") in path.read_text()
            assert suite.header(prefix + path.stem, "id")


def test_results_of_one_name_stay_apart(suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = "".join(
        f'<testcase classname="tests.exploits.{file}" name="test_attack_is_rejected[R1_pointer_memo-all-on]" time="1"/>'
        for file in ("test_exploits", "test_open_exploits")
    )
    report = tmp_path / "corpus.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    monkeypatch.setattr(suite.subprocess, "run", lambda *_, **__: None)
    assert [result.kernel for result in suite.run_corpus(report)] == ["R1_pointer_memo", "open/R1_pointer_memo"]
