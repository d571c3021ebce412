"""What a model is asked for the rows of suites/flaggems: 22 targets in three arms, a prompt each. No model is here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

import rows  # after torch is known to be there
from running import method_of, task_of
from written import digest_of, retrieved, same_problem, written_design

from pytest_klineage.plugin.waiting import WAITING_EXIT

DESIGN = written_design()


def test_every_row_is_a_target_beside_flaggems() -> None:
    assert len(DESIGN.targets) == len(rows.ROWS) == 22
    for row, name in zip(rows.ROWS, DESIGN.targets, strict=True):
        assert DESIGN.case(name).id == row.case("sm90", "flaggems").id
        assert DESIGN.case(name).reference == "flaggems"
        assert DESIGN.case(name).requires == (() if row.family == rows.REDUCTION else ("wgmma",))
        assert DESIGN.root(name).files[0].text.startswith("#include")


def test_arms_differ_in_their_cards_alone() -> None:
    assert DESIGN.arms == ("none", "labels", "cards")
    assert DESIGN.frozen is None
    for name in DESIGN.targets:
        shown = {arm: DESIGN.cards(name, arm) for arm in DESIGN.arms}
        assert not shown["none"]
        assert shown["labels"] == shown["cards"] != ()
        case = task_of(DESIGN, name).case
        assert len({method_of(DESIGN, arm, case, cards, DESIGN.shots).goal for arm, cards in shown.items()}) == 1


def test_the_row_whose_cards_come_from_its_own_problem_is_named() -> None:
    assert [row.number for row in rows.ROWS if same_problem(row)] == [2]
    assert retrieved(rows.ROWS[0]) == retrieved(rows.ROWS[2])


def test_chains_of_other_prompts_carry_another_digest() -> None:
    assert digest_of({"a": {"x": "1", "y": "2"}}) == digest_of({"a": {"y": "2", "x": "1"}})
    assert digest_of({"a": {"x": "1"}}) != digest_of({"a": {"x": "2"}})


@pytest.mark.nightly
def test_one_command_asks_for_every_arm(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "suites/flaggems/test_written.py",
        "--platform=sm90", f"--klineage-executor=batch:{tmp_path / 'judge'}", "--klineage-llm=exchange",
        f"--klineage-exchange={tmp_path / 'replies'}", "--klineage-model=unbilled",
        f"--klineage-trajectories={tmp_path / 'trajectories'}", f"--klineage-cache-dir={tmp_path / 'cache'}",
        "-k", "test_chain and row_15",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == WAITING_EXIT, done.stdout[-3000:]
    prompts = {path.parts[-3]: path.read_text() for path in (tmp_path / "replies").rglob("*-prompt.md")}
    assert set(prompts) == set(DESIGN.arms)
    assert len({re.search(r"^digest: (\w+)$", text, re.M)[1] for text in prompts.values()}) == 3  # type: ignore[index]
    card = retrieved(rows.ROWS[14])[0]
    assert card.intent in prompts["cards"]
    assert card.name in prompts["labels"]
    assert card.intent not in prompts["labels"]
    assert card.name not in prompts["none"]
    (begun,) = {
        msgspec.json.decode(path.read_bytes().splitlines()[0])["event"]["settings"]["design"]
        for path in (tmp_path / "trajectories").rglob("*.jsonl")
    }
    assert len(begun) == 64
