"""Outlines of lineages from kernels that are not ours: what was found, without their text.

FOLDER/
    lineage.json              the Lineage record; each edit is its digest, each verdict without samples
    verdicts.jsonl.gz         all verdicts on states and attempts, with samples
    spans.verdicts.jsonl.gz   neighbouring steps that were timed together

Of a verdict only what the gate measured and decided is left: compilers quote source, and profiles name its functions.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.lineages import (
    KEPT,
    LINEAGE_FILE,
    OUTLINE,
    BrokenLineage,
    StoredLineage,
    read_record,
    verify_lineage,
)
from pytest_klineage.records import (
    Edit,
    EditKind,
    Lineage,
    Reason,
    Rejection,
    TimedSpan,
    Transition,
    Verdict,
    content_digest,
)
from pytest_klineage.records.codec import finite_json
from pytest_klineage.records.lineage import inverse
from pytest_klineage.results.packed import line_files, packed, read_lines
from pytest_klineage.results.spans import SPANS_FILE
from pytest_klineage.results.storage import outlined_json, write_atomically

VERDICTS = "verdicts.jsonl"
UNUSABLE = "the reply could not be used"
LEFT = ("case", "status", "surface", "source_digest", "label", "machine", "checks", "floor", "reference", "judged_at")
"""Fields of a verdict that an outline has as they are."""


def write_outline(stored: StoredLineage, folder: Path) -> Lineage:
    """Verify a lineage and write its outline. Raises BrokenLineage, BadRecord, or UsageError if writing fails."""
    verify_lineage(stored)
    lines = [path for pattern in ("verdicts", f"{KEPT}/*verdicts") for path in line_files(stored.directory, pattern)]
    verdicts = [said_of(verdict) for path in lines for verdict in read_lines(path, Verdict)]
    spans = read_lines(stored.directory / SPANS_FILE, TimedSpan)
    outline = outline_of(stored.lineage)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / LINEAGE_FILE, outlined_json(outline, OUTLINE))
        _write_lines(folder / VERDICTS, verdicts)
        _write_lines(folder / SPANS_FILE, [msgspec.structs.replace(one, verdict=said_of(one.verdict)) for one in spans])
    except OSError as error:
        raise UsageError(f"the outline {folder} cannot be written: {error.strerror or error}") from error
    return outline


def _write_lines(path: Path, records: Sequence[msgspec.Struct]) -> None:
    data = b"".join(finite_json(record) + b"\n" for record in records)
    write_atomically(packed(path), gzip.compress(data, mtime=0))


def read_outline(folder: Path) -> Lineage:
    """The outline of a folder. Raises UsageError without one, BadRecord, or BrokenLineage with all that is wrong."""
    outline = read_record(folder)
    problems = list(_problems(outline, read_lines(folder / VERDICTS, Verdict)))
    if problems:
        raise BrokenLineage(f"{folder}: {'; '.join(problems)}")
    return outline


def _problems(outline: Lineage, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Text that is somebody else's, and effects or kernels that no verdict beside the record speaks of."""
    if outline != outline_of(outline):
        yield "it has more of the kernels than an outline has"
    if verdicts != [said_of(verdict) for verdict in verdicts]:
        yield f"{VERDICTS} has more of the kernels than an outline has"
    digests, steps = [state.source_digest for state in outline.states], outline.transitions
    if [(step.before, step.after) for step in steps] != list(pairwise(digests)):
        yield "its steps do not lead from state to state"
    digests += [digest for step in steps for digest in (step.digest, step.forward.diff)]
    yield from (f"{digest!r} is no digest" for digest in (*digests, outline.digest) if not is_hex(digest))
    measured = {(one.source_digest, inverse(one.timing.speedup)) for one in verdicts if one.timing is not None}
    judged = {one.source_digest for one in verdicts if one.ranked}
    for number, step in enumerate(steps, start=1):
        if step.effect is not None and (step.before, step.effect) not in measured:
            yield f"step {number}: no verdict has its effect"
        if step.forward_verdict is not None and step.forward_digest not in judged:
            yield f"step {number}: no verdict says that the re-derived kernel is right"


def is_hex(digest: str) -> bool:
    """Whether a text is a SHA-256 in hexadecimal."""
    return re.fullmatch("[0-9a-f]{64}", digest) is not None


def is_outline(lineage: Lineage) -> bool:
    """Whether a record has digests in the place of edits."""
    return any(step.forward.kind is EditKind.DIGEST for step in lineage.transitions)


def outline_of(lineage: Lineage) -> Lineage:
    """The record without the text of edits, what compilers said, and samples. Its digests are those of the whole."""
    states = tuple(msgspec.structs.replace(state, verdict=_brief(state.verdict)) for state in lineage.states)
    return msgspec.structs.replace(
        lineage, states=states, transitions=tuple(map(_step, lineage.transitions)),
        rejected=tuple(map(_refusal, lineage.rejected)),
    )  # fmt: skip


def _step(step: Transition) -> Transition:
    rederived = step.rederived
    if rederived is not None:
        rederived = msgspec.structs.replace(rederived, edit=digest_of(rederived.edit))
    return msgspec.structs.replace(
        step, forward=digest_of(step.forward), backward=digest_of(step.backward) if step.backward is not None else None,
        rederived=rederived, forward_verdict=_brief(step.forward_verdict), rejected=tuple(map(_refusal, step.rejected)),
    )  # fmt: skip


def _refusal(refused: Rejection) -> Rejection:
    code = refused.code
    return msgspec.structs.replace(
        refused, edit=digest_of(refused.edit) if refused.edit is not None else None,
        reason=code.value if code is not None else UNUSABLE, verdict=_brief(refused.verdict),
    )  # fmt: skip


def digest_of(edit: Edit) -> Edit:
    """The edit by its digest alone."""
    digest = edit.diff if edit.kind is EditKind.DIGEST else content_digest(edit)
    return Edit(kind=EditKind.DIGEST, diff=digest)


def said_of(verdict: Verdict) -> Verdict:
    """What the gate measured and decided: no messages, logs, names of functions, or files."""
    reasons = tuple(Reason(code=one.code, message=one.code.value, evidence=_figures(one)) for one in verdict.reasons)
    left = {name: getattr(verdict, name) for name in LEFT}
    return Verdict(reasons=reasons, timing=verdict.timing, **left)


def _figures(reason: Reason) -> dict[str, float | int | str | bool]:
    return {name: value for name, value in reason.evidence.items() if not isinstance(value, str)}


def _brief(verdict: Verdict | None) -> Verdict | None:
    """The same without samples, which lie in the file of verdicts."""
    if verdict is None or verdict.timing is None:
        return verdict and said_of(verdict)
    timing = msgspec.structs.replace(verdict.timing, reference_samples_ms=(), candidate_samples_ms=())
    return said_of(msgspec.structs.replace(verdict, timing=timing))
