"""The command `pytest-klineage`: arguments, errors in one line, exit codes. What the commands do lives elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pytest_klineage import __version__
from pytest_klineage.cli.cards import add_cards
from pytest_klineage.cli.compare import add_compare
from pytest_klineage.cli.formats import add_formats
from pytest_klineage.cli.judge import add_judge
from pytest_klineage.cli.lineage import add_lineage
from pytest_klineage.cli.report import add_report
from pytest_klineage.cli.serve import add_external
from pytest_klineage.errors import KlineageError, UnknownName, UsageError

if TYPE_CHECKING:
    from pytest_klineage.operators import Operator
    from pytest_klineage.records import KernelCase, TensorSpec

Command: TypeAlias = Callable[[argparse.Namespace], int]

OK, FAILED, USAGE = 0, 1, 2
EXIT_CODES = """\
exit codes:
  0  done; for doctor: this machine can run the cpu platform
  1  something failed; for doctor: a part that the cpu platform needs is missing;
     for cards lint, cards diff and lineage verify: something is wrong, or differs;
     for compare --fail: something is slower, broken or refused; for import: nothing becomes a case
  2  the command line, or what it names, is not valid
"""
RECORDS = ("record", "run", "verdict", "case", "source", "machine", "lineage", "card", "trajectory", "usage")


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
    except KlineageError as error:
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
    add_compare(commands)
    add_lineage(commands)
    add_cards(commands)
    return parser


def run_doctor(arguments: argparse.Namespace) -> int:
    """`doctor`."""
    from pytest_klineage.cli.doctor import cpu_ready, examine, finding_lines

    findings = examine(arguments.cache_dir)
    _say("\n".join(finding_lines(findings)) + "\n")
    return OK if cpu_ready(findings) else FAILED


def run_schema(arguments: argparse.Namespace) -> int:
    """`schema`."""
    import msgspec

    from pytest_klineage.records import (
        KernelCase,
        KernelSource,
        Lineage,
        Machine,
        SkillCard,
        TrajectoryLine,
        Usage,
        Verdict,
        json_schema,
    )
    from pytest_klineage.results.runs import Record, RunInfo

    types: tuple[type[msgspec.Struct], ...] = (
        Record, RunInfo, Verdict, KernelCase, KernelSource, Machine, Lineage, SkillCard, TrajectoryLine, Usage,
    )  # fmt: skip
    kinds = dict(zip(RECORDS, types, strict=True))
    if arguments.name not in kinds:
        raise UnknownName("record", arguments.name, kinds)
    _say(json.dumps(json_schema(kinds[arguments.name]), indent=2) + "\n")
    return OK


def run_cases(arguments: argparse.Namespace) -> int:
    """`cases`."""
    from pytest_klineage.operators import OPERATORS, paper_case
    from pytest_klineage.references import REFERENCES

    for name, operator in sorted(OPERATORS.items()):
        _say(f"{name}\n  axes:     {', '.join(operator.axes)}\n  dtypes:   {', '.join(operator.dtypes)}\n")
        for option, values in operator.options.items():
            _say(f"  option:   {option} = {', '.join(map(str, values))} (default {values[0]})\n")
        able = [other for other, reference in sorted(REFERENCES.items()) if name in reference.operators()]
        _say(f"  compared: {', '.join(able) or 'nothing yet'}\n")
        for tier in ("cpu", "gpu"):
            case = paper_case(name, tier, able[0] if able else "torch")
            sizes = ", ".join(f"{axis}={size}" for axis, size in case.shape.items())
            _say(f"  {tier} shape: {case.dtype}: {sizes}\n")
            if tier == "cpu":
                _say("".join(f"    {line}\n" for line in _arguments(operator, case)))
    _say("".join(f"{line}\n" for line in _extension_lines()))
    return OK


def _extension_lines() -> list[str]:
    """Operators and references of other packages, with the package that each comes from."""
    from pytest_klineage.extensions import extensions
    from pytest_klineage.operators import OpenOperator, operator

    lines = []
    for name, extension in extensions("operators").items():
        found = operator(name)
        lines += [name, f"  package:  {extension.package}", f"  axes:     {', '.join(found.axes)}",
                  f"  dtypes:   {', '.join(found.dtypes)}"]  # fmt: skip
        lines += [f"  option:   {option} = {', '.join(map(str, values))}" for option, values in found.options.items()]
        if isinstance(found, OpenOperator):
            lines.append(f"  tensors:  {found.line.text}")
            lines.append("  compared: torch, torch.compile, package.module:function")
    for name, extension in extensions("references").items():
        lines += [f"reference {name}", f"  package:  {extension.package}"]
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


def _say(text: str) -> None:
    sys.stdout.write(text)


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"pytest-klineage: {' '.join(str(error).split())}\n")
    return status
