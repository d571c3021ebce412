"""`pytest-klineage import` and `export`: what becomes of other projects' problems, and runs as their traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.formats import Imported

OK, FAILED = 0, 1


def add_formats(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `import` and `export`."""
    imports = commands.add_parser("import", help="say which foreign problems become cases, and why others do not")
    imports.add_argument(
        "problems", metavar="PROBLEM", nargs="+", type=Path,
        help="a KernelBench problem (a .py file, or a folder of them), or a folder of FlashInfer-Trace",
    )  # fmt: skip
    imports.add_argument("--precision", metavar="TYPE", default="", help="type of KernelBench's inputs, such as fp16")
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
            _say(str(error) if isinstance(error, Unsupported) else f"not read: {error}")
            continue
        cases += 1
        later = "; too large to be linted here" if arguments.lint and not is_lintable(found.case) else ""
        _say(f"{found.name}: {found.case.id}{later}")
    _say(f"{cases} of {cases + refused} are cases")
    return OK if cases else FAILED


def run_export(arguments: argparse.Namespace) -> int:
    """`export`."""
    from pytest_klineage.formats import traces_jsonl
    from pytest_klineage.results.runs import read_run

    run = read_run(arguments.run)
    data = traces_jsonl(record.verdict for record in run.records)
    if arguments.output is None:
        sys.stdout.write(data.decode())
    else:
        try:
            arguments.output.write_bytes(data)
        except OSError as error:
            raise UsageError(f"{arguments.output} cannot be written: {error.strerror or error}") from error
    left = len(run.records) - data.count(b"\n")
    if left:
        sys.stderr.write(f"pytest-klineage: {left} of {len(run.records)} verdicts are skips or builds, and left out\n")
    return OK


def _problems(arguments: argparse.Namespace) -> Iterator[Imported | UsageError]:
    """Every problem as a case, or why it is none."""
    for path in arguments.problems:
        if (path / "definitions").is_dir():
            yield from _of_trace_set(path)
        elif path.is_dir():
            files = sorted(path.rglob("*.py"), key=lambda file: (file.parent, _number(file), file.name))
            for file in files:
                yield _of_file(file, arguments.precision)
        else:
            yield _of_file(path, arguments.precision)


def _of_file(path: Path, precision: str) -> Imported | UsageError:
    from pytest_klineage.formats import read_problem

    try:
        return read_problem(path, precision=precision)
    except UsageError as error:
        return error


def _of_trace_set(root: Path) -> Iterator[Imported | UsageError]:
    from pytest_klineage.formats import Unsupported, import_definition, read_trace_set

    found = read_trace_set(root)
    for trace in found.workloads:
        definition = found.definitions.get(trace.definition)
        if definition is None:
            why = f"the workload {trace.workload.uuid} is of a definition that is not there"
            yield Unsupported(trace.definition, why)
            continue
        try:
            yield import_definition(definition, trace.workload)
        except UsageError as error:
            yield error
    yield from (UsageError(problem) for problem in found.problems)


def _number(path: Path) -> int:
    head = path.name.partition("_")[0]
    return int(head) if head.isdigit() else sys.maxsize


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
