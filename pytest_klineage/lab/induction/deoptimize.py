"""Asking for simplifications, one conversation per state, and a second look when the proposer says it is done."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_klineage.lab.induction.prompts import filled, kernel_text, one_line
from pytest_klineage.lab.induction.replies import (
    ProposerDone,
    RemainingOptimization,
    Simplification,
    proposal_in,
    remaining_in_reply,
)
from pytest_klineage.lab.induction.simplicity import remaining_in_source
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Chat
from pytest_klineage.records import KernelSource, Rejection, Transition

SHOWN_REASON = 220
"""Characters of the reason of a refused proposal in later prompts."""
UNREADABLE = RemainingOptimization("unknown", "the audit", "its reply could not be used")


class Proposer:
    """Asks for simplifications of one state after another."""

    def __init__(self, chat: Chat, *, attempts: int) -> None:
        self._chat, self._attempts = chat, attempts
        self._kernel: KernelSource | None = None
        self._prompt = ""

    def turn_to(self, kernel: KernelSource, taken: Sequence[Transition], refused: Sequence[Rejection]) -> None:
        """Begin with a state: a conversation of its own, with what was taken out and refused before it."""
        self._chat.forget()
        self._kernel = kernel
        self._prompt = filled(
            "deoptimize-turn", place=_history(taken), refused=_refused(refused), kernel=kernel_text(kernel)
        )

    def ask(self) -> Simplification | ProposerDone | MalformedReply:
        """The next proposal; the last complaint when the model could not be understood in so many attempts."""
        if self._kernel is None:
            raise RuntimeError("turn_to comes first")
        complaint: MalformedReply | None = None
        for _ in range(self._attempts):
            reply = self._chat.ask(self._prompt)
            try:
                return proposal_in(reply, self._kernel)
            except MalformedReply as error:
                complaint = error
                self._prompt = filled("deoptimize-malformed", reason=str(error))
        if complaint is None:
            raise RuntimeError("a proposer needs one attempt at least")
        return complaint

    def refuse(self, reason: str, feedback: str = "") -> None:
        """Tell the proposer, with the next question, why its proposal was not taken."""
        self._prompt = filled("deoptimize-refused", reason=reason, feedback=feedback)

    def contradict(self, remaining: Sequence[RemainingOptimization]) -> None:
        """Tell the proposer, with the next question, what is left although it said that it was done."""
        listed = "".join(f"- {one_line(str(optimization))}\n" for optimization in remaining)
        self._prompt = filled("deoptimize-audited", remaining=listed)


def _history(taken: Sequence[Transition]) -> str:
    if not taken:
        return "This is the expert's kernel; nothing has been taken out yet."
    steps = "\n".join(f"- `{step.category.value}` in {step.locus}: {one_line(step.intent)}" for step in taken)
    return f"Taken out so far, the first step first:\n\n{steps}"


def _refused(refused: Sequence[Rejection]) -> str:
    """Simplifications that were refused at earlier states, by category."""
    proposals = [rejection for rejection in refused if not rejection.forward]
    if not proposals:
        return ""
    lines = "\n".join(
        f"- `{rejection.category.value}` in {rejection.locus}: {one_line(rejection.reason, SHOWN_REASON)}"
        for rejection in sorted(proposals, key=lambda rejection: rejection.category.value)
    )
    return f"Refused so far, at this kernel or faster ones:\n\n{lines}\n\n"


class Auditor:
    """Looks for what is left of optimization in a kernel. Every look is a conversation of its own."""

    def __init__(self, chat: Chat, *, attempts: int) -> None:
        self._chat, self._attempts = chat, attempts

    def remaining(self, kernel: KernelSource) -> tuple[RemainingOptimization, ...]:
        """What is left, in order; empty when the code's words and the model both find nothing.

        A model that cannot be understood has not agreed. What can be seen without a model is not asked.
        """
        if seen := remaining_in_source(kernel):
            return seen
        self._chat.forget()
        prompt = filled("audit-turn", kernel=kernel_text(kernel))
        for _ in range(self._attempts):
            reply = self._chat.ask(prompt)
            try:
                return remaining_in_reply(reply)
            except MalformedReply as error:
                prompt = f"The reply cannot be used: {error}\n\nAnswer with the JSON object and nothing else."
        return (UNREADABLE,)
