"""A survey of imported problems goes on behind what it has kept, a row that was cut short left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import surveying
from surveying import Progress, Row


def test_a_survey_goes_on_behind_a_row_that_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "RUNS", tmp_path / "runs")
    first, second, third = (Row(group="level 1", problem=f"{number}.py") for number in (1, 2, 3))
    assert list(Progress("survey").keep([first, second])) == [first, second]
    path = tmp_path / "runs" / "survey.part.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    progress = Progress("survey")
    assert progress.rows == [first]
    assert list(progress.keep([second, third])) == [second, third]
    assert Progress("survey").rows == progress.rows == [first, second, third]
    progress.end()
    assert Progress("survey").rows == []
