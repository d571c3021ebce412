"""`pytest-klineage lineage`: show and verify the lineages on disk, in at most 100 columns. Nothing is changed."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from pytest_klineage.records import Lineage, Rejection, Transition

OK, FAILED = 0, 1
WIDTH = 100
EXPERTS = Path("experts")
EXIT_CODES = """\
exit codes:
  0  done; for verify: every lineage holds together
  1  for verify: a file, an edit, a verdict or a digest does not fit
  2  the command line, or what it names, is not valid
"""
HEADERS = ("", "adds", "lines", "ms", "speedup", "status", "step", "refused")


def add_lineage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `lineage` with its own commands."""
    lineage = commands.add_parser(
        "lineage", help="show and verify lineages of kernels", epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    actions = lineage.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the states of a lineage with their times, and what was refused")
    show.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    show.add_argument("--rejected", action="store_true", help="list what was proposed and refused, with the reasons")
    show.set_defaults(command=run_show)

    verify = actions.add_parser("verify", help="check files, edits, verdicts and digests")
    verify.add_argument("names", metavar="LINEAGE", nargs="*", help="names or folders; all lineages without any")
    verify.set_defaults(command=run_verify)
    for action in (show, verify):
        action.add_argument(
            "--experts", metavar="DIR", type=Path, default=EXPERTS, help="where lineages are; default: experts"
        )


def run_show(arguments: argparse.Namespace) -> int:
    """`lineage show`."""
    from tabulate import tabulate

    from pytest_klineage.library.lineages import read_record

    lineage = read_record(_folder(arguments.experts, arguments.name))
    rows = list(_rows(lineage))
    rule = ["-" * max(len(row[column]) for row in (HEADERS, *rows)) for column in range(len(HEADERS))]
    table = tabulate([HEADERS, rule, *rows], tablefmt="plain", disable_numparse=True)
    _say(f"{lineage.name}: {lineage.case.id}, {_counted(len(lineage.states), 'state')}\n\n")
    _say("".join(f"{line.rstrip()[:WIDTH].rstrip()}\n" for line in table.splitlines()))
    ended = f"ended: {lineage.termination.value}: {lineage.termination_reason}"
    for line in ("", *_wrapped(ended), *_wrapped(f"digest: {lineage.digest}")):
        _say(f"{line}\n")
    if arguments.rejected:
        _say("".join(f"{line}\n" for line in _rejected_lines(lineage)))
    return OK


def run_verify(arguments: argparse.Namespace) -> int:
    """`lineage verify`."""
    from pytest_klineage.errors import BadRecord
    from pytest_klineage.library.lineages import find_lineages, load_lineage, problems_of

    folders = [_folder(arguments.experts, name) for name in arguments.names] or find_lineages(arguments.experts)
    if not folders:
        raise UsageError(f"there is no lineage in {arguments.experts}; say where they are with --experts")
    broken = 0
    for folder in folders:
        try:
            stored = load_lineage(folder)
            problems = problems_of(stored)
        except BadRecord as error:
            problems = [str(error)]
        broken += bool(problems)
        states = "" if problems else f"holds together: {_counted(len(stored.sources), 'state')}"
        found = states or _counted(len(problems), "problem")
        for line in (*_wrapped(f"{folder}: {found}"), *(part for text in problems for part in _wrapped(f"  {text}"))):
            _say(f"{line}\n")
    return FAILED if broken else OK


def _rows(lineage: Lineage) -> Iterator[list[str]]:
    for index, state in enumerate(lineage.states):
        transition = lineage.transitions[index - 1] if 0 < index <= len(lineage.transitions) else None
        timing = state.verdict.timing
        refused = len(transition.rejected) if transition is not None else len(lineage.rejected)
        yield [
            f"{index:02d}",
            _shortened(transition.category.value if transition is not None else state.name),
            _lines(transition),
            f"{timing.candidate_ms:.4g}" if timing is not None else "-",
            f"{timing.speedup.estimate:.3g}x" if timing is not None else "-",
            state.verdict.status.value,
            _effect(transition),
            str(refused) if refused else "-",
        ]


def _lines(transition: Transition | None) -> str:
    from pytest_klineage.library.edits import changed_lines

    if transition is None:
        return "-"
    removed, added = changed_lines(transition.forward)
    return f"+{added} -{removed}"


def _effect(transition: Transition | None) -> str:
    from pytest_klineage.library.rendering import speedup_text

    if transition is None or transition.effect is None:
        return "-"
    return speedup_text(transition.effect)


def _rejected_lines(lineage: Lineage) -> Iterator[str]:
    places = [("before the first state", lineage.rejected)]
    places += [(f"at step {number}", step.rejected) for number, step in enumerate(lineage.transitions, start=1)]
    for place, rejections in places:
        for rejection in rejections:
            yield ""
            yield from _wrapped(f"{place}: {_rejection(rejection)}")


def _rejection(rejection: Rejection) -> str:
    what = "re-derivation" if rejection.forward else "simplification"
    code = f" ({rejection.code.value})" if rejection.code is not None else ""
    return f"{what} refused, {rejection.category.value} in {rejection.locus}: {rejection.reason}{code}"


def _folder(experts: Path, name: str) -> Path:
    """A lineage's folder by its name below experts/, or by its path."""
    from pytest_klineage.library.lineages import FOLDER, LINEAGE_FILE, find_lineages

    for folder in (Path(name), Path(name) / FOLDER, experts / name / FOLDER):
        if (folder / LINEAGE_FILE).is_file():
            return folder
    raise UnknownName("lineage", name, ["/".join(found.parts[-3:-1]) for found in find_lineages(experts)])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(text: str, size: int = 20) -> str:
    return text if len(text) <= size else text[: size - 2] + ".."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _say(text: str) -> None:
    sys.stdout.write(text)
