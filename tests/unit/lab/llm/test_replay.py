"""A recorded trajectory answers the prompts that it holds, at their cost, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import Answered, Asked, Begun, Opened, Stopped

Said = Callable[..., Reply]


@pytest.fixture
def recorded(tmp_path: Path, scripted: Any, said: Said) -> Path:
    """Two chats; one prompt is asked twice, one call fails."""
    path = tmp_path / "recorded.jsonl"
    failure = BackendFailed(Failure.BROKEN_STREAM, "cut", billed=True)
    script = [said("one", 0.01), said("same 1", 0.02), failure, said("same 2", 0.03), said("two", 0.04)]
    with Session.begin(path, scripted(script), limit_usd=10.0, name="original") as session:
        play(session)
    return path


def play(session: Session) -> list[str]:
    main, other = session.chat(system="s", context=("c",)), session.chat("other")
    found = [main.ask("a").text]
    for text in ("same", "fails", "same"):
        try:
            found.append(other.ask(text).text)
        except BackendFailed as error:
            found.append(error.reason)
        other.forget()
    return [*found, main.ask("b").text]


def test_a_replay_is_the_original(recorded: Path, tmp_path: Path) -> None:
    backend = ReplayBackend(recorded)
    assert backend.model == "toy"
    with Session.begin(tmp_path / "again.jsonl", backend, limit_usd=10.0, name="replay") as session:
        assert play(session) == ["one", "same 1", "broken_stream", "same 2", "two"]
        assert session.budget.spent_usd == pytest.approx(0.01 + 0.02 + 0.1 + 0.03 + 0.04)


def test_a_replay_has_a_budget(recorded: Path, tmp_path: Path) -> None:
    session = Session.begin(tmp_path / "again.jsonl", ReplayBackend(recorded), limit_usd=0.05, name="replay")
    with session, pytest.raises(BudgetExhausted):
        play(session)


def test_an_unseen_prompt_fails_loudly_with_the_difference(recorded: Path, tmp_path: Path) -> None:
    backend = ReplayBackend(recorded)
    with Session.begin(tmp_path / "again.jsonl", backend, limit_usd=10.0, name="replay") as session:
        chat = session.chat(system="s", context=("c",))
        chat.ask("a")
        with pytest.raises(TrajectoryMismatch) as caught:
            chat.ask("b with a twist")
    message = str(caught.value)
    assert "no reply to this prompt" in message
    assert "call 2, chat 'other'" in message
    assert "the system prompt differs" in message
    assert "-" in message


def test_more_than_was_recorded_fails_loudly(recorded: Path, tmp_path: Path) -> None:
    with Session.begin(tmp_path / "again.jsonl", ReplayBackend(recorded), limit_usd=10.0, name="replay") as session:
        play(session)
        with pytest.raises(TrajectoryMismatch, match="asks for more"):
            session.chat("third").ask("a")


def test_a_budget_that_ended_the_run_ends_its_replay(tmp_path: Path, scripted: Any, said: Said) -> None:
    path, again = tmp_path / "ended.jsonl", tmp_path / "again.jsonl"
    for at, backend in ((path, scripted([said("one")])), (again, None)):
        with Session.begin(at, backend or ReplayBackend(path), limit_usd=0.105, name="x") as session:
            chat = session.chat()
            assert chat.ask("a").text == "one"
            with pytest.raises(BudgetExhausted):
                chat.ask("b")
        assert [type(line.event) for line in read_trajectory(at)[0]] == [Begun, Opened, Asked, Answered, Stopped]


def test_a_trajectory_without_replies_is_refused(tmp_path: Path, scripted: Any) -> None:
    path = tmp_path / "empty.jsonl"
    Session.begin(path, scripted([]), limit_usd=1.0, name="empty").close()
    with pytest.raises(UsageError, match="no reply to replay"):
        ReplayBackend(path)


def test_a_resumed_trajectory_replays_as_one(tmp_path: Path, scripted: Any, said: Said) -> None:
    path = tmp_path / "resumed.jsonl"
    with Session.begin(path, scripted([said("one"), KeyboardInterrupt()]), limit_usd=1.0, name="x") as session:
        chat = session.chat()
        chat.ask("a")
        with pytest.raises(KeyboardInterrupt):
            chat.ask("b")
    with Session.resume(path, scripted([said("two")])) as session:
        chat = session.chat()
        original = [chat.ask(text).text for text in "ab"]
    with Session.begin(tmp_path / "r.jsonl", ReplayBackend(path), limit_usd=1.0, name="replay") as session:
        chat = session.chat()
        assert [chat.ask(text).text for text in "ab"] == original == ["one", "two"]
