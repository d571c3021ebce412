"""Whether a lineage still holds on this machine: every state right, every step with its recorded sign of effect.

Pure but for the judge that is passed in. Files, edits and digests are checked by library.lineages.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import LEAST
from pytest_klineage.lab.library.lineages import RIGHT, StoredLineage
from pytest_klineage.lab.library.rendering import speedup_text
from pytest_klineage.records import Interval, Status, Transition, Verdict
from pytest_klineage.records.lineage import inverse
from pytest_klineage.records.verdict import DISTURBED

NEAR = 0.03
"""Effects within 3 % of none count as none: two starts of one program differ by a percent or two."""


class Sign(StrEnum):
    """What a step does to the time."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"


class Rechecked(msgspec.Struct, frozen=True, kw_only=True):
    """One state judged again, and with it the step that leads on from it."""

    state: str
    verdict: Verdict
    recorded: Interval | None
    """The recorded effect of the step to the next state; None for the last state, and where none was recorded."""
    measured: Interval | None
    problem: str = ""
    """Why the lineage no longer holds here; empty when it does."""
    note: str = ""
    """What a reader should know of a step that holds."""


def sign_of(effect: Interval, near: float = NEAR) -> Sign:
    """The class of an effect (time before over time after): an interval that is clear of 1 by more than `near`."""
    if effect.low > 1 + near:
        return Sign.FASTER
    return Sign.SLOWER if effect.high < 1 / (1 + near) else Sign.SAME


def agrees(recorded: Interval, measured: Interval, near: float = NEAR) -> bool:
    """Whether a measured effect still has the recorded sign, or cannot be distinguished from the recorded effect.

    An interval that reaches over a limit has no sign that another could contradict.
    """
    if sign_of(recorded, near) is sign_of(measured, near) or _unclear(recorded, near) or _unclear(measured, near):
        return True
    return _gap(recorded, measured) <= math.log1p(near)


def _unclear(effect: Interval, near: float) -> bool:
    """Whether an effect is neither clear of none nor within `near` of it."""
    return sign_of(effect, near) is Sign.SAME and not (effect.low >= 1 / (1 + near) and effect.high <= 1 + near)


def recheck(stored: StoredLineage, index: int, judge: Judge) -> Rechecked:
    """Judge one state again, against the next one where there is one, and compare. A contradiction is asked twice.

    The pairs of a state and the next are those of the step between them: their interval, inverted, is its effect. The
    last state, the expert, is judged against the case's own reference.
    """
    found = _rechecked(stored, index, judge)
    if found.problem and found.verdict.status in RIGHT:
        found = _rechecked(stored, index, judge)
    return found


def _rechecked(stored: StoredLineage, index: int, judge: Judge) -> Rechecked:
    lineage, sources = stored.lineage, stored.sources
    step = lineage.transitions[index] if index < len(lineage.transitions) else None
    case = msgspec.structs.replace(lineage.case, at_least=LEAST)
    verdict = judge(case, sources[index], sources[index + 1] if step is not None else None)
    timing = verdict.timing
    measured = inverse(timing.speedup) if step is not None and timing is not None else None
    problem, note = "", ""
    if verdict.status is Status.SKIPPED:
        note = f"not judged here: {verdict.reasons[0].message}"
    elif verdict.status not in RIGHT:
        problem = f"the state is no longer right here: {verdict.code.value}: {verdict.reasons[0].message}"
    elif step is not None and step.effect is not None and measured is not None:
        problem, note = _compared(step, step.effect, measured)
        if verdict.code in DISTURBED:
            problem, note = "", f"{note or problem}; {verdict.code.value}, which decides nothing"
    return Rechecked(
        state=lineage.states[index].name, verdict=verdict, recorded=step.effect if step is not None else None,
        measured=measured, problem=problem, note=note,
    )  # fmt: skip


def _compared(step: Transition, recorded: Interval, measured: Interval) -> tuple[str, str]:
    """Problem and note of a step."""
    figures = f"recorded {speedup_text(recorded)}, measured here {speedup_text(measured)}"
    was, now = sign_of(recorded), sign_of(measured)
    if agrees(recorded, measured):
        return "", "" if was is now else f"{figures}: too near to tell apart"
    return (
        f"the step {step.category.value} ({step.locus}) was {was.value} and is {now.value}: {figures}. Another "
        "compiler, machine or library may have changed that: the cards lifted from this step need new trials here",
        "",
    )


def _gap(one: Interval, other: Interval) -> float:
    """Distance of two intervals on the logarithmic scale; 0 when they overlap."""
    low, high = max(one.low, other.low), min(one.high, other.high)
    return max(0.0, math.log(low / high)) if low > 0 and high > 0 else math.inf
