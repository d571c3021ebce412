"""Admission: a card alone, a fresh kernel at a held-out place, and whether the gate sees the card's effect there.

Every trial becomes an entry of the card's log, failed ones too.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from pytest_klineage.lab.induction.admit_targets import AdmissionTarget
from pytest_klineage.lab.induction.lift_groups import LEAST_EFFECT
from pytest_klineage.lab.induction.one_card import OneCard
from pytest_klineage.lab.library.rendering import speedup_text
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.instructions import instructions_for
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.optimizers.session import EndReason, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Observation, StepProgress, Task
from pytest_klineage.records import (
    AdmissionRule,
    KernelCase,
    KernelSource,
    SkillCard,
    Status,
    Trial,
    TrialOutcome,
    Verdict,
)
from pytest_klineage.records.lineage import inverse

REPAIRS = 2
"""Turns in which a model may correct its kernel by what the gate said."""
REFERENCE_DESCRIPTION = "the kernel that you are given"
NO_TRIAL = (EndReason.BACKEND, EndReason.NOT_JUDGED)
"""Ends that say nothing about the card."""
Compare: TypeAlias = Callable[[KernelCase, KernelSource, KernelSource], Verdict]
"""Judges a kernel (second) on a case against another kernel (third): `Gate.judge` with `reference_source`."""


class Roundtrip(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to use a card."""

    target: AdmissionTarget
    trial: Trial | None
    """For the card's log; None when the attempt says nothing about the card: see `message`."""
    message: str
    """How it ended, in a sentence."""
    kernel: KernelSource | None = None
    """The kernel that the trial is about."""
    rejudged: tuple[Rejudged, ...] = ()
    """In a replay: what the gate says now of each recorded kernel."""
    spent_usd: float = 0.0


def roundtrip(
    card: SkillCard,
    target: AdmissionTarget,
    session: Session,
    compare: Compare,
    *,
    repairs: int = REPAIRS,
    machine: str = "",
    on_step: Callable[[StepProgress], None] | None = None,
) -> Roundtrip:
    """Have a model materialize the card on the target's state, and let the gate say whether the effect is there.

    Whether the state is of any use is asked beside it, by `basis`. The model gets the card, the contract and the
    state, nothing else; `machine` is a line about the machine for the contract. A spent budget ends the trial, and is
    its outcome. Raises UsageError, TrajectoryMismatch among them, and HarnessError; resume the session then.
    """
    method = OneCard(card, effect=target.case.at_least, repairs=repairs)
    outcome = optimize(
        _task(target, machine), method, session, lambda case, source: compare(case, source, target.state),
        max_steps=method.max_steps, on_step=on_step, submit_root=False,
    )  # fmt: skip
    deciding = _deciding(outcome, target.case.at_least)
    trial = None if outcome.stopped in NO_TRIAL else _trial(target, outcome, deciding, _method(session))
    return Roundtrip(
        target=target, trial=trial, message=_message(target, outcome, trial),
        kernel=deciding.proposal.source if deciding is not None else None, rejudged=outcome.rejudged,
        spent_usd=outcome.spent_usd,
    )  # fmt: skip


def basis(target: AdmissionTarget, compare: Compare) -> Verdict:
    """The state against itself, or against the kernel that its lineage's step leads to, where that was not timed."""
    return compare(target.case, target.state, target.after or target.state)


def problem_with(target: AdmissionTarget, verdict: Verdict) -> str:
    """Why the target proves nothing, by its basis: the state is wrong there, or its lineage's own step does not pay."""
    reason = verdict.reasons[0]
    if not verdict.scored or verdict.timing is None:
        return f"the state is of no use at {target.case.id}: {reason.code.value}: {reason.message}"
    own = inverse(verdict.timing.speedup)
    if target.expected is None and (own.low <= 1 or own.estimate < LEAST_EFFECT):
        return f"{target.why}: that step shows no effect of its own: {speedup_text(own)}"
    return ""


