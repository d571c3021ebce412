"""The documentation is true: examples run, links lead somewhere, lists are complete, nothing names a machine.

An example is a fenced block with a file name (```cpp title="my_gemm.cpp"), or commands to run (```console run exit=0).
Files of one page are written in order into one folder. Shown output must appear, figures aside; "..." skips lines.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from package_tables import PACKAGE_TABLES

from pytest_klineage import KernelGate, Timing, Verdict, kernel_case
from pytest_klineage.cli.main import RECORDS
from pytest_klineage.gate import DEFENCES, POLICIES
from pytest_klineage.lab.plugin import OPTIONS as LAB_OPTIONS
from pytest_klineage.operators import OPERATORS
from pytest_klineage.plugin.options import OPTIONS
from pytest_klineage.records import Code, Status
from pytest_klineage.results.runs import Record, RunInfo
from pytest_klineage.surfaces import SURFACES
from pytest_klineage.surfaces.native import HEADER

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
PYTHON = {"pytest": ["-m", "pytest"], "pytest-klineage": ["-m", "pytest_klineage"], "python": []}
"""What this interpreter runs, in the place of a program on PATH."""
TOOLS = ("git", "sed")
QUICK = (
    "--klineage-time-limit=1.5 --klineage-precision=0.2 --klineage-seeds=1 --klineage-busy-limit=1 -p no:cacheprovider "
    "--klineage-spread-limit=1e6 --klineage-flush=1M"
)
"""Examples are about what happens, not about precise figures."""
EXAMPLE_LIMIT_S = 180
CI_MARKS = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS")
"""Where one of these is set, pytest prints its summary in full instead of in the width of a terminal."""
MACHINE = re.compile(
    r"(?<![\w.])/(home|root|work|tmp|opt|Users|mnt|data)/|file://|localhost|\.internal\b|pypi\.org|simple/"
)
"""Paths of somebody's machine, and hosts of package registries."""
GENERATED = {"report.html"}
"""Pages of the site that are made when it is built; see docs/site_hooks.py."""
LINKED_HOSTS = {"keepachangelog.com", "semver.org"}


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def page(name: str) -> str:
    return (DOCS / name).read_text()


def table(text: str, *, after: str = "") -> list[list[str]]:
    """Rows of the first table behind a heading: cells, without the head."""
    lines = text[text.index(after) :].splitlines()
    start = next(index for index, line in enumerate(lines) if re.fullmatch(r"\|[-|: ]+\|", line))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def code(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


ON_A_CLUSTER = DOCS / "how-to" / "judge-on-a-cluster.md"
"""Executed by tests/unit/executors/cluster, which starts one."""
EXECUTED = [
    path for path in PAGES
    if path != ON_A_CLUSTER and any(block.info.strip().startswith("run") for block in blocks(path))
]  # fmt: skip


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXECUTED, ids=[str(path.relative_to(ROOT)) for path in EXECUTED])
def test_examples_run(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path)


def execute(path: Path, tmp_path: Path) -> None:
    """Write a page's files into a folder and run its commands there."""
    for block in blocks(path):
        if title := re.search(r'title="([\w.]+)"', block.info):
            (tmp_path / title.group(1)).write_text(block.text)
        elif block.language == "console" and (wanted := re.search(r"run exit=(\d+)", block.info)):
            for command, shown in commands(block.text):
                status, output = run(command, tmp_path)
                assert status == int(wanted.group(1)), f"$ {command}\n{output}"
                missing = first_missing(shown, output)
                assert missing is None, f"$ {command}\nshows {missing!r}, which was not printed:\n{output}"


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the output that is shown for it."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command.partition("  #")[0].strip(), output.splitlines()


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a documented command in a folder of its own, with a cache of its own. Returns status and output."""
    program, *arguments = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", *CI_MARKS))}
    environment |= {
        "PYTEST_ADDOPTS": f"{QUICK} --klineage-cache-dir={shlex.quote(str(folder / 'cache'))}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        # As for a reader, whose environment with the package is active.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "COLUMNS": "80",
        **{f"GIT_{who}_{what}": "reader@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    plugin = (
        []
        if program != "pytest" or installed()
        else ["-p", "pytest_klineage.plugin", "-p", "pytest_klineage.lab.plugin"]
    )
    started = [program] if program in TOOLS else [sys.executable, *PYTHON[program], *plugin]
    done = subprocess.run(
        [*started, *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=EXAMPLE_LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def installed() -> bool:
    """Whether pytest finds the plugin by its entry point."""
    from importlib.metadata import entry_points

    return "klineage" in entry_points(group="pytest11").names


def first_missing(shown: list[str], output: str) -> str | None:
    """The first shown line that the output has not, in order; None when all are there."""
    rest = iter([without_figures(line) for line in output.splitlines()])
    for line in shown:
        if line.strip() not in ("", "...") and without_figures(line) not in rest:
            return line
    return None


def without_figures(line: str) -> str:
    """A line without numbers, the mark of uncertain ones and the CPU's name; rules and gaps are one character long."""
    line = re.sub(r"cpu \(.*\)", "cpu", line)
    line = re.sub(r" \(\d+:\d\d:\d\d\)", "", line)  # pytest writes a duration over a minute in both ways
    line = re.sub(r"records: .*|again: .*", "a path", line)
    line = re.sub(r"~?\d[\d.]*(e[+-]\d+)?", "#", line)
    return re.sub(r"(.)\1+", r"\1", line).strip()


