"""How large the package and its pages are: `make sizes` prints it. test_architecture.py holds the limits of files.

With a folder as its argument it counts another version of the package, and no pages.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytest_klineage"
NOT_PROSE = {
    "without generated tables": r"<!-- (table|site): [\w-]+ -->.*?<!-- end -->",
    "without code either": r"^```.*?^```",
}
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


def counted(package: Path) -> dict[str, tuple[int, ...]]:
    """By part, and in all: files, lines, lines with code, with comments and docstrings alone, and blank ones."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        code, blank = code_lines(text), sum(not line.strip() for line in lines)
        own = (1, len(lines), code, len(lines) - code - blank, blank)
        for name in (part_of(path.relative_to(package).parts[:-1]), "all"):
            sizes[name] = tuple(map(sum, zip(sizes.get(name, (0,) * len(own)), own, strict=True)))
    return sizes


def table(package: Path) -> str:
    """The counts as a table, the largest part first."""
    sizes = counted(package)
    rows = [(name, *numbers) for name, numbers in sizes.items() if name != "all"]
    return tabulate(
        [*sorted(rows, key=lambda row: -row[2]), ("all", *sizes["all"])],
        ("part", "files", "lines", "code", "comments, docstrings", "blank"), tablefmt="pipe",
    )  # fmt: skip


def words() -> str:
    """Words of the README and the pages: all of them, and without what is not prose."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    counts = [f"{len(text.split())} words in README.md and docs"]
    for name, pattern in NOT_PROSE.items():
        text = re.sub(pattern, "", text, flags=re.S | re.M)
        counts.append(f"{len(text.split())} {name}")
    return ", ".join(counts)


if __name__ == "__main__":
    parts = [table(Path(sys.argv[1]))] if sys.argv[1:] else [table(PACKAGE), words()]
    sys.stdout.write("\n\n".join(parts) + "\n")
