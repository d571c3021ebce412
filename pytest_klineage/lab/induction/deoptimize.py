"""Proposing simplifications: one conversation per state, in which refused proposals are told and not repeated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_klineage.lab.induction.replies import Done, Leftover, Simplification, proposal_in
from pytest_klineage.lab.induction.texts import filled, kernel_text, one_line
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Chat
from pytest_klineage.records import Category, KernelSource, Rejection

SHOWN_REASON = 220
"""Characters of the reason of a refused proposal in later prompts."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the walk has made: what later prompts tell of it."""

    category: Category
    locus: str
    intent: str


class Proposer:
    """Asks for simplifications of one state after another."""

    def __init__(self, chat: Chat, *, attempts: int) -> None:
        self._chat, self._attempts = chat, attempts
        self._kernel: KernelSource | None = None
        self._prompt = ""

    def turn_to(self, kernel: KernelSource, taken: Sequence[Taken], refused: Sequence[Rejection]) -> None:
        """Begin with a state: a conversation of its own, with what was taken out and refused on the way to it."""
        self._chat.forget()
        self._kernel = kernel
        self._prompt = filled(
            "deoptimize-turn", place=_place(taken), refused=_refused(refused), kernel=kernel_text(kernel)
        )

    def ask(self) -> Simplification | Done | MalformedReply:
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

    def contradict(self, leftovers: Sequence[Leftover]) -> None:
        """Tell the proposer, with the next question, what is left although it said that it was done."""
        listed = "".join(f"- {one_line(str(leftover))}\n" for leftover in leftovers)
        self._prompt = filled("deoptimize-audited", remaining=listed)


def _place(taken: Sequence[Taken]) -> str:
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
