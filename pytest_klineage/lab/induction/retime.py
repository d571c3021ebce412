"""Timing the steps of a lineage again, alone: the effect that counts; is a re-derived kernel better?"""

from __future__ import annotations

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import LEAST
from pytest_klineage.lab.library.lineages import RIGHT, StoredLineage, with_files
from pytest_klineage.records import KernelSource, Retimed, Verdict
from pytest_klineage.records.edits import apply_edit
from pytest_klineage.records.verdict import DISTURBED

BETTER = 1.05
"""Speed of a re-derived kernel over that of the state, from which on it stands in the state's place."""


class Disturbed(Exception):
    """A timing that says nothing of an effect: the machine was busy, or times were unstable."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.code.value}: {verdict.reasons[0].message}")


def retime(stored: StoredLineage, index: int, judge: Judge) -> Retimed:
    """Time one step again, and its re-derived kernel where that may be the better one.

    Raises Disturbed where a timing says nothing, UsageError where a kernel is not right here.
    """
    lineage, (before, after) = stored.lineage, stored.sources[index : index + 2]
    step = lineage.transitions[index]
    made = rederived_source(stored, index)
    case = msgspec.structs.replace(lineage.case, at_least=LEAST)

    def timed(source: KernelSource, against: KernelSource) -> Verdict:
        return undisturbed(judge(case, source, against), f"{lineage.name} step {index + 1}")

    found = Retimed(transition=step.digest, verdict=timed(before, after))
    if made is None or not may_be_better(step.forward_verdict):
        return found
    rederived = timed(made, after)
    better = timed(before, made) if is_better(rederived) else None
    return msgspec.structs.replace(found, rederived=rederived, better=better)


def undisturbed(verdict: Verdict, what: str) -> Verdict:
    """The verdict, if it says something of an effect. Raises Disturbed, or UsageError for a wrong kernel."""
    if verdict.status not in RIGHT or verdict.timing is None:
        raise UsageError(f"{what} is not right here: {verdict.reasons[0].message}")
    if verdict.code in DISTURBED:
        raise Disturbed(verdict)
    return verdict


def rederived_source(stored: StoredLineage, index: int) -> KernelSource | None:
    """The kernel that the re-derived edit of a step gives, where its text is not the state's."""
    again = stored.lineage.transitions[index].rederived
    if again is None:
        return None
    texts = {file.name: file.text for file in stored.sources[index].files}
    return with_files(stored.sources[index + 1], apply_edit(again.edit, texts))


def may_be_better(verdict: Verdict | None) -> bool:
    """Whether the walk's timing of a re-derived kernel leaves room for one that is better than the state."""
    timing = verdict.timing if verdict is not None else None
    return timing is not None and verdict is not None and (verdict.code in DISTURBED or timing.speedup.high > BETTER)


def is_better(verdict: Verdict) -> bool:
    """Whether a re-derived kernel, judged against the state, is faster by more than 5 %, its whole interval so."""
    return verdict.timing is not None and verdict.timing.speedup.low > BETTER


def winning(stored: StoredLineage, index: int, again: Retimed | None) -> KernelSource:
    """What a step leads to: the re-derived kernel where it is the better one, else the next state."""
    made = rederived_source(stored, index) if again is not None and again.better is not None else None
    return stored.sources[index + 1] if made is None else made
