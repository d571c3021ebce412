"""Re-deriving the forward step: a fresh chat that sees the simpler kernel alone brings the optimization back."""

from __future__ import annotations

import msgspec

from pytest_klineage.lab.induction.prompts import filled, kernel_text, meaning_of
from pytest_klineage.lab.induction.replies import Simplification, kernel_in
from pytest_klineage.lab.induction.verdicts import WIDE, Judging
from pytest_klineage.lab.library.lineages import RIGHT, edit_between
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Chat
from pytest_klineage.lab.optimizers.feedback import feedback_text
from pytest_klineage.records import KernelCase, KernelSource, Rejection, Verdict

LEAST_SPEED = 0.99
"""Share of the removed state's speed that a re-derived kernel must reach (the paper, section 3.2)."""
FORWARD_RULE = (
    f"right, and the paired interval of the next state's time over the re-derived kernel's reaches {LEAST_SPEED:g}: "
    f"refused when its upper bound lies below, or its estimate where the interval is wider than {WIDE:.0%} to each side"
)


class Rederived(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a re-derivation."""

    source: KernelSource | None
    """The kernel that was accepted; None when none was."""
    verdict: Verdict | None
    rejected: tuple[Rejection, ...] = ()
    last_reason: str = ""
    """Why the last attempt was refused, in a sentence."""


class Rederiver:
    """Asks for forward steps. Every step is a conversation of its own; the prefix stays, so that it is cached."""

    def __init__(self, chat: Chat, judging: Judging, *, attempts: int) -> None:
        self._chat, self._judging, self._attempts = chat, judging, attempts

    def rederive(self, case: KernelCase, step: Simplification, after: KernelSource) -> Rederived:
        """Ask for the step from `step.source` forward, judged against `after`, which the model is never shown."""
        self._chat.forget()
        prompt = _first_prompt(step)
        rejected: list[Rejection] = []
        reason = ""
        for _ in range(self._attempts):
            reply = self._chat.ask(prompt)
            try:
                source = kernel_in(reply, step.source, label=f"with {step.category.value}")
            except MalformedReply as error:
                reason, feedback = f"the reply cannot be used: {error}", ""
                rejected.append(_rejection(step, reason))
            else:
                verdict = self._judging(case, source, after)
                reason = shortfall(verdict)
                if not reason:
                    return Rederived(source=source, verdict=verdict, rejected=tuple(rejected))
                feedback = refusal_feedback(verdict)
                rejected.append(_rejection(step, reason, source, verdict))
            prompt = filled("rederive-refused", reason=reason, feedback=feedback)
        return Rederived(source=None, verdict=None, rejected=tuple(rejected), last_reason=reason)


def shortfall(verdict: Verdict) -> str:
    """Why a re-derived kernel is not accepted against the state that it shall equal; empty when it is."""
    if verdict.status not in RIGHT:
        return f"it is not right: {verdict.reasons[0].message}"
    if verdict.timing is None:
        return "it was not timed"
    speed = verdict.timing.speedup
    wide = speed.half_width > WIDE
    # A blurred figure must not be a way in: without a sharp interval the estimate itself has to reach the line.
    if (speed.estimate if wide else speed.high) >= LEAST_SPEED:
        return ""
    return (
        f"it is right, but reaches only {speed.estimate:.3g} of the speed that it shall have ({speed.confidence:.0%} "
        f"interval [{speed.low:.3g}, {speed.high:.3g}]; the {'estimate' if wide else 'upper bound'} must reach "
        f"{LEAST_SPEED:g})"
    )


def refusal_feedback(verdict: Verdict) -> str:
    """What a model is shown of a verdict beside the reason: all of it for a wrong kernel, the times for a slow one."""
    timing = verdict.timing
    if verdict.status not in RIGHT or timing is None:
        return f"{feedback_text(verdict)}\n"
    return (
        f"Time of this kernel: {timing.candidate_ms:.4g} ms; the kernel with the optimization takes "
        f"{timing.reference_ms:.4g} ms.\n"
    )


def _first_prompt(step: Simplification) -> str:
    return filled(
        "rederive-turn", category=step.category.value, meaning=meaning_of(step.category), locus=step.locus,
        intent=step.intent, kernel=kernel_text(step.source),
    )  # fmt: skip


def _rejection(
    step: Simplification, reason: str, source: KernelSource | None = None, verdict: Verdict | None = None
) -> Rejection:
    return Rejection(
        forward=True, category=step.category, locus=step.locus, intent=step.intent, reason=reason, verdict=verdict,
        edit=edit_between(step.source, source) if source is not None else None,
    )  # fmt: skip
