"""Which kernel the base's own version of a test names, where the head's names another file. Reads both as text."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path


def named_instead(kernel: Path, head: Path, base: Path, names: Sequence[str]) -> tuple[Path | None, bool]:
    """The one kernel that the base's test names and the head's no longer does, and whether the base's names this one.

    `head` and `base` are the test's file in both; `names` are its classes and its function. None, and true, where no
    literal of both says which kernel is meant.
    """
    now, was = literals(head, names), literals(base, names)
    wanted = [text for text in now if same_file(head.parent / text, kernel)]
    if not wanted or not was or was & {*wanted}:
        return None, True
    found = [base.parent / text for text in sorted(was - now)]
    others = [path for path in found if path.suffix == kernel.suffix and path.is_file()]
    return (others[0] if len(others) == 1 else None), False


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
