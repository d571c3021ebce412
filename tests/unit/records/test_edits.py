"""Edits apply exactly or are refused, and can be undone."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import Edit, EditKind, Replacement
from pytest_klineage.records.edits import EditError, apply_edit, changed_lines, diff_edit, invert_edit

FILE = "kernel.cpp"
TEXT = "a\nb\nc\nd\n"
CHANGE = f"--- a/{FILE}\n+++ b/{FILE}\n@@ -2,2 +2,2 @@\n b\n-c\n+C\n"
LINES = st.sampled_from(["", "a", "b", "-- c", "++ c", "@@ -1 +1 @@", "\\ x", " ", "\ta", "\r", "ü", "\x0c", "--- a/x"])
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINES, max_size=8), st.sampled_from(["", "\n"]))
NAMES = st.text(string.ascii_lowercase + " .-", min_size=1, max_size=4).filter(lambda name: name[0] not in ".- ")
FILES = st.dictionaries(NAMES, TEXTS, max_size=3)


def diff(text: str) -> Edit:
    return Edit(kind=EditKind.UNIFIED_DIFF, diff=text)


def blocks(*replacements: tuple[str, str]) -> Edit:
    found = tuple(Replacement(FILE, search, replace) for search, replace in replacements)
    return Edit(kind=EditKind.SEARCH_REPLACE, blocks=found)


@given(FILES, FILES)
def test_a_diff_gives_exactly_the_other_files(before: dict[str, str], after: dict[str, str]) -> None:
    assert apply_edit(diff_edit(before, after), before) == after


@given(FILES, FILES)
def test_an_inverted_diff_gives_back_what_was_there(before: dict[str, str], after: dict[str, str]) -> None:
    edit = diff_edit(before, after)
    assert apply_edit(invert_edit(edit), after) == before
    assert apply_edit(invert_edit(invert_edit(edit)), before) == after


@given(FILES, FILES, FILES)
def test_a_diff_applies_elsewhere_only_with_its_result(
    before: dict[str, str], after: dict[str, str], other: dict[str, str]
) -> None:
    edit = diff_edit(before, after)
    try:
        result = apply_edit(edit, other)
    except EditError:
        return
    assert apply_edit(invert_edit(edit), result) == other


@given(FILES)
def test_nothing_to_change_is_an_empty_diff(files: dict[str, str]) -> None:
    edit = diff_edit(files, files)
    assert edit.diff == ""
    assert apply_edit(edit, files) == files


@given(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=5))
def test_blocks_are_undone_where_each_replacement_is_unique(numbers: list[int]) -> None:
    text = "".join(f"line {number}\n" for number in range(10))
    edit = blocks(*((f"line {number}\n", f"changed {number}\n") for number in numbers))
    changed = apply_edit(edit, {FILE: text})
    assert changed[FILE].count("changed") == len(numbers)
    assert apply_edit(invert_edit(edit), changed) == {FILE: text}


def test_a_diff_as_other_tools_write_it_applies() -> None:
    noisy = f"diff --git a/{FILE} b/{FILE}\nindex 1..2 100644\n" + CHANGE.replace(
        f"a/{FILE}\n+", f"a/{FILE}\t2020\n+", 1
    )
    assert apply_edit(diff(noisy), {FILE: TEXT}) == {FILE: "a\nb\nC\nd\n"}
    plain = CHANGE.replace("a/", "").replace("b/", "")
    assert apply_edit(diff(plain), {FILE: TEXT}) == {FILE: "a\nb\nC\nd\n"}


def test_an_empty_line_of_context_may_have_lost_its_blank() -> None:
    text = f"--- a/{FILE}\n+++ b/{FILE}\n@@ -1,2 +1,2 @@\n\n-x\n+y\n"
    assert apply_edit(diff(text), {FILE: "\nx\n"}) == {FILE: "\ny\n"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CHANGE.replace("@@ -2,2", "@@ -1,2"), "line 1: the diff expects 'b', there is 'a'"),
        (CHANGE.replace("-c", "-x"), "line 3: the diff expects 'x', there is 'c'"),
        (CHANGE.replace("@@ -2,2", "@@ -5,2"), "the diff expects 'b', there is the end of the file"),
        (CHANGE.replace("@@ -2,2", "@@ -9,2"), "has 4 lines"),
        (CHANGE.replace(FILE, "other.cpp"), "changes other.cpp, which is not there; there are kernel.cpp"),
        (CHANGE.replace(f"+++ b/{FILE}", "+++ b/other.cpp"), "renames kernel.cpp to other.cpp"),
        (CHANGE.replace(f"--- a/{FILE}", "--- /dev/null"), "adds kernel.cpp, which is there already"),
        (CHANGE.replace(f"+++ b/{FILE}", "+++ /dev/null"), "leaves 4 of its lines"),
        ("--- /dev/null\n+++ /dev/null\n", "names no file"),
        (f"--- a/{FILE}\n", "line 2 of the diff is not"),
        ("change b to c\n", "line 1 of the diff is not"),
        (CHANGE + "and some prose\n", "line 7 of the diff is not"),
        (CHANGE.removesuffix("+C\n"), "ends before its 2/2 lines"),
        (CHANGE.replace("-2,2 +2,2", "-2,1 +2,2"), "more lines than it says"),
        (CHANGE + "@@ -2,1 +2,1 @@\n-b\n+x\n", "overlaps the one before"),
        (CHANGE.replace("+C\n", "+C\n\\ No newline at end of file\n"), "after a line that has no line feed"),
        ("index 1..2\n", "has no '--- a/FILE' line"),
    ],
)
def test_a_diff_that_does_not_fit_says_where(text: str, says: str) -> None:
    files = {FILE: TEXT}
    with pytest.raises(EditError, match=re.escape(says)):
        apply_edit(diff(text), files)
    assert files == {FILE: TEXT}


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (("x", "y"), "has no 'x'"),
        (("", "y"), "is empty"),
        (("\n", "y"), "occurs more than once"),
        (("a\nb\nc\nd\n\n", "y"), "has no 'a'"),
    ],
)
def test_a_block_that_does_not_fit_says_why(pair: tuple[str, str], says: str) -> None:
    with pytest.raises(EditError, match=rf"block 1 .kernel\.cpp.: .*{says}"):
        apply_edit(blocks(pair), {FILE: TEXT})


def test_overlapping_occurrences_are_two() -> None:
    with pytest.raises(EditError, match="more than once"):
        apply_edit(blocks(("aa", "b")), {FILE: "aaa"})


def test_a_block_for_a_missing_file_names_those_that_are_there() -> None:
    with pytest.raises(EditError, match=r"no such file; there are tile\.h"):
        apply_edit(blocks(("a", "b")), {"tile.h": "a"})


def test_blocks_apply_one_after_the_other() -> None:
    assert apply_edit(blocks(("a", "x"), ("x\nb", "y")), {FILE: TEXT}) == {FILE: "y\nc\nd\n"}


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\rb"])
def test_a_name_that_no_diff_can_hold_is_refused(name: str) -> None:
    with pytest.raises(EditError, match="rename the file"):
        diff_edit({name: "a"}, {name: "b"})


def test_lines_are_counted() -> None:
    assert changed_lines(diff(CHANGE)) == (1, 1)
    assert changed_lines(blocks(("a\n", "x\ny\n"))) == (1, 2)
