"""The steps of a lineage that an author wrote, validated: each is judged, and brought back by a model.

There is no walk, so no step waits for another: every step has a trajectory of its own, and all of them go forward
together where verdicts and replies come from elsewhere.

experts/<operator>/<platform>-<surface>/stages/
    lineage.json              takes up effect, verdict and refused attempts of a step that is done
    derived/01.jsonl          every prompt, reply and charge of the first step; see lab.llm
    derived/01.verdicts.jsonl its verdicts
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec

from pytest_klineage.errors import StoreError, UsageError, WaitsForVerdict
from pytest_klineage.lab.induction.prompts import filled
from pytest_klineage.lab.induction.rederive import Rederived, Rederiver
from pytest_klineage.lab.induction.replies import Simplification
from pytest_klineage.lab.induction.verdicts import VERDICTS_FILE, Judge, Judging, LiveJudging, VerdictFile
from pytest_klineage.lab.induction.walk import LEAST
from pytest_klineage.lab.library.lineages import KEPT, RIGHT, StoredLineage, edit_between, load_lineage, save_lineage
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.recording import open_chat
from pytest_klineage.records import KernelSource, Rederivation, Stopped, Transition, Verdict
from pytest_klineage.records.edits import invert_edit
from pytest_klineage.records.lineage import inverse

ATTEMPTS = 3
"""Replies to one step, the first and two repairs: as many as a walk allows."""
MAX_OUTPUT_TOKENS = 24_000
DONE = "derived"
HEADER = re.compile(r"\A(?://[^\n]*\n|\s*\n)+")
"""Comments before the first line of code: where our authors list techniques, risks and predictions."""


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one step."""

    verdict: Verdict
    """Of the simpler state, timed against the next one."""
    forward: Rederived


def derive(
    directory: Path, index: int, session: Session, judge: Judge, *, contract: str
) -> Derived:  # fmt: skip
    """Judge step `index` of the lineage in `directory` and have it re-derived; then keep both there.

    The verdict on the step and the first prompt are asked for in one turn. Raises Waiting where a verdict or a reply
    has not come, and UsageError when the simpler state is not right here.
    """
    trajectory = session.trajectory.path
    file = VerdictFile(trajectory.with_name(f"{trajectory.stem}.{VERDICTS_FILE}"))
    found = _derived(load_lineage(directory), index, session, LiveJudging(session, file, judge), contract)
    session.record(Stopped(reason=DONE, message=found.forward.last_reason))
    _keep(directory, index, trajectory, file.path)
    take_up(directory, index, found)
    return found


def _derived(stored: StoredLineage, index: int, session: Session, judging: Judging, contract: str) -> Derived:
    chat = open_chat(session, "rederive", system=filled("rederive-system"), context=(contract,))
    chat.max_output_tokens = MAX_OUTPUT_TOKENS
    case = msgspec.structs.replace(stored.lineage.case, at_least=LEAST)
    before, after = stored.sources[index], stored.sources[index + 1]
    waits: WaitsForVerdict | None = None
    verdict: Verdict | None = None
    try:
        verdict = judging(case, before, after)
    except WaitsForVerdict as error:
        waits = error
    forward = Rederiver(chat, judging, attempts=ATTEMPTS).rederive(case, shown_step(stored, index), after)
    if verdict is None:
        raise waits or UsageError("no verdict came")
    if verdict.status not in RIGHT or verdict.timing is None:
        raise UsageError(f"{before.label} is not right here: {verdict.reasons[0].message}")
    return Derived(verdict=verdict, forward=forward)


def shown_step(stored: StoredLineage, index: int) -> Simplification:
    """A step as a model is shown it: the simpler kernel without what its author wrote above the code."""
    transition = stored.lineage.transitions[index]
    return Simplification(
        category=transition.category, locus=transition.locus, intent=transition.intent,
        source=without_header(stored.sources[index]),
    )  # fmt: skip


def without_header(source: KernelSource) -> KernelSource:
    """A kernel without the comments before its first line of code, in every file."""
    files = tuple(msgspec.structs.replace(file, text=HEADER.sub("", file.text)) for file in source.files)
    return msgspec.structs.replace(source, files=files)


def unnamed(source: KernelSource) -> KernelSource:
    """A state without its author's header; its first file is `kernel` in every state, whatever its author called it."""
    first, *more = without_header(source).files
    plain = msgspec.structs.replace(first, name=f"kernel{Path(first.name).suffix}")
    return msgspec.structs.replace(source, files=(plain, *more))


def take_up(directory: Path, index: int, found: Derived) -> StoredLineage:
    """Write what was found into the lineage: effect, verdicts, the re-derived edit, refused attempts."""
    stored = load_lineage(directory)
    lineage = stored.lineage
    steps = list(lineage.transitions)
    steps[index] = _with(steps[index], stored.sources[index], stored.sources[index + 1], found)
    changed = msgspec.structs.replace(lineage, transitions=tuple(steps))
    return save_lineage(directory, changed, stored.sources)


def _with(step: Transition, before: KernelSource, after: KernelSource, found: Derived) -> Transition:
    timing, made = found.verdict.timing, found.forward.source
    rederived = None
    if made is not None and made.digest != after.digest:
        rederived = Rederivation(edit=edit_between(before, made), source_digest=made.digest)
    return msgspec.structs.replace(
        step, effect=inverse(timing.speedup) if timing is not None else None, rederived=rederived,
        forward_verdict=found.forward.verdict, backward=invert_edit(step.forward) if made is not None else None,
        rejected=found.forward.rejected,
    )  # fmt: skip


def _keep(directory: Path, index: int, trajectory: Path, verdicts: Path) -> None:
    """Copy a step's files beside the lineage."""
    kept = directory / KEPT
    try:
        kept.mkdir(exist_ok=True)
        shutil.copyfile(trajectory, kept / f"{index + 1:02d}.jsonl")
        shutil.copyfile(verdicts, kept / f"{index + 1:02d}.{VERDICTS_FILE}")
    except OSError as error:
        raise StoreError(f"the trajectory cannot be kept in {kept}: {error.strerror or error}") from error
