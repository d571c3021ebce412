"""Replies become kernels, or are refused with a sentence that the model can act on."""

from __future__ import annotations

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.optimizers.proposal import empty_source, header_lines, proposed_source
from pytest_klineage.records import KernelSource, SourceFile, StopReason, Surface, Usage

TEXT = "int one;\nint two;\nint one_more;\n"
BASE = KernelSource(
    surface=Surface.CPP, files=(SourceFile("kernel.cpp", TEXT), SourceFile("tile.h", "// tile\n")), entry="run",
    flags=("-O3",), label="base",
)  # fmt: skip


def edit(search: str, replace: str, file: str = "kernel.cpp") -> str:
    return f"<<<<<<< SEARCH {file}\n{search}=======\n{replace}>>>>>>> REPLACE\n"


def proposed(text: str, base: KernelSource = BASE, stop: StopReason = StopReason.END) -> KernelSource:
    return proposed_source(Reply(text=text, usage=Usage(model="toy"), stop_reason=stop), base)


def test_a_block_is_the_whole_main_file() -> None:
    source = proposed("PLAN: x\n\n```cpp\nint three;\n```\nDone.")
    assert [file.text for file in source.files] == ["int three;\n", "// tile\n"]
    assert (source.entry, source.flags, source.label) == ("run", ("-O3",), "")


def test_edits_apply_to_the_base() -> None:
    edits = edit("int two;\n", "int three;\n") + edit("// tile\n", "// smaller\n", "tile.h")
    source = proposed(f"PLAN: x\n{edits}")
    assert [file.text for file in source.files] == ["int one;\nint three;\nint one_more;\n", "// smaller\n"]


def test_edits_may_stand_in_a_fence() -> None:
    fenced = "```\n" + edit("int two;\n", "int three;\n") + "```"
    assert "three" in proposed(fenced).files[0].text


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("FLAGS: -O2 -mavx2", ("-O2", "-mavx2")), ("**FLAGS:** `-O2 -mavx2`", ("-O2", "-mavx2")),
        ("FLAGS: unchanged", ("-O3",)), ("FLAGS:", ("-O3",)), ("flags are fine", ("-O3",)),
    ],
)  # fmt: skip
def test_flags_stand_before_the_code(line: str, flags: tuple[str, ...]) -> None:
    assert proposed(f"{line}\n```cpp\nint a;\n```").flags == flags


@pytest.mark.parametrize(
    ("text", "reason", "advice"),
    [
        ("I cannot.", "no_block", "send exactly one"),
        ("```cpp\nint a;\n```\n```cpp\nint b;\n```", "several_blocks", "has 2 code blocks"),
        ("```cpp\nint a;\n", "open_block", "not closed"),
        ("```cpp\n\n```", "empty", "send the whole main file"),
        ("", "empty", "the reply is empty"),
        (edit("int four;\n", "int five;\n"), "edit_not_found", "copy the lines exactly"),
        (edit(";\n", ",\n"), "edit_ambiguous", "fits 3 times"),
        (edit("int two;\n", "x\n", "other.h"), "edit_not_found", "kernel.cpp, tile.h"),
        ("<<<<<<< SEARCH kernel.cpp\nint two;\n", "broken_edit", "not complete"),
        ("FLAGS: '-O3\n```cpp\nint a;\n```", "broken_edit", "FLAGS cannot be read"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: str, reason: str, advice: str) -> None:
    with pytest.raises(MalformedReply, match=advice) as caught:
        proposed(text)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("stop", "reason"), [(StopReason.MAX_TOKENS, "truncated"), (StopReason.REFUSAL, "refused")])
def test_a_reply_that_was_cut_off_or_refused(stop: StopReason, reason: str) -> None:
    with pytest.raises(MalformedReply) as caught:
        proposed("```cpp\nint a;\n```", stop=stop)
    assert caught.value.reason == reason


def test_a_module_has_no_text_to_change() -> None:
    module = KernelSource(surface=Surface.PYTHON, files=(), entry="run", module="my.kernels")
    with pytest.raises(UsageError, match="give its file instead"):
        proposed("```python\nx\n```", module)


def test_nothing_to_begin_with_is_an_empty_file() -> None:
    source = proposed("```cuda\n__global__ void k() {}\n```", empty_source(Surface.CUDA, flags=("-O2",)))
    assert source.main is not None
    assert (source.main.name, source.flags, source.entry) == ("kernel.cu", ("-O2",), "run")


def test_header_lines_end_where_the_code_begins() -> None:
    text = "PLAN: a: b\n- CARDS: x, y\nCARDS: z\n**BASE**: last\n```cpp\nFLAGS: -O0\n```\nFLAGS: -O1"
    assert header_lines(text) == {"PLAN": "a: b", "CARDS": "x, y", "BASE": "last"}
