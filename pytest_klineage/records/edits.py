"""Edits of kernels: unified diffs and search-and-replace blocks, which apply exactly or are refused.

Text is compared as it is: no fuzz, no offsets, no ignored blanks, line ends as they stand. Lines end with a line feed
and nowhere else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pytest_klineage.errors import UsageError
from pytest_klineage.records.lineage import Edit, EditKind, Lineage, Replacement

NO_FILE = "/dev/null"
NO_NEWLINE = "\\ No newline at end of file"
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
PREAMBLE = ("diff --git ", "index ", "new file mode ", "deleted file mode ")
"""Lines of other tools before a file's part, which say nothing that we need."""
SHOWN = 60
"""Characters of a line that a message quotes."""


class EditError(UsageError):
    """An edit that is malformed, or that does not apply to these files; the message says where."""


class _Hunk(NamedTuple):
    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]
    """Pairs of " ", "-" or "+" and a line with its line feed, which the last line of a file may lack."""

    def side(self, sign: str) -> list[str]:
        return [text for mark, text in self.lines if mark in (" ", sign)]


class _Patch(NamedTuple):
    old: str | None
    new: str | None
    hunks: tuple[_Hunk, ...]

    @property
    def renames(self) -> bool:
        return self.old is not None and self.new is not None and self.old != self.new


def apply_edit(edit: Edit, files: Mapping[str, str], *, renames: bool = False) -> dict[str, str]:
    """The files after the edit, by name; those it does not touch stay. Raises EditError, and changes nothing then.

    A diff may give a file another name only where `renames` says so: a proposal could rename the file that is compiled.
    """
    result = dict(files)
    if edit.kind is EditKind.DIGEST:
        raise EditError("it is an outline's, which has only the edit's digest")
    if edit.kind is EditKind.UNIFIED_DIFF:
        for patch in _parse(edit.diff):
            if patch.renames and not renames:
                raise EditError(f"the diff renames {patch.old} to {patch.new}; take one away and add the other")
            _apply_patch(patch, result)
    else:
        for number, block in enumerate(edit.blocks, start=1):
            _apply_block(block, number, result)
    return result


def state_texts(lineage: Lineage, first: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The files of every state by name, naive first, from those of the `first`. Raises EditError.

    A lineage keeps its first state as files, and every other one as the forward edit of the step that leads to it.
    """
    texts = dict(first)
    yield texts
    for number, step in enumerate(lineage.transitions, start=1):
        try:
            texts = apply_edit(step.forward, texts, renames=True)
        except EditError as error:
            raise EditError(f"transition {number}: the forward edit does not apply: {error}") from error
        yield texts


def diff_edit(before: Mapping[str, str], after: Mapping[str, str]) -> Edit:
    """The unified diff that gives exactly `after` from `before`. Raises EditError for a name that no diff can hold."""
    parts: list[str] = []
    for name in sorted({*before, *after}):
        if re.search(r"[\n\r\t]", name):
            raise EditError(f"a diff cannot hold the file name {name!r}; rename the file")
        if before.get(name) != after.get(name):
            parts += _file_diff(name, before.get(name), after.get(name))
    return Edit(kind=EditKind.UNIFIED_DIFF, diff="".join(parts))


def invert_edit(edit: Edit) -> Edit:
    """The edit that undoes this one. Raises EditError for a malformed diff.

    Undoing blocks applies only where each replacement is unique in the file that it gave.
    """
    if edit.kind is EditKind.SEARCH_REPLACE:
        undone = tuple(Replacement(block.file, block.replace, block.search) for block in reversed(edit.blocks))
        return Edit(kind=EditKind.SEARCH_REPLACE, blocks=undone)
    swap = {" ": " ", "-": "+", "+": "-"}
    parts: list[str] = []
    for patch in _parse(edit.diff):
        hunks = [
            _Hunk(hunk.new_start, hunk.old_start, tuple((swap[mark], text) for mark, text in hunk.lines))
            for hunk in patch.hunks
        ]
        parts += _written(_Patch(patch.new, patch.old, tuple(hunks)))
    return Edit(kind=EditKind.UNIFIED_DIFF, diff="".join(parts))


def changed_lines(edit: Edit) -> tuple[int, int]:
    """How many lines an edit takes away and adds. Raises EditError for a malformed diff."""
    if edit.kind is EditKind.SEARCH_REPLACE:
        removed = sum(len(_lines(block.search)) for block in edit.blocks)
        return removed, sum(len(_lines(block.replace)) for block in edit.blocks)
    marks = [mark for patch in _parse(edit.diff) for hunk in patch.hunks for mark, _ in hunk.lines]
    return marks.count("-"), marks.count("+")


def _lines(text: str) -> list[str]:
    """Lines with their line feeds. str.splitlines would also cut at form feeds, which a diff does not."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


# --- search and replace -----------------------------------------------------------------------------------------------


def _apply_block(block: Replacement, number: int, files: dict[str, str]) -> None:
    where = f"block {number} ({block.file})"
    if block.file not in files:
        raise EditError(f"{where}: there is no such file; there are {_names(files)}")
    if not block.search:
        raise EditError(f"{where}: the text to search for is empty")
    text = files[block.file]
    first = text.find(block.search)
    if first < 0:
        raise EditError(f"{where}: the file has no {_quoted(block.search)}")
    if text.find(block.search, first + 1) >= 0:
        raise EditError(f"{where}: {_quoted(block.search)} occurs more than once; take more of what stands around it")
    files[block.file] = text[:first] + block.replace + text[first + len(block.search) :]


# --- unified diffs ----------------------------------------------------------------------------------------------------


def _file_diff(name: str, before: str | None, after: str | None) -> Iterator[str]:
    old, new = (NO_FILE if before is None else f"a/{name}"), (NO_FILE if after is None else f"b/{name}")
    yield f"--- {old}\n+++ {new}\n"
    lines = difflib.unified_diff(_lines(before or ""), _lines(after or ""), lineterm="")
    for position, line in enumerate(lines):
        if position < 2:
            continue  # difflib's own names of the two files
        if line.startswith("@@"):
            yield line + "\n"
        else:
            yield line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}\n"


