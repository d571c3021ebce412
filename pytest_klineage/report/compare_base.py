"""What judgements of a kernel against its base say together, and whether another one is needed.

The base's kernel takes the reference's place, so whatever disturbs the machine hits both sides alike. Judgements are
pooled: one interval over the starts of all of them decides, see plugin/comparison/pooling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_klineage.records import Interval, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.records.verdict import DISTURBED, Status
from pytest_klineage.report.compare import advice_for, change_text, classify, finding, first_line, where_it_lies

LEAST, MOST = 2, 3
"""Undisturbed judgements that a change of speed needs, and judgements at most."""

HEADS_OWN = (
    Status.WRONG_VALUE, Status.WRONG_SHAPE, Status.WRONG_DTYPE, Status.CHEAT, Status.WRAPPER, Status.RUNTIME_ERROR,
    Status.TIMEOUT,
)  # fmt: skip
"""What only the head's kernel can come to: where the base's fails to run there is no verdict."""


def precision_for(margin: float) -> float:
    """Half-width at which sampling may stop. With half the margin, more time could not show a change near it."""
    return margin / 4


def undisturbed(judged: Sequence[Verdict]) -> list[Verdict]:
    """The judgements that count: nothing else used the machine, times were stable, pairs were enough."""
    return [paired for paired in judged if paired.code not in DISTURBED]


def judge_again(found: Comparison) -> bool:
    """Whether another judgement may still decide."""
    return found.outcome is ComparisonOutcome.UNCLEAR and 1 + len(found.more) < MOST


def compare_base(
    nodeid: str, verdict: Verdict, judged: Sequence[Verdict], change: Interval | None, *, margin: float
) -> Comparison:  # fmt: skip
    """One kernel with the base's, from all judgements so far.

    `change` is the pooled interval of those that count, or of all where none does; None where none was timed.
    """
    kept: dict[str, Any] = {"verdict": judged[0], "more": tuple(judged[1:])}
    failed = next((paired for paired in judged if paired.timing is None or not paired.scored), None)
    if failed is not None and failed.status in HEADS_OWN:
        message = f"beside the base's kernel it is {failed.code.value}: {first_line(failed.reasons[0].message)}"
        return finding(nodeid, verdict, "base", margin, ComparisonOutcome.BROKEN, message, "run its test again", **kept)
    if failed is not None or change is None:
        reason = (failed or judged[0]).reasons[0]
        message = f"the base's kernel could not be compared with: {reason.code.value}: {first_line(reason.message)}"
        advice = "build the base's kernel with the flags of the head"
        return finding(nodeid, verdict, "base", margin, ComparisonOutcome.BASE_FAILED, message, advice, **kept)
    counted = [paired.timing.speedup for paired in undisturbed(judged) if paired.timing]
    outcome = pooled_outcome(change, margin, len(counted))
    if any(contradicts(one, outcome, margin) for one in counted):
        outcome = ComparisonOutcome.UNCLEAR
    ratios = tuple(paired.timing.speedup for paired in judged if paired.timing) if len(judged) > 1 else ()
    return finding(
        nodeid, verdict, "base", margin, outcome, _message(change, judged, margin), _advice(outcome, judged),
        ratio=change, ratios=ratios, **kept,
    )  # fmt: skip


def pooled_outcome(change: Interval, margin: float, count: int) -> ComparisonOutcome:
    """What an interval says that was pooled from so many judgements that count."""
    outcome = classify(change, margin)
    return outcome if count >= (LEAST if outcome.change else 1) else ComparisonOutcome.UNCLEAR


def contradicts(one: Interval, outcome: ComparisonOutcome, margin: float) -> bool:
    """Whether one judgement alone says the same or the contrary of a change: pooled starts do not show how judgements
    differ from one another."""
    return outcome.change and classify(one, margin) not in (outcome, ComparisonOutcome.UNCLEAR)


def _message(change: Interval, judged: Sequence[Verdict], margin: float) -> str:
    said = f"{change_text(change)} of the speed of the base, {where_it_lies(change, margin)}"
    each = ", ".join(f"{paired.timing.speedup.estimate:.3f}x" for paired in judged if paired.timing)
    source = "one judgement" if len(judged) == 1 else f"{len(judged)} judgements: {each}"
    disturbed = [paired for paired in judged if paired.code in DISTURBED]
    if disturbed:
        source += f"; {len(disturbed)} disturbed: {first_line(disturbed[0].reasons[0].message)}"
    return f"{said} ({100 * change.confidence:g} % interval, {source})"


def _advice(outcome: ComparisonOutcome, judged: Sequence[Verdict]) -> str:
    """The next step; for an interval that is too wide, what narrows it."""
    if outcome is not ComparisonOutcome.UNCLEAR:
        return advice_for(outcome, "")
    if len(undisturbed(judged)) < len(judged):
        return "quieten the machine, or look for what makes the kernel's times unstable"
    if any(paired.timing is not None and paired.timing.stopped == "time limit" for paired in judged):
        return "raise --klineage-time-limit (half the width takes four times as long), or allow more"
    return "allow more, or less: the change is about the margin, and more time would not narrow its interval"
