"""Steps of a lineage that were timed again: a file of lines beside lineage.json, and the effects that count.

The walk's own record stays as it is, with its digests and prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from pytest_klineage.records import Interval, Lineage, LineageState, Retimed, Transition, Verdict
from pytest_klineage.records.verdict import DISTURBED
from pytest_klineage.results.packed import append_line, read_lines

RETIMED_FILE = "retimed.verdicts.jsonl"


def read_retimed(folder: Path) -> dict[str, Retimed]:
    """The steps of a lineage's folder that were timed again, by their digests; the later line wins.

    Raises BadRecord for a line that does not decode.
    """
    found = read_lines(folder / RETIMED_FILE, Retimed)
    return {one.transition: one for one in found}


def keep_retimed(folder: Path, one: Retimed) -> None:
    """Add a step that was timed again. Raises StoreError."""
    append_line(folder / RETIMED_FILE, one)


def with_effects(lineage: Lineage, retimed: Mapping[str, Retimed]) -> Lineage:
    """The lineage with the effects that count: those of steps timed again, and none of a disturbed timing.

    Its digests are still those of the walk.
    """
    states = lineage.states
    steps = tuple(
        msgspec.structs.replace(step, effect=effect_of(step, _walked(lineage, state), retimed.get(step.digest)))
        for step, state in zip(lineage.transitions, states, strict=False)
    )
    return msgspec.structs.replace(lineage, transitions=steps)


def _walked(lineage: Lineage, state: LineageState) -> Verdict | None:
    """The verdict that has shown a step's effect; a hand-made state was judged against the vendor, apart from it."""
    return None if lineage.hand_made else state.verdict


def effect_of(step: Transition, walked: Verdict | None, again: Retimed | None) -> Interval | None:
    """The effect of a step that counts; None where only a busy machine or unstable times have shown one."""
    if again is not None:
        return again.effect
    return None if walked is not None and walked.code in DISTURBED else step.effect


def refused_effects(lineage: Lineage, retimed: Mapping[str, Retimed]) -> Iterator[str]:
    """The effects of a walk that do not count, since a disturbed timing has shown them and no other has."""
    for number, (step, state) in enumerate(zip(lineage.transitions, lineage.states, strict=False), start=1):
        if step.effect is not None and effect_of(step, _walked(lineage, state), retimed.get(step.digest)) is None:
            code = state.verdict.code.value if state.verdict is not None else "not judged"
            yield f"transition {number} ({step.category.value}): its effect is refused, for its timing was {code}"


def effect_problems(lineage: Lineage, retimed: Mapping[str, Retimed]) -> Iterator[str]:
    """What is wrong with steps timed again: a disturbed timing, or one of another kernel, case or lineage."""
    for number, step in enumerate(lineage.transitions, start=1):
        if (again := retimed.get(step.digest)) is not None:
            where = f"transition {number} ({step.category.value}), timed again"
            yield from (f"{where}: {text}" for text in _problems(lineage, step, again))
    for digest in sorted(set(retimed) - {step.digest for step in lineage.transitions}):
        yield f"{RETIMED_FILE}: {digest[:12]!r} is no transition of this lineage"


def _problems(lineage: Lineage, step: Transition, again: Retimed) -> Iterator[str]:
    about = ((again.verdict, step.before), (again.rederived, step.forward_digest), (again.better, step.before))
    for verdict, digest in about:
        if verdict is not None:
            yield from verdict_problems(lineage, verdict, digest)


def verdict_problems(lineage: Lineage, verdict: Verdict, digest: str) -> Iterator[str]:
    """Why a verdict does not show an effect from the kernel with this digest: it is about another one, or disturbed."""
    if verdict.source_digest != digest:
        yield f"a verdict is about {verdict.source_digest[:12]}, not about {digest[:12]}"
    if verdict.case.id != lineage.case.id:
        yield f"a verdict is about {verdict.case.id}"
    if verdict.code in DISTURBED or verdict.timing is None:
        yield f"a verdict is {verdict.code.value}, which says nothing of an effect"
