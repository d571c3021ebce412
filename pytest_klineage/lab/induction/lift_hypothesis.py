"""What a model writes of a card, and how a reply becomes it. Python sets what is measured."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.edits import one_object, usable_text
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.records import Carrier, Category, Precondition


class RiskNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, and the number of the refused proposal that shows it."""

    text: str
    rejection: int | None = None
    """As the prompt numbers them, from 1; None for a risk that was not seen."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a card that a model may write."""

    name: str
    """Two to four words for the locus; category, language and platform are put before them."""
    intent: str
    anchor: str
    carrier: Carrier
    preconditions: tuple[Precondition, ...]
    settings: dict[str, str | int | float] = {}
    effect: str
    """Why it is faster, in a sentence, without figures."""
    risks: tuple[RiskNote, ...] = ()
    capabilities: tuple[str, ...] = ()
    prior: tuple[Category, ...] = ()


class BadHypothesis(ValueError):
    """A reply that is no hypothesis; the message can be shown to the model as it is."""


def hypothesis_of(reply: Reply) -> Hypothesis:
    """The hypothesis in a reply. Raises BadHypothesis for a reply that was cut off, is no object, or has wrong fields.

    Whatever else a reply says, asks for or claims is not read.
    """
    try:
        value = one_object(usable_text(reply))
    except MalformedReply as error:
        raise BadHypothesis(str(error)) from error
    return converted(value)


def converted(value: dict[str, Any]) -> Hypothesis:
    """The hypothesis in a JSON object. Raises BadHypothesis, which names the field and what is valid there."""
    try:
        found = msgspec.convert(value, type=Hypothesis)
    except msgspec.ValidationError as error:
        raise BadHypothesis(f"a field is not as asked for: {error}; {FIELDS}") from error
    return msgspec.structs.replace(
        found,
        intent=_line(found.intent),
        anchor=_line(found.anchor),
        effect=_line(found.effect),
        preconditions=tuple(
            msgspec.structs.replace(item, condition=_line(item.condition), reason=_line(item.reason))
            for item in found.preconditions
        ),
        risks=tuple(msgspec.structs.replace(risk, text=_line(risk.text)) for risk in found.risks),
    )


FIELDS = (
    "the fields are name, intent, anchor, carrier {kind, language, text}, preconditions [{kind, condition, reason}], "
    "settings, effect, risks [{text, rejection}], capabilities, prior"
)


def _line(text: str) -> str:
    """Prose as one line."""
    return " ".join(text.split())
