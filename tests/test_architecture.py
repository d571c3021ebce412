"""The house holds: who may import whom, what is imported when, how long things are, what must not be written.

The table is that of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytest_klineage"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

FLOORS = (
    ("errors", "channel", "extensions"),
    ("records",),
    ("operators", "references", "surfaces"),
    ("gate", "llm", "library", "results", "formats"),
    ("optimizers", "report", "external"),
    ("induction",),
    ("plugin", "cli", "cli_cards", "cli_compare", "cli_formats", "cli_lineage", "cli_report", "cli_serve", "doctor"),
)
"""From the bottom to the top. A part imports from lower floors only, never from its own."""
WITHIN_A_FLOOR = {
    ("cli", "doctor"), ("cli", "cli_cards"), ("cli", "cli_compare"), ("cli", "cli_formats"), ("cli", "cli_lineage"),
    ("cli", "cli_report"), ("cli", "cli_serve"),
}  # fmt: skip
"""The command's longest parts have files of their own."""
NARROWER = {
    "channel": {"errors"},
    "extensions": {"errors"},
    "report": {"results", "records", "errors"},
    "worker": {"errors", "channel", "records", "operators", "references", "surfaces"},
}
"""Parts that may import less than their floor allows, and the worker, which stands beside the house."""
ANYWHERE = {"__init__", "__main__"}
"""The facade re-exports lazily from everywhere; `python -m` starts the command."""
HEAVY = {
    "torch", "numpy", "triton", "tilelang", "flashinfer", "flag_gems", "fla", "cupy", "anthropic", "matplotlib",
    "starlette", "uvicorn", "httpx",
}  # fmt: skip
TRIVIAL = 3
"""Lines of a method that needs no explanation."""
FILE_LIMIT, FILE_MEDIAN, FUNCTION_LIMIT, FUNCTION_P90 = 500, 150, 60, 30

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def part_of(path: Path) -> str:
    """The part of the house that a file belongs to: a package's or a module's name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(part: str) -> int:
    return next(index for index, parts in enumerate(FLOORS) if part in parts)


def may_import(part: str, other: str) -> bool:
    if part == other or part in ANYWHERE:
        return True
    if other == "worker" or other in ANYWHERE:
        return other == "__init__"
    if part in NARROWER:
        return other in NARROWER[part]
    return floor_of(other) < floor_of(part) or (part, other) in WITHIN_A_FLOOR


def imported_names(node: ast.AST) -> Iterator[str]:
    """Dotted names that an import statement may bring in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_at_import_time(node: ast.AST) -> Iterator[ast.stmt]:
    """Import statements that run when the module is imported: outside of functions and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_import_time(child)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    wrong = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
        for name in imported_names(node):
            if name.startswith("pytest_klineage."):
                other = name.split(".")[1]
                other = other if (PACKAGE / other).is_dir() or (PACKAGE / f"{other}.py").exists() else "__init__"
                if not may_import(part, other):
                    wrong.append(f"line {getattr(node, 'lineno', 0)}: {part} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    if part_of(path) == "worker":
        return
    names = [name for node in imports_at_import_time(TREES[path]) for name in imported_names(node)]
    assert not [name for name in names if name.split(".")[0] in HEAVY]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_module_says_what_lives_in_it(path: Path) -> None:
    assert ast.get_docstring(TREES[path])


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_public_things_are_documented(path: Path) -> None:
    public = [node for node in TREES[path].body if isinstance(node, Definition) and not node.name.startswith("_")]
    missing = [node.name for node in public if not ast.get_docstring(node)]
    for owner in public:
        # A method that fills in its base's contract has its documentation there; one of two lines says it itself.
        if isinstance(owner, ast.ClassDef) and not owner.bases:
            missing += [
                f"{owner.name}.{node.name}"
                for node in functions(ast.Module(owner.body, []))
                if not node.name.startswith("_") and length(node) > TRIVIAL and not ast.get_docstring(node)
            ]
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LIMIT
    long = [f"{node.name}: {length(node)} lines" for node in functions(TREES[path]) if length(node) > FUNCTION_LIMIT]
    assert not long


def test_most_files_and_functions_are_shorter() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in FILES if path.name != "__init__.py"]
    assert statistics.median(lines) <= FILE_MEDIAN
    sizes = sorted(length(node) for tree in TREES.values() for node in functions(tree))
    assert sizes[int(0.9 * len(sizes))] <= FUNCTION_P90


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_must_not_be_written(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    calls = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not [node.lineno for node in calls if node.func.id == "print"]
    assert not [node.lineno for node in ast.walk(TREES[path]) if isinstance(node, ast.Assert)]
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_ignore_has_a_reason(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if re.search(r"# (type: ignore|noqa)", line):
            assert re.search(r"# (type: ignore|noqa)[^#]*(# | - )\w", line), f"line {number}: {line.strip()}"


@pytest.mark.parametrize(
    ("part", "other", "allowed"),
    [
        ("plugin", "gate", True), ("gate", "records", True), ("report", "results", True), ("cli", "doctor", True),
        ("gate", "worker", False), ("plugin", "cli", False), ("gate", "library", False), ("report", "gate", False),
        ("records", "operators", False), ("operators", "references", False), ("worker", "gate", False),
    ],
)  # fmt: skip
def test_the_table_means_what_it_says(part: str, other: str, allowed: bool) -> None:
    assert may_import(part, other) is allowed
