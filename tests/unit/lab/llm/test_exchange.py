"""Prompts and replies through a folder, with a kill -9 in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import BadRecord, StoreError, UsageError, WaitsForReply
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn
from pytest_klineage.lab.llm.exchange import ExchangeBackend
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import Answered, Asked, Failed

QUESTION = Conversation(
    prefix=Prefix(system="be brief", context=("the ABI",)),
    turns=(Turn(Role.USER, "first"), Turn(Role.ASSISTANT, "reply"), Turn(Role.USER, "second")),
)
MAKE = Callable[..., ExchangeBackend]
SCRIPT = """
import sys
from pathlib import Path
from pytest_klineage.lab.llm.exchange import ExchangeBackend
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.lab.llm.session import Session

folder, prices, path = map(Path, sys.argv[1:])
backend = ExchangeBackend(folder, Prices.load(prices), model="toy", poll_s=0.02, settle_s=0.02)
with Session.begin(path, backend, limit_usd=5.0, name="killed") as session:
    chat = session.chat(system="s")
    chat.ask("a")
    chat.ask("b")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "exchange"


@pytest.fixture
def make(folder: Path, prices: Prices) -> MAKE:
    """Makes a backend that is quick enough for a test."""

    def make_backend(**options: Any) -> ExchangeBackend:
        given = {"model": "toy", "deadline_s": 60.0, "poll_s": 0.01, "settle_s": 0.05, **options}
        return ExchangeBackend(folder, prices, **given)

    return make_backend


def ask(backend: ExchangeBackend, call: int = 1, conversation: Conversation = QUESTION) -> Any:
    return backend.reply(conversation, max_output_tokens=100, call=call)


def answering(folder: Path, replies: dict[str, bytes]) -> threading.Thread:
    """Put replies beside their prompts as these appear."""

    def answer() -> None:
        for name, data in replies.items():
            wait_for(folder / name.replace("reply", "prompt"))
            (folder / name).write_bytes(data)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} did not appear")


def test_a_prompt_goes_out_and_a_reply_comes_in(folder: Path, make: MAKE) -> None:
    thread = answering(folder, {"0007-reply.md": "Änswer\n".encode()})
    reply = ask(make(), call=7)
    thread.join()
    assert (reply.text, reply.model, reply.ids) == ("Änswer\n", "toy", {"file": "0007-reply.md"})
    assert reply.usage.estimated
    assert sorted(path.name for path in folder.iterdir()) == ["0007-prompt.md", "0007-reply.md"]


def test_the_prompt_holds_all_that_is_needed_to_answer(folder: Path, make: MAKE) -> None:
    with pytest.raises(WaitsForReply):
        ask(make(deadline_s=0.0))
    text = (folder / "0001-prompt.md").read_text()
    for part in ("be brief", "the ABI", "first", "reply", "second", "0001-reply.md", QUESTION.digest, "100", "toy"):
        assert part in text