def settled(target: AdmissionTarget, verdict: Verdict) -> AdmissionTarget:
    """The target with what is expected there, by a basis without a problem."""
    if target.expected is not None or verdict.timing is None:
        return target
    return target.expecting(inverse(verdict.timing.speedup).estimate)


def shows_effect(verdict: Verdict, expected: float) -> bool:
    """Whether a verdict is a success: accepted, and the lower end of the interval is what was expected at least."""
    timing = verdict.timing
    return verdict.status is Status.ACCEPTED and timing is not None and timing.speedup.low >= expected


def _task(target: AdmissionTarget, machine: str) -> Task:
    state = target.state
    text = instructions_for(
        target.case,
        target.surface,
        target.platform,
        state.entry,
        state.flags,
        machine=machine,
        reference=REFERENCE_DESCRIPTION,
    )
    return Task(case=target.case, platform=target.platform, surface=target.surface, root=state, instructions=text)


def _method(session: Session) -> str:
    """Who made the kernel. A replay answers for whom it has recorded."""
    name = session.backend.name
    return session.backend.model if name == "replay" else f"{name}:{session.backend.model}"


def _steps(outcome: OptimizationResult) -> list[Observation]:
    """What the method proposed; the root is no part of it."""
    return [seen for seen in outcome.observations if seen.step > 0]


def _deciding(outcome: OptimizationResult, expected: float) -> Observation | None:
    """The step that the trial is about: the first success, else the fastest right kernel, else the last that failed."""
    judged = [(seen, seen.verdict) for seen in _steps(outcome) if seen.verdict is not None]
    for seen, verdict in judged:
        if shows_effect(verdict, expected):
            return seen
    right = [seen for seen, verdict in judged if verdict.scored and seen.speedup is not None]
    if right:
        return max(right, key=lambda seen: seen.speedup or 0.0)
    return judged[-1][0] if judged else None


def _trial(target: AdmissionTarget, outcome: OptimizationResult, deciding: Observation | None, method: str) -> Trial:
    verdict = deciding.verdict if deciding is not None else None
    timing = verdict.timing if verdict is not None and verdict.scored else None
    return Trial(
        context=target.context,
        outcome=_outcome(target, outcome, verdict),
        held_out=target.rule is AdmissionRule.STRICT,
        code=verdict.code if verdict is not None else None,
        speedup=timing.speedup if timing is not None else None,
        source_digest=verdict.source_digest if verdict is not None else "",
        method=method,
        tried_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        note=_trial_note(target, outcome),
        rule=target.rule,
        expected=target.expected,
    )


def _outcome(target: AdmissionTarget, outcome: OptimizationResult, verdict: Verdict | None) -> TrialOutcome:
    if verdict is not None and shows_effect(verdict, target.case.at_least):
        return TrialOutcome.SUCCESS
    if outcome.stopped == EndReason.BUDGET:
        return TrialOutcome.OUT_OF_BUDGET
    if verdict is None:
        return TrialOutcome.NOT_MATERIALIZED
    return TrialOutcome.NO_EFFECT if verdict.scored else TrialOutcome.REJECTED


def _trial_note(target: AdmissionTarget, outcome: OptimizationResult) -> str:
    steps = _steps(outcome)
    parts = [f"expected {target.case.at_least:g}x at least", f"{len(steps)} replies", target.why]
    malformed = [seen.proposal.malformed for seen in steps if seen.proposal.source is None]
    parts += [f"a reply without a kernel: {malformed[-1]}"] if malformed else []
    return "; ".join(parts)


def _message(target: AdmissionTarget, outcome: OptimizationResult, trial: Trial | None) -> str:
    if trial is None:
        return f"no trial on {target.name}: {outcome.stopped}: {outcome.message}"
    code = f" ({trial.code.value})" if trial.code is not None else ""
    return f"{trial.outcome.value}{code} on {target.name}: {trial.note}"
