"""`pytest-klineage import` and `export`: what becomes of other projects' problems, and runs as their traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.cli.console import FAILED, OK, Commands, say, write_to
from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.formats import Imported


def add_formats(commands: Commands) -> None:
    """Add the commands `import` and `export`."""
    imports = commands.add_parser("import", help="say which foreign problems become cases, and why others do not")
    imports.add_argument(
        "problems", metavar="PROBLEM", nargs="+", type=Path,
        help="a KernelBench problem (a .py file, or a folder of them), or a folder of FlashInfer-Trace",
    )  # fmt: skip
    imports.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("imported"),
        help="where the operators' files go; default: %(default)s",
    )  # fmt: skip
    imports.add_argument("--precision", metavar="TYPE", default="", help="type of KernelBench's inputs, such as fp16")
    imports.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], type=size_of, dest="sizes",
        help="another value of a size at the top of a KernelBench problem; repeatable",
    )  # fmt: skip
    imports.add_argument(
        "--at-most", metavar="N", type=int, default=0,
        help="divide all other such sizes by their prime factors until they are N at most",
    )  # fmt: skip
    imports.add_argument(
        "--eval", action="store_true", help="modules of KernelBench in evaluation mode: no dropout, kept statistics"
    )
    imports.add_argument("--lint", action="store_true", help="refuse cases that answers without computation pass")
    imports.set_defaults(command=run_import)
    exports = commands.add_parser("export", help="write a run's verdicts as Trace JSONL of FlashInfer-Trace")
    exports.add_argument("run", metavar="RUN", type=Path, help="a run's directory, or its records.jsonl")
    exports.add_argument("--output", metavar="FILE", type=Path, help="write to FILE instead of the standard output")
    exports.set_defaults(command=run_export)


def run_import(arguments: argparse.Namespace) -> int:
    """`import`: one line for every problem; ends with 1 when none becomes a case."""
    from pytest_klineage.formats import Unsupported
    from pytest_klineage.formats.imported import check_scorable, is_lintable

    cases = refused = 0
    for problem in _problems(arguments):
        try:
            if isinstance(problem, UsageError):
                raise problem
            found = check_scorable(problem) if arguments.lint else problem
        except UsageError as error:
            refused += 1
            say(str(error) if isinstance(error, Unsupported) else f"not read: {error}")
            continue
        cases += 1
        later = "; too large to be linted here" if arguments.lint and not is_lintable(found.case) else ""
        say(f"{found.name}: {found.case.id}{later}")
    say(f"{cases} of {cases + refused} are cases")
    return OK if cases else FAILED


def run_export(arguments: argparse.Namespace) -> int:
    """`export`."""
    from pytest_klineage.formats import traces_jsonl
    from pytest_klineage.results.runs import read_run

    run = read_run(arguments.run)
    data = traces_jsonl(record.verdict for record in run.records)
    write_to(arguments.output, data.decode())
    left = len(run.records) - data.count(b"\n")
    if left:
        sys.stderr.write(f"pytest-klineage: {left} of {len(run.records)} verdicts are skips or builds, and left out\n")
    return OK


def size_of(text: str) -> tuple[str, str]:
    """A name and its value, from "NAME=VALUE"."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"a size is written NAME=VALUE, got {text!r}")
    return name, value


def _problems(arguments: argparse.Namespace) -> Iterator[Imported | UsageError]:
    """Every problem as a case, or why it cannot be one."""
    from pytest_klineage.formats import read_problems

    for path in arguments.problems:
        if (path / "definitions").is_dir():
            yield from _of_trace_set(path, arguments.output)
        else:
            yield from read_problems(
                files_of(path), arguments.output, sizes=dict(arguments.sizes), at_most=arguments.at_most,
                precision=arguments.precision, training=not arguments.eval,
            )  # fmt: skip


def files_of(path: Path) -> list[Path]:
    """The problems of a folder in the order of their numbers, or the one that is meant."""
    if not path.is_dir():
        return [path]
    return sorted(path.rglob("*.py"), key=lambda file: (file.parent, number_of(file), file.name))


def _of_trace_set(root: Path, into: Path) -> Iterator[Imported | UsageError]:
    from pytest_klineage.formats import Unsupported, import_definition, read_trace_set

    found = read_trace_set(root)
    for trace in found.workloads:
        definition = found.definitions.get(trace.definition)
        if definition is None:
            why = f"the workload {trace.workload.uuid} is of a definition that is not there"
            yield Unsupported(trace.definition, why)
            continue
        try:
            yield import_definition(definition, trace.workload, into)
        except UsageError as error:
            yield error
    yield from (UsageError(problem) for problem in found.problems)


def number_of(path: Path) -> int:
    """A problem's number, with which its file's name begins; the largest integer without one."""
    head = path.name.partition("_")[0]
    return int(head) if head.isdigit() else sys.maxsize
