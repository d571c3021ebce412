"""Sessions: what is asked is paid for, recorded and, after any end, not asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Role, Turn
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    Code,
    Event,
    Failed,
    Judged,
    Noted,
    Opened,
    Stopped,
    StopReason,
)

Said = Callable[..., Reply]
OVERLOADED = BackendFailed(Failure.OVERLOADED, "busy", billed=False)
BROKEN = BackendFailed(Failure.BROKEN_STREAM, "cut", billed=True)


class Killed(BaseException):
    """Stands for an end that no code can handle."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trajectory.jsonl"


def begin(path: Path, backend: Any, limit_usd: float = 1.0) -> Session:
    return Session.begin(path, backend, limit_usd=limit_usd, name="test", settings={"seed": "1"})


def events(path: Path) -> list[Event]:
    return [line.event for line in read_trajectory(path)[0]]


def kinds(path: Path) -> list[str]:
    return [type(event).__name__ for event in events(path)]


class TestAsking:
    def test_a_call_is_recorded_before_and_after_and_charged(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("hello", 0.02)])
        backend.before = lambda: seen.append((kinds(path), session.budget.reserved_usd))
        seen: list[tuple[list[str], float]] = []
        with begin(path, backend) as session:
            reply = session.chat(system="be brief", context=("abi",)).ask("why?")
        assert reply.text == "hello"
        assert seen == [(["Begun", "Opened", "Asked"], 0.1)]
        assert (session.budget.spent_usd, session.budget.reserved_usd) == (0.02, 0)
        begun, opened, asked, answered = events(path)
        assert begun == Begun(
            name="test", backend="scripted", model="toy", budget_usd=1.0, settings={"seed": "1"}
        )  # fmt: skip
        assert opened == Opened(chat="main", system="be brief", context=("abi",))
        assert isinstance(asked, Asked)
        assert (asked.call, asked.text, asked.history, asked.reserved_usd) == (1, "why?", 0, 0.1)
        assert asked.digest == backend.asked[0].digest
        assert isinstance(answered, Answered)
        assert (answered.call, answered.text, answered.usage) == (1, "hello", reply.usage)
        assert session.usage == reply.usage

    def test_turns_grow_until_they_are_forgotten(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("one"), said("two"), said("three")])
        with begin(path, backend) as session:
            chat = session.chat(system="s")
            chat.ask("a")
            chat.ask("b")
            chat.forget()
            chat.ask("c")
        assert [[turn.text for turn in talk.turns] for talk in backend.asked] == [["a"], ["a", "one", "b"], ["c"]]
        assert {talk.prefix.system for talk in backend.asked} == {"s"}
        assert chat._turns == (Turn(Role.USER, "c"), Turn(Role.ASSISTANT, "three"))

    def test_a_refusal_without_a_word_leaves_no_trace(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("", stop_reason=StopReason.REFUSAL), said("fine")])
        with begin(path, backend) as session:
            chat = session.chat()
            assert chat.ask("a").stop_reason is StopReason.REFUSAL
            chat.ask("b")
        assert [len(talk.turns) for talk in backend.asked] == [1, 1]

    def test_what_does_not_fit_the_budget_is_not_sent(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("one", 0.08), said("two", 0.08)])
        with begin(path, backend, limit_usd=0.15) as session:
            chat = session.chat()
            chat.ask("a")
            for _ in range(2):
                with pytest.raises(BudgetExhausted):
                    chat.ask("b")
        assert len(backend.asked) == 1
        assert kinds(path) == ["Begun", "Opened", "Asked", "Answered", "Stopped", "Stopped"]
        stopped = events(path)[-1]
        assert isinstance(stopped, Stopped)
        assert stopped.reason == "budget_exhausted"

    def test_input_is_counted_when_its_bound_does_not_fit(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("one", 0.01)], worst_usd=2.0, counted_usd=0.5)
        with begin(path, backend) as session:
            session.chat().ask("a")
        asked = next(event for event in events(path) if isinstance(event, Asked))
        assert asked.reserved_usd == 0.5

    @pytest.mark.parametrize(("error", "cost_usd"), [(OVERLOADED, 0.0), (BROKEN, 0.1)])
    def test_a_failure_is_charged_in_full_where_it_may_be_billed(
        self, path: Path, scripted: Any, said: Said, error: BackendFailed, cost_usd: float
    ) -> None:
        backend = scripted([error, said("again")])
        with begin(path, backend) as session:
            chat = session.chat()
            with pytest.raises(BackendFailed):
                chat.ask("a")
            assert (session.budget.spent_usd, session.budget.reserved_usd) == (cost_usd, 0)
            assert chat._turns == ()
            chat.ask("a")
        failed = next(event for event in events(path) if isinstance(event, Failed))
        assert (failed.call, failed.reason, failed.cost_usd) == (1, error.failure.value, cost_usd)
        assert backend.calls == [1, 2]

    def test_texts_that_are_no_utf8_are_mended(self, path: Path, scripted: Any, said: Said) -> None:
        broken = BackendFailed(Failure.SERVER, "what\udcff", billed=False)
        with begin(path, scripted([said("reply \ud800"), broken])) as session:
            chat = session.chat(system="s\udc80", context=("c\udc80",))
            assert chat.ask("log \udcff").text == "reply ?"
            with pytest.raises(BackendFailed):
                chat.ask("b")
        with Session.resume(path, scripted([])) as session:
            assert session.chat(system="s\udc80", context=("c\udc80",)).ask("log \udcff").text == "reply ?"

    def test_threads_have_a_chat_each(self, path: Path, scripted: Any, said: Said) -> None:
        backend = scripted([said("x", 0.01) for _ in range(40)])
        with begin(path, backend, limit_usd=10.0) as session:
            chats = [session.chat(f"executor-{number}") for number in range(4)]
            threads = [threading.Thread(target=lambda c=c: [c.ask(str(i)) for i in range(10)]) for c in chats]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(backend.calls) == list(range(1, 41))
        assert session.budget.spent_usd == pytest.approx(0.4)
        with Session.resume(path, scripted([])) as session:
            again = [session.chat(f"executor-{number}") for number in range(4)]
            assert {chat.ask(str(i)).text for chat in again for i in range(10)} == {"x"}

    def test_nothing_is_sent_that_could_not_be_recorded(
        self, path: Path, scripted: Any, said: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(event: Event) -> None:
            raise StoreError("no space left")

        backend = scripted([said("one")])
        with begin(path, backend) as session:
            chat = session.chat()
            monkeypatch.setattr(session.trajectory, "append", full)
            with pytest.raises(StoreError):
                chat.ask("a")
        assert backend.asked == []
        assert session.budget.remaining_usd == 1.0

    @pytest.mark.parametrize("limit", [0, -1])
    def test_an_invalid_limit_is_refused(self, path: Path, scripted: Any, limit: int) -> None:
        with begin(path, scripted([])) as session, pytest.raises(UsageError):
            session.chat().ask("a", max_output_tokens=limit)


class TestResuming:
    def test_recorded_replies_come_back_free_and_the_rest_is_asked(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([said("one", 0.02), said("two", 0.03)])) as session:
            chat = session.chat()
            chat.ask("a")
            chat.ask("b")
        backend = scripted([said("three", 0.04)])
        with Session.resume(path, backend) as session:
            assert session.budget.spent_usd == pytest.approx(0.05)
            chat = session.chat()
            assert [chat.ask(text).text for text in "abc"] == ["one", "two", "three"]
            assert session.budget.spent_usd == pytest.approx(0.09)
        assert [turn.text for turn in backend.asked[0].turns] == ["a", "one", "b", "two", "c"]
        assert backend.calls == [3]

    def test_a_cut_off_call_is_charged_in_full_and_resent(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([Killed()])) as session, pytest.raises(Killed):
            session.chat().ask("a")
        backend = scripted([said("one", 0.02)])
        with Session.resume(path, backend) as session:
            assert session.budget.reserved_usd == pytest.approx(0.1)
            assert session.chat().ask("a").text == "one"
            assert session.budget.spent_usd == pytest.approx(0.12)
        assert backend.calls == [2]
        lost = next(event for event in events(path) if isinstance(event, Failed))
        assert (lost.call, lost.reason, lost.cost_usd) == (1, "lost", 0.1)
        with Session.resume(path, scripted([])) as session:
            assert session.chat().ask("a").text == "one"

    def test_a_call_that_can_be_taken_up_is(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([Killed()], resumable=True)) as session, pytest.raises(Killed):
            session.chat().ask("a", max_output_tokens=77)
        backend = scripted([said("one", 0.02)], resumable=True)
        with Session.resume(path, backend) as session:
            assert session.chat().ask("a").text == "one"
            assert (session.budget.spent_usd, session.budget.reserved_usd) == (0.02, 0)
        assert backend.calls == [1]
        assert [name for name in kinds(path) if name in ("Asked", "Answered", "Failed")] == ["Asked", "Answered"]

    def test_a_cut_off_call_counts_even_if_not_repeated(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([Killed()])) as session, pytest.raises(Killed):
            session.chat().ask("a")
        with Session.resume(path, scripted([]), limit_usd=0.15) as session, pytest.raises(BudgetExhausted):
            session.chat("another").ask("b")

    def test_a_failure_at_the_end_is_tried_again(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([said("one"), OVERLOADED])) as session:
            chat = session.chat()
            chat.ask("a")
            with pytest.raises(BackendFailed):
                chat.ask("b")
        for script in ([said("two")], []):
            with Session.resume(path, scripted(script)) as session:
                chat = session.chat()
                assert [chat.ask(text).text for text in "ab"] == ["one", "two"]

    def test_a_failure_that_the_policy_went_on_from_fails_again(self, path: Path, scripted: Any, said: Said) -> None:
        def policy(session: Session) -> list[str]:
            chat, found = session.chat(), []
            for text in "abc":
                try:
                    found.append(chat.ask(text).text)
                except BackendFailed as error:
                    found.append(error.reason)
            return found

        with begin(path, scripted([said("one"), OVERLOADED, said("three")])) as session:
            first = policy(session)
        with Session.resume(path, scripted([])) as session:
            assert policy(session) == first == ["one", "overloaded", "three"]

    def test_another_prompt_than_recorded_shows_the_difference(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([said("one")])) as session:
            session.chat().ask("first\nsecond")
        backend = scripted([said("no")])
        wrong = pytest.raises(TrajectoryMismatch, match=r"call 1 .*another prompt")
        with Session.resume(path, backend) as session, wrong as caught:
            session.chat().ask("first\nchanged")
        assert "-second\n+changed" in str(caught.value)
        assert backend.asked == []

    def test_a_backend_begins_once_and_not_on_resume(self, path: Path, scripted: Any) -> None:
        backend = scripted([])
        begin(path, backend).close()
        Session.resume(path, backend).close()
        assert backend.begun == 1

    def test_a_larger_budget_lets_it_go_on(self, path: Path, scripted: Any, said: Said) -> None:
        with begin(path, scripted([said("one", 0.1)]), limit_usd=0.15) as session:
            chat = session.chat()
            chat.ask("a")
            with pytest.raises(BudgetExhausted):
                chat.ask("b")
        with Session.resume(path, scripted([said("two", 0.1)]), limit_usd=0.3) as session:
            chat = session.chat()
            assert [chat.ask(text).text for text in "ab"] == ["one", "two"]
            assert session.budget.remaining_usd == pytest.approx(0.1)

    def test_another_model_is_refused(self, path: Path, scripted: Any) -> None:
        begin(path, scripted([])).close()
        for _ in range(2):  # the first refusal must not keep the file locked
            with pytest.raises(UsageError, match=r"begun with the model 'toy'.*'other'"):
                Session.resume(path, scripted([], model="other"))

    def test_a_file_without_a_beginning_is_refused(self, path: Path, scripted: Any) -> None:
        path.touch()
        with pytest.raises(BadRecord, match="does not begin"):
            Session.resume(path, scripted([]))

    def test_verdicts_and_notes_stay(self, path: Path, scripted: Any) -> None:
        verdict = Judged(source_digest="d", code=Code.ACCEPTED_FASTER, verdict="r:1", speedup=2.0, best_speedup=2.0)
        with begin(path, scripted([])) as session:
            session.record(verdict)
            session.record(Noted(topic="memory", text="avoid x"))
        with Session.resume(path, scripted([])) as session:
            assert session.recall_verdict("d") == verdict
            assert session.recall_verdict("d") is None
            assert Noted(topic="memory", text="avoid x") in session.events