def test_a_prompt_appears_atomically(folder: Path, make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
        assert Path(source).read_text().endswith("second\n")
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with pytest.raises(WaitsForReply):
        ask(make(deadline_s=0.0))
    assert seen == [[]]


def test_a_reply_is_taken_only_when_it_has_settled(folder: Path, make: MAKE) -> None:
    def write_slowly() -> None:
        wait_for(folder / "0001-prompt.md")
        with (folder / "0001-reply.md").open("w") as file:
            for _ in range(10):
                file.write("x")
                file.flush()
                time.sleep(0.05)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    assert ask(make(settle_s=1.5)).text == "x" * 10
    thread.join()


@pytest.mark.parametrize("waits", [True, False])
def test_an_empty_reply_is_none_yet(folder: Path, make: MAKE, waits: bool) -> None:
    """It is waited on until the deadline; a run that goes in turns ends its turn at once."""
    backend = make(deadline_s=0.3 if waits else 60.0, waits=waits)
    with pytest.raises(WaitsForReply):
        ask(make(deadline_s=0.0))
    (folder / "0001-reply.md").touch()
    started = time.monotonic()
    with pytest.raises(WaitsForReply, match=r"after 0\.3 s" if waits else "not written yet"):
        ask(backend)
    assert time.monotonic() - started < 30


def test_a_reply_after_the_deadline_is_taken_when_resumed(folder: Path, make: MAKE, tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    with (
        Session.begin(path, make(deadline_s=0.0), limit_usd=5.0, name="late") as session,
        pytest.raises(WaitsForReply, match="resume the trajectory"),
    ):
        session.chat().ask("a")
    (folder / "0001-reply.md").write_text("late")
    with Session.resume(path, make()) as session:
        assert session.chat().ask("a").text == "late"


@pytest.mark.parametrize(
    ("data", "failure"), [(b"\xff\xfe", Failure.NOT_TEXT), (b"x" * (4 * 1024 * 1024 + 1), Failure.TOO_LONG)]
)
def test_what_cannot_be_a_reply_is_named(folder: Path, make: MAKE, data: bytes, failure: Failure) -> None:
    thread = answering(folder, {"0001-reply.md": data})
    with pytest.raises(BackendFailed) as caught:
        ask(make())
    thread.join()
    assert caught.value.failure is failure


class TestStatedUsage:
    def test_is_used_and_is_no_estimate(self, folder: Path, make: MAKE) -> None:
        folder.mkdir()
        stated = {"model": "toy", "input_tokens": 1000, "output_tokens": 100, "cost_usd": 99.0}
        (folder / "0001-usage.json").write_text(json.dumps(stated))
        thread = answering(folder, {"0001-reply.md": b"x"})
        usage = ask(make()).usage
        thread.join()
        assert (usage.input_tokens, usage.output_tokens, usage.estimated) == (1000, 100, False)
        assert usage.cost_usd == pytest.approx((1000 + 500) / 1e6)

    @pytest.mark.parametrize("stated", ["{}", "x", '{"model":"toy","output_tokens":-1}', '{"model":"toy","x":"'])
    def test_that_cannot_be_read_is_refused(self, folder: Path, make: MAKE, stated: str) -> None:
        folder.mkdir()
        (folder / "0001-usage.json").write_text(stated)
        thread = answering(folder, {"0001-reply.md": b"x"})
        with pytest.raises(BadRecord):
            ask(make())
        thread.join()


def test_an_interrupted_prompt_is_taken_up_again(folder: Path, make: MAKE) -> None:
    with pytest.raises(WaitsForReply):
        ask(make(deadline_s=0.0))
    before = (folder / "0001-prompt.md").stat().st_mtime_ns
    (folder / "0001-reply.md").write_text("late")
    assert ask(make()).text == "late"
    assert (folder / "0001-prompt.md").stat().st_mtime_ns == before


def test_another_prompt_under_the_same_number_is_refused(folder: Path, make: MAKE) -> None:
    other = Conversation(prefix=Prefix(), turns=(Turn(Role.USER, f"digest: {QUESTION.digest}"),))
    with pytest.raises(WaitsForReply):
        ask(make(deadline_s=0.0), conversation=other)
    with pytest.raises(UsageError, match="prompt of another run"):
        ask(make())


def test_a_new_run_never_takes_the_replies_of_another(folder: Path, make: MAKE, tmp_path: Path) -> None:
    first, second = make(), make()
    second.begin()
    thread = answering(folder, {"0001-reply.md": b"first run's"})
    with Session.begin(tmp_path / "first.jsonl", first, limit_usd=5.0, name="first") as session:
        session.chat().ask("a")
    thread.join()
    same = Conversation(prefix=Prefix(), turns=(Turn(Role.USER, "a"),))
    with pytest.raises(UsageError, match="prompt of another run"):
        ask(second, conversation=same)
    path = tmp_path / "second.jsonl"
    with pytest.raises(UsageError, match="belongs to another run"):
        Session.begin(path, make(), limit_usd=5.0, name="second")
    assert not path.exists()


def test_a_reply_without_its_prompt_is_refused(folder: Path, make: MAKE) -> None:
    folder.mkdir()
    (folder / "0001-reply.md").write_text("of another run")
    with pytest.raises(UsageError, match="before its prompt"):
        ask(make())


@pytest.mark.parametrize("levels", [0, 3])
def test_a_reply_that_was_given_ahead_is_taken(folder: Path, make: MAKE, levels: int) -> None:
    """For the very same prompt, also where it went out before; another prompt is waited on, and an empty file."""
    backend = make(waits=False)
    backend.folder = folder.joinpath(*("deep",) * levels)
    ahead = folder / "ahead" / f"{QUESTION.digest}.md"
    ahead.parent.mkdir(parents=True)
    ahead.touch()
    with pytest.raises(WaitsForReply):
        backend.reply(QUESTION, max_output_tokens=100, call=1)
    ahead.write_text("known")
    os.utime(ahead, (0, 0))
    assert backend.reply(QUESTION, max_output_tokens=100, call=1).text == "known"
    other = Conversation(prefix=QUESTION.prefix, turns=(Turn(Role.USER, "third"),))
    with pytest.raises(WaitsForReply):
        backend.reply(other, max_output_tokens=100, call=2)


def test_a_reply_given_ahead_too_far_up_is_not_taken(folder: Path, make: MAKE) -> None:
    backend = make(waits=False)
    backend.folder = folder.joinpath("1", "2", "3", "4")
    ahead = folder / "ahead" / f"{QUESTION.digest}.md"
    ahead.parent.mkdir(parents=True)
    ahead.write_text("known")
    os.utime(ahead, (0, 0))
    with pytest.raises(WaitsForReply):
        backend.reply(QUESTION, max_output_tokens=100, call=1)


def test_an_invalid_folder_is_reported(folder: Path, make: MAKE) -> None:
    folder.write_text("a file")
    with pytest.raises(StoreError, match="exchange folder"):
        ask(make())


def test_kill_in_the_middle_and_resume(folder: Path, make: MAKE, tmp_path: Path) -> None:
    path = tmp_path / "trajectory.jsonl"
    argv = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "my-prices.toml"), str(path)]
    with subprocess.Popen(argv) as process:
        thread = answering(folder, {"0001-reply.md": b"one"})
        thread.join()
        wait_for(folder / "0002-prompt.md")
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    events = [line.event for line in read_trajectory(path)[0]]
    assert [type(event).__name__ for event in events[2:]] == ["Asked", "Answered", "Asked"]
    (folder / "0002-reply.md").write_text("two")
    with Session.resume(path, make()) as session:
        chat = session.chat(system="s")
        assert [chat.ask(text).text for text in "ab"] == ["one", "two"]
        paid = sum(event.usage.cost_usd for event in session.events if isinstance(event, Answered))
        assert session.budget.spent_usd == pytest.approx(paid)
        assert session.budget.reserved_usd == 0
        assert [event.call for event in session.events if isinstance(event, Asked)] == [1, 2]
        assert not [event for event in session.events if isinstance(event, Failed)]
    assert sorted(file.name for file in folder.iterdir()) == [
        "0001-prompt.md", "0001-reply.md", "0002-prompt.md", "0002-reply.md",
    ]  # fmt: skip
