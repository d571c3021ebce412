"""What both published methods share: which block is the kernel, prompts that stand alone, calls by number, notes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.proposal import (
    FreshChat,
    NumberedReply,
    base_of,
    first_block_source,
    main_text,
    with_main_text,
)
from pytest_klineage.lab.optimizers.recording import Notebook
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelSource, Noted, StopReason, Usage

MakeKernel = Callable[..., KernelSource]


def answer(text: str, stop: StopReason = StopReason.END) -> NumberedReply:
    return NumberedReply(Reply(text=text, usage=Usage(model="toy"), stop_reason=stop), 1)


class TestFirstBlock:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("```cpp\na\n```", "a\n"),
            ("words\n\n```\na\n```\nmore\n```\nb\n```\n", "a\n"),
            ("````\n```\na\n````\n", "```\na\n"),
            ("~~~ c++\na\n~~~\n", "a\n"),
            ("```cpp\na\n```\n```cpp\nopen", "a\n"),
            ("```cpp\r\na\r\n```\r\n", "a\r\n"),
            ("say ```x``` first\n```\na\n```", "a\n"),
        ],
    )
    def test_it_is_the_kernel(self, make_kernel: MakeKernel, text: str, code: str) -> None:
        source = first_block_source(answer(text), make_kernel("old"))
        assert main_text(source) == code
        assert (source.entry, source.label) == ("run", "")

    @pytest.mark.parametrize("text", ["", "int x;", "```cpp\nint x;", "``` \n\n```", "~~~\na\n```\n"])
    def test_without_one_there_is_no_kernel(self, make_kernel: MakeKernel, text: str) -> None:
        with pytest.raises(MalformedReply):
            first_block_source(answer(text), make_kernel("old"))

    def test_a_refusal_holds_none_and_a_cut_off_reply_may(self, make_kernel: MakeKernel) -> None:
        text = "```\na\n```\nand then"
        with pytest.raises(MalformedReply):
            first_block_source(answer(text, StopReason.REFUSAL), make_kernel("old"))
        assert main_text(first_block_source(answer(text, StopReason.MAX_TOKENS), make_kernel("old"))) == "a\n"

    def test_flags_stand_before_the_block(self, make_kernel: MakeKernel) -> None:
        base = make_kernel("old", ("-O2",))
        assert first_block_source(answer("FLAGS: -O1 -mavx2\n```\na\n```"), base).flags == ("-O1", "-mavx2")
        assert first_block_source(answer("```\na\n```\nFLAGS: -O1"), base).flags == ("-O2",)
        with pytest.raises(MalformedReply):
            with_main_text('FLAGS: "-O1', base, "a")

    def test_a_kernel_with_fences_in_it_is_left_as_it_is(self, make_kernel: MakeKernel) -> None:
        text = "// ```\n// FLAGS: -O0\nint x; // ````\n"
        source = with_main_text("", make_kernel("old"), text)
        assert (main_text(source), source.flags) == (text, ())


def test_a_task_without_a_root_begins_with_an_empty_file(task: Task) -> None:
    assert base_of(task) is task.root
    empty = base_of(Task(case=task.case, platform="cpu", surface=task.surface, root=None, instructions=""))
    assert (empty.entry, main_text(empty)) == ("run", "")


class Ended(BaseException):
    """Stands for the end of the program during a call."""


class TestChats:
    def begin(self, path: Path, backend: Any) -> Session:
        return Session.begin(path, backend, limit_usd=1.0, name="t")

    def chats(self, session: Session) -> tuple[FreshChat, FreshChat]:
        first, second = (FreshChat(session, name, system="s", context=(), max_output_tokens=100) for name in ("a", "b"))
        return first, second

    def test_a_prompt_stands_alone_and_knows_its_call(self, tmp_path: Path, author: Any) -> None:
        backend = author(lambda asked, call: f"reply {call}")
        with self.begin(tmp_path / "t.jsonl", backend) as session:
            first, second = self.chats(session)
            answers = [chat.ask("same") for chat in (first, second, first)]
        assert [(found.text, found.call) for found in answers] == [("reply 1", 1), ("reply 2", 2), ("reply 3", 3)]
        assert all(len(asked.turns) == 1 for asked in backend.asked)

    def test_a_call_that_was_cut_off_has_no_answer(self, tmp_path: Path, author: Any) -> None:
        def ends(asked: object, call: int) -> str:
            if call == 2:
                raise Ended
            return f"reply {call}"

        with self.begin(tmp_path / "t.jsonl", author(ends)) as session:
            first, _ = self.chats(session)
            first.ask("same")
            with pytest.raises(Ended):
                first.ask("same")
        with Session.resume(tmp_path / "t.jsonl", author(ends)) as session:
            first, _ = self.chats(session)
            assert [first.ask("same").call for _ in range(3)] == [1, 3, 4]

    def test_a_note_is_written_once(self, tmp_path: Path, author: Any) -> None:
        path, backend = tmp_path / "t.jsonl", author(lambda asked, call: "x")
        with self.begin(path, backend) as session:
            for _ in range(2):
                Notebook(session).note("topic", "a")
            book = Notebook(session)
            book.note("topic", "b")
            book.note("topic", "b")
        with Session.resume(path, backend) as session:
            book = Notebook(session)
            for text in "abbc":
                book.note("topic", text)
            found = [event.text for event in session.events if isinstance(event, Noted) and event.topic == "topic"]
        assert found == ["a", "b", "b", "c"]


def test_an_installed_module_is_no_base() -> None:
    from pytest_klineage.records import Surface

    module = KernelSource(surface=Surface.PYTHON, files=(), entry="run", module="some.kernel")
    assert main_text(module) == ""
    with pytest.raises(UsageError):
        first_block_source(answer("```\na\n```"), module)
