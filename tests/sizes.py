"""How large each part of the package is: `make sizes` prints a table. tests/test_architecture.py holds the limits.

With a folder as its argument it counts another version of the package.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

PACKAGE = Path(__file__).parents[1] / "pytest_klineage"
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def part_of(parts: tuple[str, ...]) -> str:
    """The package that a folder belongs to, one level deeper in the laboratory; "." for modules beside packages."""
    return "/".join(parts[: 2 if parts[:1] == ("lab",) else 1]) or "."


def code_lines(text: str) -> int:
    """Lines with code: without blank lines, comments, and docstrings of modules, classes, functions and fields."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for doc in docstrings(node):
            found.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(found)


def docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    """The docstrings in a node's body: its own, and those behind assignments."""
    body = getattr(node, "body", None)
    if isinstance(body, list):
        for before, one in pairwise([None, *body]):
            text = (
                isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
            )
            if text and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield one


def table(package: Path) -> str:
    """Files, lines and lines of code by part, and in all."""
    sizes: dict[str, list[int]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in (part_of(path.relative_to(package).parts[:-1]), "all"):
            row = sizes.setdefault(name, [0, 0, 0])
            row[:] = [row[0] + 1, row[1] + len(text.splitlines()), row[2] + code_lines(text)]
    rows = [(name, *numbers) for name, numbers in sizes.items() if name != "all"]
    return tabulate(
        [*sorted(rows, key=lambda row: -row[2]), ("all", *sizes["all"])],
        ("part", "files", "lines", "of code"), tablefmt="pipe",
    )  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(f"{table(Path(sys.argv[1]) if sys.argv[1:] else PACKAGE)}\n")