def _parse(diff: str) -> list[_Patch]:
    lines = _lines(diff)
    patches: list[_Patch] = []
    position = 0
    while position < len(lines):
        if lines[position].startswith(PREAMBLE):
            position += 1
            continue
        patch, position = _parse_file(lines, position)
        patches.append(patch)
    if not patches and diff:
        raise EditError("the diff has no '--- a/FILE' line")
    return patches


def _parse_file(lines: list[str], position: int) -> tuple[_Patch, int]:
    if not lines[position].startswith("--- "):
        raise EditError(f"line {position + 1} of the diff is not '--- a/FILE': {_quoted(lines[position])}")
    if position + 1 >= len(lines) or not lines[position + 1].startswith("+++ "):
        raise EditError(f"line {position + 2} of the diff is not '+++ b/FILE'")
    old, new = _file_name(lines[position], "a/"), _file_name(lines[position + 1], "b/")
    if old is None and new is None:
        raise EditError(f"line {position + 1} of the diff names no file")
    position += 2
    hunks: list[_Hunk] = []
    while position < len(lines) and (head := HUNK.fullmatch(lines[position].rstrip("\n"))):
        hunk, position = _parse_hunk(lines, position, head)
        hunks.append(hunk)
    return _Patch(old, new, tuple(hunks)), position


def _file_name(line: str, prefix: str) -> str | None:
    name = line[4:].rstrip("\n").partition("\t")[0]
    return None if name == NO_FILE else name.removeprefix(prefix)


def _parse_hunk(lines: list[str], position: int, head: re.Match[str]) -> tuple[_Hunk, int]:
    old_start, old_count, new_start, new_count = (1 if found is None else int(found) for found in head.groups())
    left = {"-": old_count, "+": new_count}
    body: list[tuple[str, str]] = []
    start, position = position, position + 1
    while left["-"] > 0 or left["+"] > 0:
        line = lines[position] if position < len(lines) else ""
        mark, text = (line[:1], line[1:]) if line != "\n" else (" ", "\n")  # editors strip the blank of an empty line
        if mark not in (" ", "-", "+") or not line:
            raise EditError(f"the hunk at line {start + 1} of the diff ends before its {old_count}/{new_count} lines")
        for sign in "-+":
            left[sign] -= mark in (" ", sign)
        position += 1
        if position < len(lines) and lines[position].startswith("\\ "):
            text, position = text.removesuffix("\n"), position + 1
        body.append((mark, text))
    if min(left.values()) < 0:
        raise EditError(f"the hunk at line {start + 1} of the diff has more lines than it says")
    return _Hunk(old_start, new_start, tuple(body)), position


def _apply_patch(patch: _Patch, files: dict[str, str]) -> None:
    name = patch.old or patch.new or ""
    if patch.old is None and name in files:
        raise EditError(f"the diff adds {name}, which is there already")
    if patch.old is not None and name not in files:
        raise EditError(f"the diff changes {name}, which is not there; there are {_names(files)}")
    old = _lines(files.get(name, ""))
    result: list[str] = []
    taken = 0
    for hunk in patch.hunks:
        wanted = hunk.side("-")
        start = hunk.old_start - 1 if wanted else hunk.old_start
        if start < taken:
            raise EditError(f"{name}: the hunk at line {hunk.old_start} overlaps the one before it")
        _compare(name, old, start, wanted)
        result += [*old[taken:start], *hunk.side("+")]
        taken = start + len(wanted)
    result += old[taken:]
    if any(not line.endswith("\n") for line in result[:-1]):
        raise EditError(f"{name}: the diff continues after a line that has no line feed")
    if patch.new is None and result:
        raise EditError(f"the diff removes {name} but leaves {len(result)} of its lines")
    if patch.renames and patch.new in files:
        raise EditError(f"the diff renames {name} to {patch.new}, which is there already")
    if patch.new != name:
        del files[name]
    if patch.new is not None:
        files[patch.new] = "".join(result)


def _compare(name: str, old: list[str], start: int, wanted: list[str]) -> None:
    if start > len(old):
        raise EditError(f"{name} has {len(old)} lines; the diff expects something at line {start + 1}")
    for offset, line in enumerate(wanted):
        found = old[start + offset] if start + offset < len(old) else None
        if found != line:
            seen = "the end of the file" if found is None else _quoted(found)
            raise EditError(f"{name}, line {start + offset + 1}: the diff expects {_quoted(line)}, there is {seen}")


def _written(patch: _Patch) -> Iterator[str]:
    old = NO_FILE if patch.old is None else f"a/{patch.old}"
    yield f"--- {old}\n+++ {NO_FILE if patch.new is None else f'b/{patch.new}'}\n"
    for hunk in patch.hunks:
        sides = f"-{hunk.old_start},{len(hunk.side('-'))} +{hunk.new_start},{len(hunk.side('+'))}"
        yield f"@@ {sides} @@\n"
        for mark, text in hunk.lines:
            yield f"{mark}{text}" if text.endswith("\n") else f"{mark}{text}\n{NO_NEWLINE}\n"


def _names(files: Iterable[str]) -> str:
    return ", ".join(sorted(files)) or "none"


def _quoted(text: str) -> str:
    first = text.partition("\n")[0].strip() or text[:SHOWN]
    return repr(first if len(first) <= SHOWN else first[: SHOWN - 3] + "...")
