"""The house holds: who may import whom, what is imported when, how long things are, what must not be written.

The table is that of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_klineage.operators import OPERATORS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytest_klineage"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

FLOORS = (
    ("errors", "channel", "extensions", "files"),
    ("records",),
    ("operators", "references", "surfaces", "results"),
    ("gate", "formats", "report"),
    ("executors",),
    ("plugin",),
    ("lab",),
    ("cli",),
)
"""From the bottom to the top. A part imports from lower floors only, never from its own."""
LAB_FLOORS = (("llm", "library"), ("optimizers",), ("external", "induction"), ("studies",), ("plugin",), ("making",))
"""The same inside of the laboratory."""
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
    "starlette", "uvicorn", "httpx", "ray",
}  # fmt: skip
GEMM = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    for (int64_t i = 0; i < c.shape[0]; ++i)
        for (int64_t j = 0; j < c.shape[1]; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < a.shape[1]; ++k)
                sum += (double)((const float *)a.data)[i * a.stride[0] + k * a.stride[1]]
                     * ((const float *)b.data)[k * b.stride[0] + j * b.stride[1]];
            ((float *)c.data)[i * c.stride[0] + j * c.stride[1]] = (float)sum;
        }
    return 0;
}
"""
TRIVIAL = 3
"""Lines of a method that needs no explanation."""
FILE_LIMIT, FILE_MEDIAN, FUNCTION_LIMIT, FUNCTION_MEDIAN, FUNCTION_P90 = 400, 160, 60, 8, 20

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def part_of(path: Path) -> str:
    """The part of the house that a file belongs to: a package's or a module's name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def lab_part_of(path: Path) -> str:
    """The part of the laboratory that a file belongs to; empty for files elsewhere."""
    first, *rest = path.relative_to(PACKAGE).parts
    return rest[0].removesuffix(".py") if first == "lab" and rest else ""


def floor_of(part: str, floors: tuple[tuple[str, ...], ...] = FLOORS) -> int:
    return next(index for index, parts in enumerate(floors) if part in parts)


def may_import_in_lab(part: str, other: str) -> bool:
    return part == other or floor_of(other, LAB_FLOORS) < floor_of(part, LAB_FLOORS)


def may_import(part: str, other: str) -> bool:
    if part == other or part in ANYWHERE:
        return True
    if other == "worker" or other in ANYWHERE:
        return other == "__init__"
    if part in NARROWER:
        return other in NARROWER[part]
    return floor_of(other) < floor_of(part)


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


MODULES = {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in FILES}


def module_named(name: str) -> str:
    """The module of this package that a dotted name is of or in; empty for the package itself."""
    inner = name.removeprefix("pytest_klineage.")
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner


def import_graph() -> dict[str, set[str]]:
    """For each module, the modules that it imports anywhere in its text, for types too."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        module = str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        names = {name for node in ast.walk(TREES[path]) for name in imported_names(node)}
        ours = {module_named(name) for name in names if name.startswith("pytest_klineage.")}
        graph[module] = ours - {module, ""}
    return graph


def cycles_of(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            module = ahead.pop()
            if module not in seen:
                seen.add(module)
                ahead += graph.get(module, ())
        reached[start] = seen
    return {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in graph
        if module in reached[module]
    }


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
                inner, inner_other = lab_part_of(path), [*name.split("."), "", ""][2] if other == "lab" else ""
                fine = may_import_in_lab(inner, inner_other) if inner and inner_other else may_import(part, other)
                if not fine:
                    wrong.append(f"line {getattr(node, 'lineno', 0)}: {part} imports {name}")
    assert not wrong


def test_modules_import_one_another_in_no_circle() -> None:
    assert cycles_of(import_graph()) == set()


def test_a_circle_is_seen() -> None:
    assert cycles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


def test_the_gate_judges_without_the_rooms_above_it(tmp_path: Path) -> None:
    """Nor without what stands beside it: a judgement of a real kernel, with those packages out of reach."""
    (tmp_path / "kernel.cpp").write_text(GEMM)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "for name in ('lab', 'plugin', 'cli', 'report', 'formats'):\n"
        "    sys.modules[f'pytest_klineage.{name}'] = None\n"
        "from pytest_klineage import Gate, GateSettings, make_case, read_source\n"
        "quick = {'time_limit_s': 0.2, 'precision': 0.5, 'seeds': 1, 'busy_limit': 1.0}\n"
        "case, kernel = make_case('gemm', (8, 8, 8), 'fp32', 'torch'), read_source('kernel.cpp')\n"
        "with Gate('cpu', GateSettings(**quick, cache_dir=Path('cache').absolute())) as gate:\n"
        "    print(gate.judge(case, kernel).timing is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


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
    assert statistics.median(sizes) <= FUNCTION_MEDIAN
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
        ("plugin", "gate", True), ("gate", "records", True), ("report", "results", True), ("cli", "lab", True),
        ("lab", "plugin", True), ("gate", "worker", False), ("plugin", "cli", False), ("gate", "lab", False),
        ("plugin", "lab", False), ("report", "gate", False), ("records", "operators", False), ("gate", "report", False),
        ("operators", "references", False), ("worker", "gate", False), ("executors", "gate", True),
        ("gate", "executors", False), ("plugin", "executors", True), ("executors", "plugin", False),
    ],
)  # fmt: skip
def test_the_table_means_what_it_says(part: str, other: str, allowed: bool) -> None:
    assert may_import(part, other) is allowed


