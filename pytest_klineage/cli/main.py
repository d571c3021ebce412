"""The command `pytest-klineage`: arguments, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pytest_klineage import __version__
from pytest_klineage.cli.cards import add_cards
from pytest_klineage.cli.compare import add_compare
from pytest_klineage.cli.console import FAILED, OK, USAGE, say, say_all
from pytest_klineage.cli.formats import add_formats
from pytest_klineage.cli.judge import add_judge, add_results
from pytest_klineage.cli.lineage import add_lineage
from pytest_klineage.cli.report import add_report
from pytest_klineage.cli.serve import add_external
from pytest_klineage.errors import KlineageError, UnknownName, UsageError

if TYPE_CHECKING:
    import msgspec

    from pytest_klineage.operators import Operator
    from pytest_klineage.records import KernelCase, TensorSpec

Command: TypeAlias = Callable[[argparse.Namespace], int]

EXIT_CODES = """\
exit codes:
  0  done; for doctor: this machine can run the cpu platform
  1  something failed; for doctor: a part that the cpu platform needs is missing;
     for cards lint, cards diff and lineage verify: something is wrong, or differs;
     for compare --fail: something is slower, broken or refused; for import: nothing becomes a case
  2  the command line, or what it names, is not valid
"""
RECORDS = {
    "record": "Record", "run": "RunInfo", "verdict": "Verdict", "case": "KernelCase", "source": "KernelSource",
    "machine": "Machine", "lineage": "Lineage", "card": "SkillCard", "trajectory": "TrajectoryLine", "usage": "Usage",
}  # fmt: skip
"""By what `schema` calls a record: its class."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one line on stderr, never a traceback."""
    parsed = build_parser().parse_args(arguments)
    command: Command = parsed.command
    try:
        status = command(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python must not complain about it while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except UsageError as error:
        return _complain(error, USAGE)
    except (KlineageError, OSError) as error:
        return _complain(error, FAILED)
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="pytest-klineage",
        description="Look at what pytest-klineage can run here, and at what it recorded.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-klineage {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="say what this machine can run, what is missing and how to install it")
    doctor.add_argument("--cache-dir", metavar="DIR", type=Path, help="the cache folder to look at")
    doctor.set_defaults(command=run_doctor)

    add_report(commands)
    add_formats(commands)
    add_external(commands)
    schema = commands.add_parser("schema", help="print the JSON Schema of a record")
    schema.add_argument("name", nargs="?", default="record", metavar="RECORD", help=f"one of {', '.join(RECORDS)}")
    schema.set_defaults(command=run_schema)

    cases = commands.add_parser("cases", help="list operators with their axes, options and shapes, and the references")
    cases.set_defaults(command=run_cases)
    add_judge(commands)
    add_results(commands)
    add_compare(commands)
    add_lineage(commands)
    add_cards(commands)
    return parser


def run_doctor(arguments: argparse.Namespace) -> int:
    """`doctor`."""
    from pytest_klineage.cli.doctor import cpu_ready, examine, finding_lines

    findings = examine(arguments.cache_dir)
    say_all(finding_lines(findings))
    return OK if cpu_ready(findings) else FAILED


def run_schema(arguments: argparse.Namespace) -> int:
    """`schema`."""
    from pytest_klineage import records
    from pytest_klineage.results.runs import Record, RunInfo

    if arguments.name not in RECORDS:
        raise UnknownName("record", arguments.name, RECORDS)
    kinds: dict[str, type[msgspec.Struct]] = {"record": Record, "run": RunInfo}
    kind = kinds.get(arguments.name) or getattr(records, RECORDS[arguments.name])
    say(json.dumps(records.json_schema(kind), indent=2))
    return OK


def run_cases(arguments: argparse.Namespace) -> int:
    """`cases`."""
    from pytest_klineage.operators import OPERATORS

    for name, chosen in sorted(OPERATORS.items()):
        say_all(_operator_lines(name, chosen))
    say_all(_extension_lines())
    return OK


def _operator_lines(name: str, chosen: Operator, package: str = "") -> Iterator[str]:
    """An operator as `cases` shows it, with the package that it comes from."""
    from pytest_klineage.operators import OpenOperator, paper_case
    from pytest_klineage.references import REFERENCES, is_own
    from pytest_klineage.references.functions import COMPILED, DEFINITION

    yield name
    if package:
        yield f"  package:  {package}"
    yield f"  axes:     {', '.join(chosen.axes)}"
    yield f"  dtypes:   {', '.join(chosen.dtypes)}"
    for option, values in chosen.options.items():
        yield f"  option:   {option} = {', '.join(map(str, values))} (default {values[0]})"
    if isinstance(chosen, OpenOperator):
        yield f"  tensors:  {chosen.line.text}"
    able = [other for other, reference in sorted(REFERENCES.items()) if name in reference.operators()]
    own = [DEFINITION, COMPILED] if is_own(DEFINITION, name, shipped=not package) else []
    yield f"  compared: {', '.join([*own, *able])}"
    for tier in sorted(chosen.published):
        case = paper_case(name, tier, [*own, *able][0])
        yield f"  {tier} shape: {case.dtype}: {', '.join(f'{axis}={size}' for axis, size in case.shape.items())}"
        if tier == "cpu":
            yield from (f"    {line}" for line in _arguments(chosen, case))


def _extension_lines() -> list[str]:
    """What other packages register, with the package that each comes from."""
    from pytest_klineage.extensions import extensions
    from pytest_klineage.operators import operator
    from pytest_klineage.records import gpu_platform
    from pytest_klineage.surfaces import surface_backend

    lines: list[str] = []
    for name, extension in extensions("operators").items():
        lines += _operator_lines(name, operator(name), extension.package)
    for name, extension in extensions("references").items():
        lines += [f"reference {name}", f"  package:  {extension.package}"]
    for name, extension in extensions("surfaces").items():
        backend = surface_backend(name)
        lines += [f"surface {name}", f"  package:  {extension.package}", f"  runs on:  {', '.join(backend.platforms)}"]
    for name, extension in extensions("platforms").items():
        kind = gpu_platform(name)
        said = f"{kind.title}, compute capability {kind.capability}, built for sm_{kind.target}"
        lines += [f"platform {name}", f"  package:  {extension.package}", f"  is:       {said}"]
    return lines


def _arguments(operator: Operator, case: KernelCase) -> list[str]:
    """What a kernel for this case is given and has to fill, in the order of the native ABI."""
    import msgspec

    signature = operator.signature(case)
    lines = [f"inputs:  {_tensors(signature.inputs)}", f"outputs: {_tensors(signature.outputs)}"]
    scalars = ", ".join(f"{name} = {value:g}" for name, value in signature.scalars.items())
    lines.append(f"scalars: {scalars or 'none'}")
    usual = {spec.name for spec in signature.inputs}
    for option, values in operator.options.items():
        for value in values[1:]:
            inputs = operator.signature(msgspec.structs.replace(case, options={option: value})).inputs
            if further := [spec for spec in inputs if spec.name not in usual]:
                lines.append(f"inputs with {option}={value}, also: {_tensors(further)}")
    return lines


def _tensors(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name}[{','.join(map(str, spec.shape))}] {spec.dtype}" for spec in specs)


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"pytest-klineage: {' '.join(str(error).split())}\n")
    return status
