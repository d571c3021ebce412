"""A recording names its prompt set: of the current one it answers its own words alone, of another one any words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import PROMPT_SET
from pytest_klineage.lab.llm.faults import TrajectoryMismatch
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import Begun

Said = Callable[..., Reply]
OTHER = PROMPT_SET - 1
FIELD = f',"prompt_set":{PROMPT_SET}'.encode()


def play(session: Session, one: str, two: str) -> list[str]:
    main, other = session.chat("main", system="s"), session.chat("other")
    return [main.ask(one).text, other.ask(two).text, main.ask(two).text]


@pytest.fixture
def recorded(tmp_path: Path, scripted: Any, said: Said) -> Path:
    path = tmp_path / "recorded.jsonl"
    script = [said("first", 0.01), said("beside", 0.01), said("second", 0.01)]
    with Session.begin(path, scripted(script), limit_usd=1.0, name="original") as session:
        play(session, "one", "other")
    return path


def of_another_set(path: Path) -> Path:
    data = path.read_bytes()
    assert FIELD in data
    path.write_bytes(data.replace(FIELD, f',"prompt_set":{OTHER}'.encode()))
    return path


def begun(path: Path) -> Begun:
    event = read_trajectory(path)[0][0].event
    assert isinstance(event, Begun)
    return event


def test_a_new_recording_names_the_current_set(recorded: Path) -> None:
    assert begun(recorded).prompt_set == PROMPT_SET


def test_a_recording_without_the_field_is_of_the_first_set(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes().replace(FIELD, b""))
    assert begun(recorded).prompt_set == 1


def test_a_replay_of_another_set_has_recorded_prompts(recorded: Path, tmp_path: Path) -> None:
    backend, again = ReplayBackend(of_another_set(recorded)), tmp_path / "again.jsonl"
    with Session.begin(again, backend, limit_usd=1.0, name="replay") as session:
        assert play(session, "new one", "new other") == ["first", "beside", "second"]
    assert begun(again).prompt_set == OTHER
    assert b"new one" not in again.read_bytes()


def test_a_replay_of_the_current_set_needs_its_words(recorded: Path, tmp_path: Path) -> None:
    backend = ReplayBackend(recorded)
    session = Session.begin(tmp_path / "again.jsonl", backend, limit_usd=1.0, name="replay")
    with session, pytest.raises(TrajectoryMismatch, match="no reply to this prompt"):
        play(session, "new one", "new other")


def test_a_resumed_run_of_another_set_goes_on(recorded: Path, scripted: Any, said: Said) -> None:
    live = scripted([said("third", 0.01)])
    with Session.resume(of_another_set(recorded), live) as session:
        assert play(session, "new one", "new other") == ["first", "beside", "second"]
        session.chat("late").ask("new words")
    assert [asked.turns[-1].text for asked in live.asked] == ["new words"]


def test_more_than_another_set_recorded_is_refused(recorded: Path, tmp_path: Path) -> None:
    backend = ReplayBackend(of_another_set(recorded))
    with Session.begin(tmp_path / "again.jsonl", backend, limit_usd=1.0, name="replay") as session:
        play(session, "new one", "new other")
        with pytest.raises(TrajectoryMismatch, match="asks for more"):
            session.chat("third").ask("a")
