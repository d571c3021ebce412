"""Which kernel the base's own version of a test names, where the head's names another file. Reads both as text."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_klineage.plugin.comparison.base_checkout import BaseCheckout


def named_instead(kernel: Path, test: Path, checkout: BaseCheckout, names: Sequence[str]) -> tuple[Path | None, bool]:
    """The one kernel that the base's test names and the head's no longer does, and whether the base's names this one.

    `kernel` and `test` are the head's files; `names` are the test's classes and its function. None, and true, where no
    literal of both says which kernel is meant.
    """
    older = checkout.in_base(test)
    now, was = literals(test, names), literals(older, names)
    wanted = {text for text in now if same_file(test.parent / text, kernel)}
    if not wanted or was & wanted or not any(names_a_file(older.parent, text, kernel.suffix) for text in was):
        return None, True
    kept = {os.path.abspath(older.parent / text) for text in now}
    named = {os.path.abspath(older.parent / text) for text in was}
    own = checkout.at_the_same_place(kernel)
    if own is not None and os.path.abspath(own) in named:
        return None, True
    files = [Path(path) for path in sorted(named - kept) if os.path.isfile(path)]
    # What lies outside of the base, such as an absolute path's file, is no version of the base's.
    others = [path for path in files if path.suffix == kernel.suffix and path.resolve().is_relative_to(checkout.base)]
    return (others[0] if len(others) == 1 else None), False


def names_a_file(folder: Path, text: str, suffix: str) -> bool:
    """Whether a literal is a file's path, or looks like that of a kernel that is not there; a docstring does not."""
    return os.path.isfile(folder / text) or (Path(text).suffix == suffix and not re.search(r"\s", text))


def literals(path: Path, names: Sequence[str]) -> set[str]:
    """The strings in a test, its decorators included; none where the file has no such test."""
    try:
        node: ast.AST = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    for name in names:
        found = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == name]
        if not found:
            return set()
        node = found[-1]
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def same_file(path: Path, other: Path) -> bool:
    """Whether two paths are one, written out."""
    return os.path.abspath(path) == os.path.abspath(other)
