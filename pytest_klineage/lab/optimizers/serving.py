"""Cards as text for a prompt: all nine fields, or labels alone, and the order in which lineages applied them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_klineage.lab.library.rendering import prompt_text
from pytest_klineage.lab.library.retrieval import CardIndex, Dimension, Retrieval, Target
from pytest_klineage.records import SkillCard


def card_text(card: SkillCard) -> str:
    """All nine fields of a card, the carrier verbatim in a fence that it cannot close."""
    return prompt_text(card)


def label_text(card: SkillCard) -> str:
    """A card's name and category alone, for the ablation that asks whether labels suffice."""
    return f"# Skill {card.name}\n\nCategory: {card.category.value}\n"


def lineage_order(cards: Iterable[SkillCard]) -> tuple[SkillCard, ...]:
    """Cards in the order in which their lineages applied them: fewest steps before first, then by name."""
    return tuple(sorted(cards, key=lambda card: (_steps_before(card), card.name)))


def order_text(cards: Sequence[SkillCard]) -> str:
    """The order as a numbered list with each card's category."""
    return "\n".join(f"{place}. {card.name} ({card.category.value})" for place, card in enumerate(cards, start=1))


def retrieved(
    index: CardIndex, target: Target, *, k: int, without: Dimension | None = None, contaminated: bool = True
) -> Retrieval:
    """What the target gets; `without` leaves out what only that dimension would bring, for ablations."""
    found = index.retrieve(target, k, contaminated=contaminated)
    if without is None:
        return found
    kept = tuple(match for match in found.matches if set(match.by) - {without})
    return Retrieval(matches=kept, explanations=found.explanations)


def _steps_before(card: SkillCard) -> int:
    return min((len(origin.prior) for origin in card.origins), default=len(card.scope.prior))
