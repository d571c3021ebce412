"""`pytest-klineage lineage`: list, show, walk, make, verify and outline lineages. Only `make` and `outline` write.

Lines have at most 100 columns, save code and paths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.cli.console import FAILED, OK, Commands, add_group, say, say_all, say_table, write_files, write_to
from pytest_klineage.cli.making import add_make
from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.report.text import counted, shortened, wrapped

if TYPE_CHECKING:
    from pytest_klineage.records import Edit, Lineage, LineageState, Rejection, Transition

RETIME = "pytest suites/lineage/test_retime.py --platform cpu --for 10   (on a quiet machine)"
EXPERTS = Path("experts")
EXIT_CODES = """\
exit codes:
  0  done; for make: walked to the naive kernel; for verify: every lineage holds together
  1  for make: the walk ended before; for verify: a file, an edit, a verdict or a digest does not fit
  2  the command line, or what it names, is not valid
  8  for make: a prompt waits for its reply; the same command goes on
"""
HEADERS = ("", "adds", "lines", "ms", "speedup", "status", "step", "refused")


def add_lineage(commands: Commands) -> None:
    """Add the command `lineage` with its own commands."""
    actions = add_group(commands, "lineage", "show, walk, make and verify lineages of kernels", EXIT_CODES)
    listing = actions.add_parser("list", help="which lineages there are, and how they ended")
    listing.set_defaults(command=run_list)

    show = actions.add_parser("show", help="the states of a lineage with their times, or the files of one of them")
    show.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    show.add_argument("state", metavar="STATE", nargs="?", type=int, help="print the files of this state; 0 is naive")
    show.add_argument("--output", metavar="DIR", type=Path, help="write them there instead")
    show.add_argument("--rejected", action="store_true", help="list what was proposed and refused, with the reasons")
    show.set_defaults(command=run_show)

    walk = actions.add_parser("walk", help="go from the naive kernel to the expert's, step by step")
    walk.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    walk.add_argument("step", metavar="STEP", nargs="?", type=int, help="show this step alone, with its edit")
    walk.add_argument("--backward", action="store_true", help="the simplification, as it was proposed")
    walk.add_argument("--rederived", action="store_true", help="the forward edit as it was re-derived")
    walk.set_defaults(command=run_walk)

    add_make(actions, EXPERTS)
    verify = actions.add_parser("verify", help="check files, edits, verdicts and digests")
    verify.add_argument("names", metavar="LINEAGE", nargs="*", help="names or folders; all lineages without any")
    verify.set_defaults(command=run_verify)
    outline = actions.add_parser("outline", help="write what was found without the text of kernels that are not yours")
    outline.add_argument("name", metavar="LINEAGE", help="its name, such as gemm/cpu-cpp, or its folder")
    outline.add_argument("--output", metavar="DIR", type=Path, required=True, help="where; such a folder can be shown")
    outline.set_defaults(command=run_outline)
    for action in (listing, show, walk, verify, outline):
        action.add_argument(
            "--experts", metavar="DIR", type=Path, default=EXPERTS, help="where lineages are; default: experts"
        )


def run_show(arguments: argparse.Namespace) -> int:
    """`lineage show`."""
    from pytest_klineage.lab.library.lineages import read_timed

    if arguments.state is not None:
        return _show_state(_folder(arguments.experts, arguments.name), arguments.state, arguments.output)
    if arguments.output is not None:
        raise UsageError("--output is for the files of one state: name the state as well")
    lineage = read_timed(_folder(arguments.experts, arguments.name))
    say(f"{lineage.name}: {lineage.case.id}, {counted(len(lineage.states), 'state')}\n")
    say_table(HEADERS, list(_rows(lineage)))
    ended = f"ended: {lineage.termination.value}: {lineage.termination_reason}"
    say_all(("", *wrapped(ended), *wrapped(f"digest: {lineage.digest}")))
    if arguments.rejected:
        say_all(_rejected_lines(lineage))
    return OK


def _show_state(folder: Path, index: int, output: Path | None) -> int:
    from pytest_klineage.lab.library.lineages import load_lineage, verify_lineage

    stored = load_lineage(folder)
    verify_lineage(stored)
    if not 0 <= index < len(stored.sources):
        raise UsageError(f"{stored.lineage.name} has the states 0 to {len(stored.sources) - 1}, not {index}")
    files = [(file.name, file.text) for file in stored.sources[index].files]
    if output is None:
        write_to(None, "".join(text for _, text in files))
    else:
        say_all(map(str, write_files(output, files)))
    return OK


def run_list(arguments: argparse.Namespace) -> int:
    """`lineage list`."""
    from pytest_klineage.lab.library.lineages import read_record

    for folder in _all_folders(arguments.experts):
        lineage = read_record(folder)
        steps = counted(len(lineage.transitions), "step")
        say_all(wrapped(f"{_named(lineage, folder)}: {lineage.case.id}, {steps}, {lineage.termination.value}"))
    return OK


def run_walk(arguments: argparse.Namespace) -> int:
    """`lineage walk`."""
    from pytest_klineage.lab.library.lineages import read_timed

    folder = _folder(arguments.experts, arguments.name)
    lineage = read_timed(folder)
    count = len(lineage.transitions)
    if arguments.step is None:
        if arguments.backward or arguments.rederived:
            raise UsageError("--backward and --rederived show the edit of one step: name the step as well")
        lines = _whole_walk(lineage, folder)
    elif 1 <= arguments.step <= count:
        lines = _one_step(lineage, folder, arguments.step, _chosen_edit(arguments, lineage))
    else:
        raise UsageError(f"{lineage.name} has the steps 1 to {count}, not {arguments.step}")
    say_all(lines)
    return OK


def run_verify(arguments: argparse.Namespace) -> int:
    """`lineage verify`."""
    from pytest_klineage.errors import BadRecord
    from pytest_klineage.lab.library.lineages import all_problems_of, load_lineage, read_record
    from pytest_klineage.lab.library.outlines import is_outline, read_outline
    from pytest_klineage.results.retimed import read_retimed, refused_effects

    folders = [_folder(arguments.experts, name) for name in arguments.names] or _all_folders(arguments.experts)
    broken = 0
    for folder in folders:
        refused: list[str] = []
        try:
            lineage = read_record(folder)
            if is_outline(lineage):
                lineage, problems = read_outline(folder), []
            else:
                problems = all_problems_of(load_lineage(folder))
            refused = list(refused_effects(lineage, read_retimed(folder)))
        except BadRecord as error:
            problems = [str(error)]
        broken += bool(problems)
        states = "" if problems else f"holds together: {counted(len(lineage.states), 'state')}"
        say_all(wrapped(f"{folder}: {states or counted(len(problems), 'problem')}"))
        say_all(part for text in (*problems, *refused) for part in wrapped(f"  {text}"))
        if refused:
            say(f"  next: {RETIME}")
    return FAILED if broken else OK


def run_outline(arguments: argparse.Namespace) -> int:
    """`lineage outline`."""
    from pytest_klineage.lab.library.lineages import load_lineage
    from pytest_klineage.lab.library.outlines import write_outline

    outline = write_outline(load_lineage(_folder(arguments.experts, arguments.name)), arguments.output)
    steps, judged = outline.transitions, sum(step.forward_verdict is not None for step in outline.transitions)
    say_all(wrapped(f"{arguments.output}: {counted(len(steps), 'step')}, {judged} brought back, no text of a kernel"))
    return OK


def _whole_walk(lineage: Lineage, folder: Path) -> Iterator[str]:
    """Every state and every step in a few lines, naive first."""
    count = len(lineage.transitions)
    yield f"{lineage.name}: {lineage.case.id}, {counted(count, 'step')} from {lineage.states[0].name} to the expert"
    yield ""
    yield _state_line(lineage, folder, 0)
    for number in range(1, count + 1):
        yield ""
        yield from _step_lines(lineage, number)
        yield ""
        yield _state_line(lineage, folder, number)
    yield ""
    yield from wrapped(f"ended: {lineage.termination.value}: {lineage.termination_reason}")
    if count:
        yield f"next: pytest-klineage lineage walk {_named(lineage, folder)} 1   (a step with its edit)"


def _one_step(lineage: Lineage, folder: Path, number: int, edit: Edit) -> Iterator[str]:
    """A step between its two states, what was refused there, and an edit."""
    step = lineage.transitions[number - 1]
    yield _state_line(lineage, folder, number - 1)
    yield ""
    yield from _step_lines(lineage, number)
    timing = step.forward_verdict.timing if step.forward_verdict is not None else None
    if step.rederived is not None and timing is not None:
        from pytest_klineage.lab.library.rendering import speedup_text

        speed = speedup_text(timing.speedup)
        yield from wrapped(f"  re-derived: from the simpler kernel alone, other text, {speed} of the state's speed")
    for rejection in step.rejected:
        yield from wrapped(f"  {_rejection(rejection)}")
    yield ""
    yield _state_line(lineage, folder, number)
    yield ""
    yield from _edit_lines(edit)


def _chosen_edit(arguments: argparse.Namespace, lineage: Lineage) -> Edit:
    number: int = arguments.step
    step = lineage.transitions[number - 1]
    if arguments.rederived and step.rederived is not None:
        return step.rederived.edit
    if arguments.backward and step.backward is None:
        raise UsageError(f"{lineage.name} is hand-made and has no simplifications; show the step without --backward")
    return step.backward if arguments.backward and step.backward is not None else step.forward


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
    took = f", {state.timing.candidate_ms:.4g} ms" if state.timing is not None else ""
    missing = ", not judged" if state.verdict is None else ""
    return f"{index:02d} {state.name}{took}{missing}: pytest-klineage lineage show {_named(lineage, folder)} {index}"


def _step_lines(lineage: Lineage, number: int) -> Iterator[str]:
    step = lineage.transitions[number - 1]
    effect = f": {_effect(step)}" if step.effect is not None else ""
    refused = f", {len(step.rejected)} refused" if step.rejected else ""
    yield from wrapped(f"step {number} of {len(lineage.transitions)} adds {step.category.value}{effect}{refused}")
    yield from wrapped(f"  where: {step.locus}")
    yield from wrapped(f"  what: {step.intent}")


def _rows(lineage: Lineage) -> Iterator[list[str]]:
    for index, state in enumerate(lineage.states):
        transition = lineage.transitions[index - 1] if 0 < index <= len(lineage.transitions) else None
        timing = state.timing
        refused = len(transition.rejected) if transition is not None else len(lineage.rejected)
        yield [
            f"{index:02d}",
            shortened(transition.category.value if transition is not None else state.name, 20),
            _lines(transition),
            f"{timing.candidate_ms:.4g}" if timing is not None else "-",
            _over_reference(state),
            state.verdict.status.value if state.verdict is not None else "not judged",
            _effect(transition),
            str(refused) if refused else "-",
        ]


def _over_reference(state: LineageState) -> str:
    """The speedup over the case's reference. Against another state it would be the next row's step, turned around."""
    if state.verdict is None or state.timing is None or "digest" in state.verdict.reference:
        return "-"
    return f"{state.timing.speedup.estimate:.3g}x"


def _lines(transition: Transition | None) -> str:
    from pytest_klineage.records import EditKind
    from pytest_klineage.records.edits import changed_lines

    if transition is None or transition.forward.kind is EditKind.DIGEST:
        return "-"
    removed, added = changed_lines(transition.forward)
    return f"+{added} -{removed}"


def _effect(transition: Transition | None) -> str:
    from pytest_klineage.lab.library.rendering import speedup_text

    if transition is None or transition.effect is None:
        return "-"
    return speedup_text(transition.effect)


def _rejected_lines(lineage: Lineage) -> Iterator[str]:
    positions = [("before the first state", lineage.rejected)]
    positions += [(f"at step {number}", step.rejected) for number, step in enumerate(lineage.transitions, start=1)]
    for position, rejections in positions:
        for rejection in rejections:
            yield ""
            yield from wrapped(f"{position}: {_rejection(rejection)}")


def _rejection(rejection: Rejection) -> str:
    what = "re-derivation" if rejection.forward else "simplification"
    code = f" ({rejection.code.value})" if rejection.code is not None else ""
    return f"{what} refused, {rejection.category.value} in {rejection.locus}: {rejection.reason}{code}"


def _folder(experts: Path, name: str) -> Path:
    """A lineage's folder by its name below experts/, or by its path."""
    from pytest_klineage.lab.library.lineages import FOLDER, HAND_MADE, LINEAGE_FILE

    inner = (Path(name), *(root / name / kind for root in (Path(), experts) for kind in (FOLDER, HAND_MADE)))
    for folder in inner:
        if (folder / LINEAGE_FILE).is_file():
            return folder
    raise UnknownName("lineage", name, ["/".join(found.parts[-3:-1]) for found in _all_folders(experts)])


def _all_folders(experts: Path) -> list[Path]:
    """Folders of all lineages, those by walks first. Raises UsageError without one."""
    from pytest_klineage.lab.library.lineages import find_all

    folders = find_all(experts)
    if not folders:
        raise UsageError(f"there is no lineage in {experts}; say where they are with --experts")
    return folders


def _named(lineage: Lineage, folder: Path) -> str:
    """What a lineage is called on the command line: its name below experts/, its folder elsewhere.

    A name that a walk and an author share is the walk's.
    """
    below = folder.parts[-4:-1] == (EXPERTS.name, *lineage.folder.split("/"))
    return lineage.name if below and _folder(folder.parents[2], lineage.folder) == folder else str(folder)
