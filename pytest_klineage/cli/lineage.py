"""`pytest-klineage lineage`: list, show, walk and verify the lineages on disk. Nothing is changed.

Lines have at most 100 columns, save code and paths.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from pytest_klineage.records import Edit, Lineage, LineageState, Rejection, Transition

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
        "lineage", help="show, walk and verify lineages of kernels", epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    actions = lineage.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="which lineages there are, and how they ended")
    listing.set_defaults(command=run_list)

    show = actions.add_parser("show", help="the states of a lineage with their times, and what was refused")
    show.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    show.add_argument("--rejected", action="store_true", help="list what was proposed and refused, with the reasons")
    show.set_defaults(command=run_show)

    walk = actions.add_parser("walk", help="go from the naive kernel to the expert's, step by step")
    walk.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    walk.add_argument("step", metavar="STEP", nargs="?", type=int, help="show this step alone, with its edit")
    walk.add_argument("--backward", action="store_true", help="the simplification, as it was proposed")
    walk.add_argument("--rederived", action="store_true", help="the forward edit as it was re-derived")
    walk.set_defaults(command=run_walk)

    verify = actions.add_parser("verify", help="check files, edits, verdicts and digests")
    verify.add_argument("names", metavar="LINEAGE", nargs="*", help="names or folders; all lineages without any")
    verify.set_defaults(command=run_verify)
    for action in (listing, show, walk, verify):
        action.add_argument(
            "--experts", metavar="DIR", type=Path, default=EXPERTS, help="where lineages are; default: experts"
        )


def run_show(arguments: argparse.Namespace) -> int:
    """`lineage show`."""
    from tabulate import tabulate

    from pytest_klineage.lab.library.lineages import read_record

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


def run_list(arguments: argparse.Namespace) -> int:
    """`lineage list`."""
    from pytest_klineage.lab.library.lineages import find_lineages, read_record

    folders = find_lineages(arguments.experts)
    if not folders:
        raise UsageError(f"there is no lineage in {arguments.experts}; say where they are with --experts")
    for folder in folders:
        lineage = read_record(folder)
        steps = _counted(len(lineage.transitions), "step")
        for line in _wrapped(f"{lineage.name}: {lineage.case.id}, {steps}, {lineage.termination.value}"):
            _say(f"{line}\n")
    return OK


def run_walk(arguments: argparse.Namespace) -> int:
    """`lineage walk`."""
    from pytest_klineage.lab.library.lineages import read_record

    folder = _folder(arguments.experts, arguments.name)
    lineage = read_record(folder)
    count = len(lineage.transitions)
    if arguments.step is None:
        if arguments.backward or arguments.rederived:
            raise UsageError("--backward and --rederived show the edit of one step: name the step as well")
        lines = _whole_walk(lineage, folder)
    elif 1 <= arguments.step <= count:
        lines = _one_step(lineage, folder, arguments.step, _chosen_edit(arguments, lineage))
    else:
        raise UsageError(f"{lineage.name} has the steps 1 to {count}, not {arguments.step}")
    for line in lines:
        _say(f"{line}\n")
    return OK


def run_verify(arguments: argparse.Namespace) -> int:
    """`lineage verify`."""
    from pytest_klineage.errors import BadRecord
    from pytest_klineage.lab.library.lineages import find_lineages, load_lineage, problems_of

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


def _whole_walk(lineage: Lineage, folder: Path) -> Iterator[str]:
    """Every state and every step in a few lines, naive first."""
    count = len(lineage.transitions)
    yield f"{lineage.name}: {lineage.case.id}, {_counted(count, 'step')} from {lineage.states[0].name} to the expert"
    yield ""
    yield _state_line(lineage, folder, 0)
    for number in range(1, count + 1):
        yield ""
        yield from _step_lines(lineage, number)
        yield ""
        yield _state_line(lineage, folder, number)
    yield ""
    yield from _wrapped(f"ended: {lineage.termination.value}: {lineage.termination_reason}")
    if count:
        yield f"next: pytest-klineage lineage walk {lineage.name} 1   (a step with its edit)"


def _one_step(lineage: Lineage, folder: Path, number: int, edit: Edit) -> Iterator[str]:
    """A step between its two states, what was refused there, and an edit."""
    step = lineage.transitions[number - 1]
    yield _state_line(lineage, folder, number - 1)
    yield ""
    yield from _step_lines(lineage, number)
    timing = step.forward_verdict.timing
    if step.rederived is not None and timing is not None:
        from pytest_klineage.lab.library.rendering import speedup_text

        speed = speedup_text(timing.speedup)
        yield from _wrapped(f"  re-derived: from the simpler kernel alone, other text, {speed} of the state's speed")
    for rejection in step.rejected:
        yield from _wrapped(f"  {_rejection(rejection)}")
    yield ""
    yield _state_line(lineage, folder, number)
    yield ""
    yield from _edit_lines(edit)


def _chosen_edit(arguments: argparse.Namespace, lineage: Lineage) -> Edit:
    number: int = arguments.step
    step = lineage.transitions[number - 1]
    if arguments.rederived and step.rederived is not None:
        return step.rederived.edit
    return step.backward if arguments.backward else step.forward


def _edit_lines(edit: Edit) -> Iterator[str]:
    yield from edit.diff.splitlines()
    for block in edit.blocks:
        yield f"<<<<<<< SEARCH {block.file}"
        yield from block.search.splitlines()
        yield "======="
        yield from block.replace.splitlines()
        yield ">>>>>>> REPLACE"


def _state_line(lineage: Lineage, folder: Path, index: int) -> str:
    state = lineage.states[index]
    timing = state.verdict.timing
    took = f", {timing.candidate_ms:.4g} ms" if timing is not None else ""
    return f"{index:02d} {state.name}{took}: {folder / state.files[0].path}"


def _step_lines(lineage: Lineage, number: int) -> Iterator[str]:
    step = lineage.transitions[number - 1]
    effect = f": {_effect(step)}" if step.effect is not None else ""
    refused = f", {len(step.rejected)} refused on the way" if step.rejected else ""
    yield from _wrapped(f"step {number} of {len(lineage.transitions)} adds {step.category.value}{effect}{refused}")
    yield from _wrapped(f"  where: {step.locus}")
    yield from _wrapped(f"  what: {step.intent}")


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
            _over_reference(state),
            state.verdict.status.value,
            _effect(transition),
            str(refused) if refused else "-",
        ]


def _over_reference(state: LineageState) -> str:
    """The speedup over the case's reference. Against another state it would be the next row's step, turned around."""
    timing = state.verdict.timing
    if timing is None or "digest" in state.verdict.reference:
        return "-"
    return f"{timing.speedup.estimate:.3g}x"


def _lines(transition: Transition | None) -> str:
    from pytest_klineage.lab.library.edits import changed_lines

    if transition is None:
        return "-"
    removed, added = changed_lines(transition.forward)
    return f"+{added} -{removed}"


def _effect(transition: Transition | None) -> str:
    from pytest_klineage.lab.library.rendering import speedup_text

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
    from pytest_klineage.lab.library.lineages import FOLDER, LINEAGE_FILE, find_lineages

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