# --- links and names --------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("https://"):
            assert target.split("/")[2] in LINKED_HOSTS, target
            continue
        if target in GENERATED:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_nothing_names_a_machine_or_a_registry(path: Path) -> None:
    assert not MACHINE.search(path.read_text())


def test_every_page_is_reached_from_the_index() -> None:
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", page("index.md"))}
    assert {path for path in DOCS.rglob("*.md") if path.name != "index.md"} <= linked


# --- lists that must be complete --------------------------------------------------------------------------------------


def test_options_are_those_of_pytest_help(tmp_path: Path) -> None:
    status, output = run("pytest --help", tmp_path)
    assert status == 0
    documented = {code(row[0])[0].split()[0]: row for row in table(PACKAGE_TABLES["options"]())}
    shown = set(re.findall(r"^  (--klineage-[a-z-]+)", output, re.M))
    assert set(documented) == shown == {option.flag for option in OPTIONS + LAB_OPTIONS}
    assert {flag[2:].replace("-", "_") for flag in documented} == set(re.findall(r"^  (klineage_\w+) \(", output, re.M))


@pytest.mark.parametrize("option", OPTIONS + LAB_OPTIONS, ids=lambda option: option.name)
def test_the_help_says_what_repeats(option: Any) -> None:
    assert ("repeatable" in option.help) == option.repeatable


def test_reason_codes_are_all_there_and_no_other() -> None:
    text = page("reference/reason-codes.md")
    rows = [line for line in text.splitlines() if re.match(r"\| `\w+\.\w+` \|", line)]
    documented = [code(row)[0] for row in rows]
    assert sorted(documented) == sorted(item.value for item in Code)
    assert all(all(cell.strip() for cell in row.split("|")[1:3]) for row in rows)
    assert sorted(name for row in table(text, after="## Statuses") for name in code(row[0])) == sorted(Status)


def test_the_readme_has_every_status() -> None:
    rows = table((ROOT / "README.md").read_text(), after="## What a verdict means")
    assert sorted(name for row in rows for name in code(row[0])) == sorted(Status)


def test_every_operator_has_its_section() -> None:
    assert set(re.findall(r"^## (\w+)$", page("reference/operators.md"), re.M)) >= set(OPERATORS)


def test_defences_policies_and_surfaces_are_all_there() -> None:
    rows = table(page("concepts/gate.md"), after="## Defences")
    assert sorted(code(row[0])[0] for row in rows) == sorted(DEFENCES)
    assert set(POLICIES) <= set(code(prose(DOCS / "concepts" / "timing.md")))
    assert [code(row[0])[0] for row in table(page("reference/surfaces.md"))] == sorted(SURFACES)


def test_records_within_a_verdict_are_rendered() -> None:
    rendered = set(re.findall(r"^::: [\w.]+\.(\w+)$", page("reference/records.md"), re.M))
    inner = {
        name
        for field in msgspec.structs.fields(Verdict)
        for name in re.findall(r"records\.\w+\.(\w+)", str(field.type))
    }
    assert {Verdict.__name__, Timing.__name__, *inner} - {"KernelCase"} <= rendered


def test_the_run_store_is_described_as_it_is() -> None:
    text = prose(DOCS / "reference/records.md")
    for name, record in (("RunInfo", RunInfo), ("Record", Record)):
        listed = re.search(rf"\(`{name}`\): ([^.]+)\.", text)
        assert listed is not None
        assert tuple(code(listed.group(1))) == record.__struct_fields__


def test_every_record_with_a_schema_is_named() -> None:
    assert set(RECORDS) <= set(code(page("reference/cli.md")))


def test_marker_and_fixture_arguments_are_all_there() -> None:
    text = page("reference/marker-and-fixtures.md")
    for function, name in ((kernel_case, "kernel_case"), (KernelGate.__call__, "KernelGate")):
        assert f"::: pytest_klineage.{name}\n" in text
        arguments = (inspect.getdoc(function) or "").partition("Args:\n")[2]
        documented = re.findall(r"^    \**(\w+): ", arguments, re.M)
        assert documented == [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_native_abi_is_described_as_it_is() -> None:
    text = page("reference/native-abi.md")
    header = HEADER.read_text()
    for struct in ("klineage_call", "klineage_tensor"):
        body = re.sub(r"/\*.*?\*/", "", re.search(rf"struct {struct} {{(.*?)}}", header, re.S).group(1))  # type: ignore[union-attr]
        fields = re.findall(r"(\w+)(?:\[\w+\])?;", body)
        rows = table(text, after=f"| field of `{struct}`")
        assert sorted(name for row in rows for name in code(row[0])) == sorted(fields)
    version = re.search(r"KLINEAGE_ABI_VERSION (\d+)", header)
    assert version is not None
    assert f"`KLINEAGE_ABI_VERSION` = {version.group(1)}" in text


def test_what_the_architecture_names_is_there() -> None:
    rows = table(page("architecture.md"), after="## Where is")
    assert rows
    for _question, files, symbols in rows:
        source = "\n".join((ROOT / "pytest_klineage" / name).read_text() for name in code(files))
        for symbol in code(symbols):
            for name in symbol.split("."):
                assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", source, re.M), symbol


def test_the_layer_table_is_the_one_that_is_held() -> None:
    spec = importlib.util.spec_from_file_location("test_architecture", ROOT / "tests" / "test_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    held = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(held)
    package = ROOT / "pytest_klineage"
    there = {path.stem for path in package.iterdir()}
    floors = [set(floor) & there for floor in held.FLOORS]
    rows = table(page("architecture.md"), after="## Layers")
    assert [set(code(row[0])) for row in reversed(rows)] == [floor for floor in floors if floor]
