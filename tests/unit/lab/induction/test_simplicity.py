"""Simplifications by their text alone, and the texts of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_klineage.lab.induction.prompts import filled, kernel_text, meaning_of, one_line
from pytest_klineage.lab.induction.simplicity import code_of, objection, remaining_in_source
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import Category, KernelSource, SourceFile, Surface

Words = dict[str, Any]


def test_comments_are_no_code(words: Words) -> None:
    plain = words["kernel"]('int x = 1;  // one\nconst char *s = "// no comment";\n')
    assert code_of(plain) == 'int x = 1; const char *s = "// no comment";'
    python = KernelSource(surface=Surface.PYTHON, files=(SourceFile("k.py", 's = "#"  # c\n'),), entry="run")
    assert code_of(python) == 's = "#"'


def test_changes_that_are_none_are_seen(words: Words) -> None:
    kernel = words["kernel"](words["expert"])
    commented = words["kernel"](words["expert"].replace("double sum", "double  sum /* of products */"))
    assert "comments and blanks" in objection(commented, kernel, ())
    naive = words["kernel"](words["naive"])
    assert objection(naive, kernel, ()) == ""
    assert "left behind" in objection(naive, kernel, (naive.digest,))


@pytest.mark.parametrize(
    "trick",
    ["volatile int x;", "usleep(10);", 'asm volatile("");', "__attribute__((noinline)) int f();", "_mm_pause();",
     "std::this_thread::sleep_for(x);", "#pragma GCC optimize (\"O0\")"],
)  # fmt: skip
def test_tricks_are_seen(words: Words, trick: str) -> None:
    kernel = words["kernel"](words["expert"])
    slowed = words["kernel"](words["naive"].replace("    return 0;", f"{trick}\n    return 0;"))
    assert "slow and not simple" in objection(slowed, kernel, ())
    # What was there before may stay.
    assert objection(slowed, slowed_expert(words, trick), ()) == ""


def slowed_expert(words: Words, trick: str) -> KernelSource:
    made: KernelSource = words["kernel"](words["expert"].replace("    return 0;", f"{trick}\n    return 0;"))
    return made


def test_experts_have_remaining_optimizations_naive_kernels_none() -> None:
    from pathlib import Path

    experts = find_experts(Path(__file__).parents[4] / "experts", "cpu")
    assert len(experts) >= 5
    for expert in experts:
        assert {found.category for found in remaining_in_source(expert.source("expert"))} >= {"simd", "block_parallel"}
        assert remaining_in_source(expert.source("naive")) == ()


def test_every_category_has_its_meaning() -> None:
    lines = filled("categories").splitlines()
    assert [line.split("`")[1] for line in lines] == [category.value for category in Category]
    assert all(meaning_of(category) for category in Category)


def test_prompts_hold_what_they_are_given_and_nothing_else(words: Words) -> None:
    kernel = words["kernel"](words["naive"] + "// $kernel ``` {x}\n")
    text = filled("rederive-turn", category="simd", meaning="m", locus="$locus", intent="i", kernel=kernel_text(kernel))
    assert "// $kernel ``` {x}" in text
    assert "````cpp" in text
    for name in ("deoptimize-system", "audit-system"):
        assert "$" not in filled(name, categories=filled("categories"))
    assert "$" not in filled("rederive-system")


def test_long_texts_become_short_lines() -> None:
    assert one_line("a\n b") == "a b"
    assert len(one_line("x" * 500, 20)) == 20