@pytest.mark.parametrize(
    ("part", "other", "allowed"),
    [("induction", "optimizers", True), ("plugin", "llm", True), ("llm", "library", False), ("llm", "plugin", False)],
)
def test_the_laboratory_has_an_order_of_its_own(part: str, other: str, allowed: bool) -> None:
    assert may_import_in_lab(part, other) is allowed


NAMING_OPERATORS = {
    "report/paper.py": "what the paper calls them, beside its figures",
    "executors/canary.py": "the pair of kernels with a known ratio computes something",
}
"""Modules outside of operators and references that may name one, and why. A fact of an operator stands in its class."""


def names_of_operators(tree: ast.AST) -> set[str]:
    """Shipped operators that a module's code means by name: a string that is one, not a text that mentions it."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)} & {
        *OPERATORS
    }


def test_operators_are_named_in_their_own_modules_only() -> None:
    naming = {
        str(path.relative_to(PACKAGE)) for path, tree in TREES.items()
        if part_of(path) not in ("operators", "references") and names_of_operators(tree)
    }  # fmt: skip
    assert naming == set(NAMING_OPERATORS)


def test_a_named_operator_is_seen() -> None:
    assert names_of_operators(ast.parse("if case.operator in ('topk', 'scan'):\n    'such as gemm'")) == {"topk"}


NAME_LIMIT = 60
"""Characters of a test function's name."""


def test_names_of_tests_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for folder in ("tests", "suites")
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        for node in functions(ast.parse(path.read_text(encoding="utf-8")))
        if node.name.startswith("test_") and len(node.name) > NAME_LIMIT
    ]
    assert not long


WORN = re.compile(r"\b(nobody|anew|whoever|told|surely|on the way|at all)\b|(?<!there )\bis (?-i:none)\b", re.I)
"""Words that had become a tic. "there is none" is plain English; `is None` is code."""
SHOWN_TO_MODELS = {"lab/induction/walk.py", "lab/induction/lift_checks.py"}
"""Modules that may keep them: sentences that models were shown, by which recordings replay."""


def worn_words(path: Path) -> list[str]:
    """Lines of a file with a word that became a tic."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines if WORN.search(line)]


def test_worn_words_are_not_written_again() -> None:
    package = [path for path in FILES if str(path.relative_to(PACKAGE)) not in SHOWN_TO_MODELS]
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert [line for path in (*package, *pages) for line in worn_words(path)] == []


def test_suites_leave_the_import_path_alone() -> None:
    """Their modules are on it by `pythonpath` in pyproject.toml."""
    paths = sorted((ROOT / "suites").rglob("*.py"))
    changing = [
        path for path in paths if re.search(r"sys\.path(\.insert|\.append|\[)", path.read_text(encoding="utf-8"))
    ]
    assert paths
    assert changing == []


def test_class_names_have_one_meaning() -> None:
    """Except for those that a stand-in of another package must have as that package has them."""
    defined_in: dict[str, list[str]] = {}
    for path in FILES:
        if "stand_in" not in path.parts:
            for node in ast.walk(TREES[path]):
                if isinstance(node, ast.ClassDef):
                    defined_in.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert not {name: paths for name, paths in defined_in.items() if len(paths) > 1}
