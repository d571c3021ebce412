"""Files of references: known from a marker, or found below the folder where a judge was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.references.functions import load_function, named_file, reference_files

WRITTEN = "deep/mine.py:double"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a judge was started, with a reference's file below it."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_judge_elsewhere_finds_the_file(checkout: Path) -> None:
    files = reference_files([WRITTEN, "torch:mm"])
    assert files == {"deep/mine.py": str(checkout / "deep" / "mine.py")}
    assert load_function(WRITTEN, files)(4) == 8


def test_a_marker_goes_before_the_current_folder(checkout: Path) -> None:
    (checkout / "other.py").write_text("def double(x):\n    return 3 * x\n")
    try:
        named_file(checkout / "other.py", "deep/mine.py")
        assert reference_files([WRITTEN]) == {"deep/mine.py": str(checkout / "other.py")}
    finally:
        from pytest_klineage.references import functions

        functions._files.pop("deep/mine.py")


def test_a_file_that_is_not_there_is_named(checkout: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.py") as refused:
        reference_files(["deep/absent.py:double"])
    assert str(checkout) in str(refused.value)


def test_a_file_outside_of_the_folder_is_not_taken(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(checkout / "deep")
    for name in ("../mine.py", str(checkout / "mine.py")):
        with pytest.raises(UsageError, match="not below"):
            reference_files([f"{name}:double"])
