"""`pytest-klineage report`: tables, figures and an HTML page from records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage import __version__
from pytest_klineage.cli.console import OK, Commands, run_path, write_to

if TYPE_CHECKING:
    from pytest_klineage.report.collect import Material
    from pytest_klineage.report.document import Report, UnreadableInput
    from pytest_klineage.results.runs import Run

STANDARD_OUTPUT = "-"


def add_report(commands: Commands) -> None:
    """Add the command `report`."""
    report = commands.add_parser("report", help="rebuild tables, figures and an HTML page from records")
    report.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="a run's directory or its records.jsonl, a trajectory, a lineage or a card, a folder with any of them; "
        "or: latest (in results/)",
    )  # fmt: skip
    report.add_argument("--html", metavar="FILE", type=Path, help="write one HTML file that opens without a network")
    report.add_argument(
        "--markdown", metavar="FILE", nargs="?", const=STANDARD_OUTPUT,
        help="write Markdown to FILE; without FILE, instead of the terminal's table",
    )  # fmt: skip
    report.add_argument("--figures", metavar="DIR", type=Path, help="write every figure as SVG and PNG into DIR")
    report.add_argument("--paper", action="store_true", help="show the paper's values too, labelled with their device")
    report.add_argument("--output", metavar="FILE", type=Path, help="write to FILE instead of the standard output")
    report.set_defaults(command=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """`report`."""
    from pytest_klineage.report.assemble import assemble
    from pytest_klineage.report.collect import collect

    material = collect([run_path(name) for name in arguments.runs])
    pages = arguments.html is not None or arguments.figures is not None
    alone = _only_run(material)
    if alone is not None and not pages and not arguments.paper:
        _write_run(alone, arguments)
        return OK
    report = assemble(material, beside_paper=arguments.paper)
    images = _draw(report, arguments) if arguments.figures is not None else {}
    if arguments.html is not None:
        from pytest_klineage.report.html import html_report

        write_to(arguments.html, html_report(report, __version__, images))
    if arguments.markdown is not None:
        from pytest_klineage.report.markdown import markdown_document

        _emit(markdown_document(report, _links(images, arguments)), arguments)
    if arguments.html is None and arguments.markdown is None and arguments.figures is None:
        _emit(_terminal(material, report), arguments)
    else:
        _complain(report.problems)
    return OK


def _only_run(material: Material) -> Run | None:
    """The run, when it is all there is to tell; what could not be read of it becomes its warnings."""
    import msgspec

    if len(material.runs) != 1 or material.trajectories or material.lineages or material.cards:
        return None
    run = material.runs[0]
    warnings = tuple(_problem_text(problem) for problem in material.problems)
    return msgspec.structs.replace(run, warnings=(*run.warnings, *warnings))


def _write_run(run: Run, arguments: argparse.Namespace) -> None:
    from pytest_klineage.report.tables import markdown_report, terminal_report

    _emit(markdown_report(run) if arguments.markdown is not None else terminal_report(run), arguments)


def _terminal(material: Material, report: Report) -> str:
    from pytest_klineage.report.tables import terminal_report

    parts = [terminal_report(run) for run in material.runs]
    lines = [f"{line.what}: {line.value} ({line.rests_on})" for line in report.summary]
    lines += [f"warning: {_problem_text(problem)}" for problem in report.problems]
    lines.append("more: the same with --html FILE, --markdown or --figures DIR")
    return "\n".join([*parts, "\n".join(lines) + "\n"])


def _draw(report: Report, arguments: argparse.Namespace) -> Mapping[str, Path]:
    from pytest_klineage.report.figures import draw

    return draw([figure for section in report.sections for figure in section.figures], arguments.figures)


def _links(images: Mapping[str, Path], arguments: argparse.Namespace) -> dict[str, str]:
    """Paths of figures as the document has to write them."""
    target = arguments.output if arguments.markdown == STANDARD_OUTPUT else Path(arguments.markdown)
    folder = target.parent if target is not None else Path()
    return {key: Path(os.path.relpath(path, folder)).as_posix() for key, path in images.items()}


def _emit(text: str, arguments: argparse.Namespace) -> None:
    """Write Markdown or a table to where it was asked for."""
    own = arguments.markdown not in (None, STANDARD_OUTPUT)
    write_to(Path(arguments.markdown) if own else arguments.output, text)


def _problem_text(problem: UnreadableInput) -> str:
    return f"{problem.where}: {problem.what}; {problem.next_step}"


def _complain(problems: Sequence[UnreadableInput]) -> None:
    sys.stderr.write("".join(f"pytest-klineage: warning: {_problem_text(problem)}\n" for problem in problems))
