"""Lifting: one conversation per group of transitions, at whose end stands a candidate card or the reasons for none.

A model writes the words; what is measured, cited or counted is set and checked here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pytest_klineage.lab.induction.lift_card import card_of
from pytest_klineage.lab.induction.lift_checks import CardFault, findings_about
from pytest_klineage.lab.induction.lift_groups import Group
from pytest_klineage.lab.induction.lift_hypothesis import BadHypothesis, hypothesis_of
from pytest_klineage.lab.induction.lift_prompt import repair_text, request_text, system_prompt
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import BudgetExhausted
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.recording import open_chat
from pytest_klineage.records import Noted, SkillCard

REPAIRS = 2
"""Turns in which a model may correct what it wrote."""
MAX_OUTPUT_TOKENS = 8192
LIFTED, NOT_LIFTED = "lifted", "not_lifted"
"""Topics of the notes that a trajectory keeps."""


class Lift(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a group."""

    group: Group
    card: SkillCard | None
    """A candidate; None when no reply was good enough."""
    attempts: int
    """Replies that were read."""
    findings: tuple[str, ...] = ()
    """What was wrong with the last reply: the reasons for no card, or what a card was forgiven."""

    @property
    def summary(self) -> str:
        """The outcome in a line."""
        if self.card is not None:
            return f"{self.group.name}: {self.card.name}"
        return f"{self.group.name}: no card after {self.attempts} replies: {'; '.join(self.findings)}"


def lift(group: Group, session: Session, *, taken: Collection[str] = (), repairs: int = REPAIRS) -> Lift:
    """Ask a model for the card of a group, and hold it to the group's records; `taken` are names of other cards.

    A spent budget ends it without a card. Raises BackendFailed when a call brought no reply: resume then.
    """
    chat = open_chat(session, f"lift {group.name}", system=system_prompt(group.on_gpu))
    text, found = request_text(group), list[CardFault]()
    kept: SkillCard | None = None
    attempts = 0
    while attempts <= repairs:
        try:
            reply = chat.ask(text, max_output_tokens=MAX_OUTPUT_TOKENS)
        except BudgetExhausted as error:
            found = [*found, CardFault(text=str(error))]
            break
        attempts += 1
        card, found = _read(group, reply, session.backend.model, taken)
        if not any(finding.fatal for finding in found):
            kept = card
        if not found:
            break
        text = repair_text(found)
    done = Lift(group=group, card=kept, attempts=attempts, findings=tuple(finding.text for finding in found))
    _note(session, Noted(topic=NOT_LIFTED if kept is None else LIFTED, text=done.summary))
    return done


def _read(group: Group, reply: Reply, model: str, taken: Collection[str]) -> tuple[SkillCard | None, list[CardFault]]:
    try:
        hypothesis = hypothesis_of(reply)
    except BadHypothesis as error:
        return None, [CardFault(text=str(error))]
    card = card_of(group, hypothesis, model=model, taken=taken)
    return card, findings_about(group, hypothesis, card)


def _note(session: Session, note: Noted) -> None:
    """Write a note, unless a run that is resumed has written it before."""
    if note not in session.events:
        session.record(note)
