"""Walks with the real gate, and the shipped lineages: their recorded replies lead to them again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.induction import deoptimize, rederive
from pytest_klineage.lab.induction.lineage_store import TRAJECTORY_FILE, induce, replay
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import WalkOrigin
from pytest_klineage.lab.library.lineages import load_lineage, problems_of
from pytest_klineage.lab.llm.conversation import PROMPT_SET
from pytest_klineage.lab.llm.faults import TrajectoryMismatch
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import Code, Status
from pytest_klineage.results.packed import read_packed

ROOT = Path(__file__).parents[4]
SHIPPED = sorted(path.parent.relative_to(ROOT) for path in ROOT.glob("experts/*/*/lineage/lineage.json"))


def test_a_walk_with_the_real_gate(
    tmp_path: Path, origin: WalkOrigin, begin: Callable[..., Session], real_judge: Judge, words: dict[str, Any],
    good: list[str],
) -> None:  # fmt: skip
    """A wrong simplification is refused by the gate itself, and all verdicts are the same when judged again."""
    wrong = words["proposal"]("block_parallel", words["blocked"].replace("sum = 0.0", "sum = 1.0"))
    with begin(words["scripted"](wrong, *good)) as session:
        stored = induce(origin, session, real_judge, tmp_path / "lineage")
    assert problems_of(load_lineage(stored.directory)) == []
    assert [state.name for state in stored.lineage.states] == ["naive", "cache-block", "block-parallel"]
    assert stored.lineage.transitions[0].forward_verdict.status is Status.ACCEPTED
    assert [refused.code for refused in stored.lineage.transitions[-1].rejected] == [Code.MISMATCH]
    again = replay(stored.directory, real_judge)
    assert again.differences == ()
    assert [pair.agrees for pair in again.rejudged] == [True] * 6


@pytest.mark.parametrize("directory", SHIPPED, ids=str)
def test_shipped_lineages_replay_word_by_word(directory: Path) -> None:
    """Where this fails after words of prompts have changed, `lab.llm.conversation.PROMPT_SET` must be raised."""
    assert replay(ROOT / directory, None).differences == ()


@pytest.mark.parametrize("directory", SHIPPED, ids=str)
def test_shipped_lineages_replay_with_other_words(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(ROOT / directory, tmp_path / "lineage")
    for module in (deoptimize, rederive):
        monkeypatch.setattr(module, "filled", lambda name, **values: f"{name} in plain words")
    monkeypatch.setattr(rederive, "shortfall", lambda verdict, old=rederive.shortfall: old(verdict) and "too slow")
    with pytest.raises(TrajectoryMismatch, match="another prompt"):
        replay(copy, None)
    trajectory = copy / TRAJECTORY_FILE
    head, _, rest = read_packed(trajectory).partition(b"\n")
    line = msgspec.json.decode(head)
    line["event"]["prompt_set"] = PROMPT_SET - 1
    trajectory.write_bytes(msgspec.json.encode(line) + b"\n" + rest)
    assert replay(copy, None).differences == ()
