"""Definition: where an operator that this package does not ship was defined, for records and for worker processes."""

from __future__ import annotations

import ast
import hashlib

import msgspec


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of an operator that comes from a user's file or from another package."""

    source: str
    """File and name, such as "tests/test_softmax.py:softmax"; the file is relative to its project's root."""
    digest: str
    """SHA-256 over the file without its tests, in hexadecimal: see `definition_digest`."""
    package: str = ""
    """The distribution that registers it, with its version, such as "mylib 1.2"; empty for a file of the user's."""


class DefinitionFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a trusted worker process needs to import a definition on this machine. Never part of a record."""

    path: str = ""
    """The defining file; empty for operators that this package ships."""
    files: dict[str, str] = {}
    """Absolute paths of the files that references are functions of, by their names in the case."""
    search: tuple[str, ...] = ()
    """The judge's `sys.path`."""


def definition_digest(text: str) -> str:
    """SHA-256 over a file's lines without its test functions and test classes.

    So a definition stays the same when a test beside it changes. Text that is no Python is taken whole.
    """
    lines = text.splitlines()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and is_test(node.name):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            for index in range(first - 1, node.end_lineno or node.lineno):
                lines[index] = ""
    kept = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(kept.encode()).hexdigest()


def is_test(name: str) -> bool:
    """Whether pytest collects a function or class of this name by default."""
    return name.startswith(("test", "Test"))
