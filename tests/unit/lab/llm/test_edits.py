"""What a reply must hold is found exactly, or its absence has a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.edits import (
    FencedBlock,
    apply_edits,
    apply_to_files,
    code_blocks,
    edit_blocks,
    one_block,
    one_object,
    usable_text,
)
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.records import Replacement, StopReason

LINES = st.lists(st.text(st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]), max_size=12))
PLAIN = LINES.map(lambda lines: "".join(f" {line}\n" for line in lines))
"""Texts in which no line is a fence or a mark, because each begins with a blank."""
FILES = st.sampled_from(["", "a.cpp"])
LETTERS = st.text("ab\n", max_size=30)


def refusal(kind: Malformation, call: Callable[[], object]) -> str:
    with pytest.raises(MalformedReply) as caught:
        call()
    assert (caught.value.kind, caught.value.reason) == (kind, kind.value)
    return str(caught.value)


def edit_of(search: str, replace: str, file: str = "") -> Replacement:
    return Replacement(file=file, search=search, replace=replace)


def written(edit: Replacement) -> str:
    name = f" {edit.file}" if edit.file else ""
    return f"<<<<<<< SEARCH{name}\n{edit.search}=======\n{edit.replace}>>>>>>> REPLACE\n"


class TestUsableText:
    @pytest.mark.parametrize(
        ("text", "stop", "kind"),
        [
            ("half", StopReason.MAX_TOKENS, Malformation.TRUNCATED), ("no", StopReason.REFUSAL, Malformation.REFUSED),
            (" \n", StopReason.END, Malformation.EMPTY), ("", StopReason.MAX_TOKENS, Malformation.TRUNCATED),
        ],
    )  # fmt: skip
    def test_what_is_no_reply_has_a_name(
        self, said: Callable[..., Reply], text: str, stop: StopReason, kind: Malformation
    ) -> None:
        refusal(kind, lambda: usable_text(said(text, stop_reason=stop)))

    def test_a_reply_is_its_text(self, said: Callable[..., Reply]) -> None:
        assert usable_text(said("fine\n")) == "fine\n"


class TestBlocks:
    @settings(deadline=None)
    @given(PLAIN, PLAIN, PLAIN)
    def test_the_block_is_found_as_it_is(self, before: str, text: str, after: str) -> None:
        assert one_block(f"{before}```cpp\n{text}```\n{after}") == FencedBlock("cpp", text)

    @pytest.mark.parametrize(
        ("text", "block"),
        [
            ("```\nx\n```", FencedBlock("", "x\n")),
            ("~~~ CPP title=a\nx\n~~~", FencedBlock("cpp", "x\n")),
            ("````md\n```cpp\nx\n```\n````", FencedBlock("md", "```cpp\nx\n```\n")),
            ("```\n~~~\n```", FencedBlock("", "~~~\n")),
            ("```py\r\nx\r\n```\r\n", FencedBlock("py", "x\r\n")),
            ("  ```\nx\n  ```", FencedBlock("", "x\n")),
            ("```\n```not a fence\n```", FencedBlock("", "```not a fence\n")),
            ("```\nform\x0cfeed\u2028\n```", FencedBlock("", "form\x0cfeed\u2028\n")),
            ("text with ```inline``` code\n```\nx\n```", FencedBlock("", "x\n")),
            ("```inline```\n```\nx\n```", FencedBlock("", "x\n")),
            ("```\n```", FencedBlock("", "")),
        ],
    )  # fmt: skip
    def test_fences(self, text: str, block: FencedBlock) -> None:
        assert code_blocks(text) == (block,)

    def test_none_several_and_open(self) -> None:
        refusal(Malformation.NO_BLOCK, lambda: one_block("int main() {}"))
        assert "2 code blocks" in refusal(Malformation.SEVERAL_BLOCKS, lambda: one_block("```\na\n```\n```\nb\n```"))
        refusal(Malformation.OPEN_BLOCK, lambda: one_block("```cpp\nint main() {"))
        refusal(Malformation.OPEN_BLOCK, lambda: one_block("```\na\n```\n```\nb"))
        refusal(Malformation.OPEN_BLOCK, lambda: one_block("````\na\n```"))


class TestObjects:
    @pytest.mark.parametrize("text", ['{"a": [1]}', ' \n{"a": [1]}\n', 'So:\n```json\n{"a": [1]}\n```\nDone.'])
    def test_an_object_is_found_bare_or_fenced(self, text: str) -> None:
        assert one_object(text) == {"a": [1]}

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("[1]", Malformation.NOT_AN_OBJECT), ("```json\n3\n```", Malformation.NOT_AN_OBJECT),
            ('{"a": 1', Malformation.NOT_JSON), ('{"a": 1} and more', Malformation.NOT_JSON),
            ("```json\n{'a': 1}\n```", Malformation.NOT_JSON), ("no block", Malformation.NO_BLOCK),
            ("```\n{}\n```\n```\n{}\n```", Malformation.SEVERAL_BLOCKS), ('{"a": "\ud800"}', Malformation.NOT_JSON),
            ('{"a":' * 100_000, Malformation.NOT_JSON), ("```json\n{", Malformation.OPEN_BLOCK),
        ],
        ids=range(10),
    )  # fmt: skip
    def test_anything_else_has_a_name(self, text: str, kind: Malformation) -> None:
        refusal(kind, lambda: one_object(text))


class TestEditBlocks:
    @settings(deadline=None)
    @given(
        st.lists(st.builds(Replacement, search=PLAIN, replace=PLAIN, file=st.sampled_from(["", "a.cpp"])), min_size=1)
    )
    def test_edits_are_read_as_they_were_written(self, edits: list[Replacement]) -> None:
        text = "Here:\n```\n" + "and then\n".join(written(edit) for edit in edits) + "```\n"
        assert edit_blocks(text) == tuple(edits)

    @pytest.mark.parametrize(
        "text",
        [
            "<<<<<<< SEARCH\na\n", "<<<<<<< SEARCH\na\n=======\nb\n", "<<<<<<< SEARCH\na\n>>>>>>> REPLACE\n",
            "<<<<<<< SEARCH\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE\n", ">>>>>>> REPLACE\n",
            "<<<<<<< SEARCH\na\n=======\nb\n=======\nc\n>>>>>>> REPLACE\n",
            "<<<<<<< SEARCH\na\n=======\n<<<<<<< SEARCH\n>>>>>>> REPLACE\n",
        ],
    )  # fmt: skip
    def test_a_broken_edit_has_a_name(self, text: str) -> None:
        refusal(Malformation.BROKEN_EDIT, lambda: edit_blocks(text))

    def test_no_edit_has_a_name(self) -> None:
        refusal(Malformation.NO_EDIT, lambda: edit_blocks("heading\n=======\nall is well\n"))


class TestApplying:
    @settings(deadline=None)
    @given(LETTERS, LETTERS, LETTERS, st.text("cd\n", min_size=1, max_size=5).filter(lambda text: text.strip()))
    def test_an_edit_and_its_inverse(self, before: str, after: str, replace: str, search: str) -> None:
        text = before + search + after
        changed = apply_edits(text, [edit_of(search=search, replace=replace + "X")])
        assert changed == before + replace + "X" + after
        if changed.count(replace + "X") == 1:
            assert apply_edits(changed, [edit_of(search=replace + "X", replace=search)]) == text

    @example("aaa", "aa")
    @settings(deadline=None)
    @given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=3))
    def test_an_edit_applies_exactly_when_its_piece_occurs_once(self, text: str, search: str) -> None:
        positions = sum(text.startswith(search, start) for start in range(len(text)))
        edit = edit_of(search=search, replace="c")
        if positions == 1:
            assert apply_edits(text, [edit]) == text.replace(search, "c")
        else:
            kind = Malformation.EDIT_AMBIGUOUS if positions else Malformation.EDIT_NOT_FOUND
            refusal(kind, lambda: apply_edits(text, [edit]))

    def test_later_edits_see_earlier_ones(self) -> None:
        assert apply_edits("a", [edit_of(search="a", replace="b"), edit_of(search="b", replace="c")]) == "c"
        refusal(
            Malformation.EDIT_NOT_FOUND,
            lambda: apply_edits("a", [edit_of(search="a", replace="b"), edit_of(search="a", replace="c")]),
        )

    @pytest.mark.parametrize(
        ("edit", "kind"),
        [
            (edit_of(search="a", replace="a"), Malformation.EDIT_CHANGES_NOTHING),
            (edit_of(search="", replace="b"), Malformation.EDIT_NOT_FOUND),
            (edit_of(search="\n", replace="b"), Malformation.EDIT_NOT_FOUND),
            (edit_of(search="A", replace="b"), Malformation.EDIT_NOT_FOUND),
        ],
    )
    def test_what_does_not_apply_has_a_name(self, edit: Replacement, kind: Malformation) -> None:
        assert "edit 1" in refusal(kind, lambda: apply_edits("a\n", [edit]))

    def test_a_message_quotes_little(self) -> None:
        edit = edit_of(search="y" * 10_000, replace="b")
        assert len(refusal(Malformation.EDIT_NOT_FOUND, lambda: apply_edits("x", [edit]))) < 400

    def test_edits_find_their_files(self) -> None:
        files = {"a.cpp": "x", "b.h": "x"}
        edits = [edit_of(search="x", replace="y", file="b.h"), edit_of(search="y", replace="z", file="b.h")]
        assert apply_to_files(files, edits) == {"a.cpp": "x", "b.h": "z"}
        assert files == {"a.cpp": "x", "b.h": "x"}
        assert apply_to_files({"a.cpp": "x"}, [edit_of(search="x", replace="y")]) == {"a.cpp": "y"}

    @pytest.mark.parametrize("file", ["", "c.cpp", "../a.cpp"])
    def test_an_edit_of_an_unknown_file_lists_the_names(self, file: str) -> None:
        edit = edit_of(search="x", replace="y", file=file)
        message = refusal(Malformation.EDIT_NOT_FOUND, lambda: apply_to_files({"a.cpp": "x", "b.h": "x"}, [edit]))
        assert "a.cpp, b.h" in message
