"""The cards of each arm of an experiment: chosen before it begins, by rules that see no result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pytest_klineage.lab.library.rendering import prompt_text
from pytest_klineage.lab.library.retrieval import CardIndex, Match, RetrievalTarget, lifted_from
from pytest_klineage.lab.llm.conversation import estimated_tokens
from pytest_klineage.records import KernelCase, SkillCard


def cards_for(
    library: Iterable[SkillCard], target: RetrievalTarget, own: KernelCase, *, k: int, at_most: int
) -> tuple[SkillCard, ...]:
    """What the library's retrieval brings for a target: of the union of the nearest `k` in each dimension `at_most`.

    Candidates count, since no card of a new platform is admitted before an experiment. Left out are cards of other
    platforms, those without any instruction that `own` requires, and what was lifted from `own`'s operator and shape.
    `target.case` is `own`, or that of the nearest operator that has lineages. The nearest case comes first, then the
    longest span, then what comes from most operators, then the largest sum of similarities, then the name.
    """
    wanted = set(own.requires)
    usable = [
        card for card in library
        if target.platform in card.scope.platforms and (not wanted or wanted & set(card.scope.capabilities))
        and not lifted_from(card, own)
    ]  # fmt: skip
    found = CardIndex(usable).retrieve(target, k, candidates=True)
    return tuple(match.card for match in sorted(found.matches, key=_nearest_first)[:at_most])


def placebo_for(library: Iterable[SkillCard], platform: str, cards: Sequence[SkillCard]) -> tuple[SkillCard, ...]:
    """Cards of other platforms with as many tokens as `cards` have, as near as can be; no more cards than these.

    Among equals the fewest cards, then the first names. Raises ValueError where the library has no such card.
    """
    wanted = sum(map(tokens_of, cards))
    others = sorted((card for card in library if platform not in card.scope.platforms), key=lambda card: card.name)
    sizes = [tokens_of(card) for card in others]
    sets = (chosen for count in range(1, len(cards) + 1) for chosen in itertools.combinations(range(len(sizes)), count))
    best = min(sets, key=lambda chosen: abs(sum(sizes[one] for one in chosen) - wanted), default=None)
    if best is None:
        raise ValueError(f"a placebo needs cards of other platforms than {platform}, the library has none")
    return tuple(others[one] for one in best)


def tokens_of(card: SkillCard) -> int:
    """Tokens of a card in a prompt, by estimate."""
    return estimated_tokens(prompt_text(card))


def _nearest_first(match: Match) -> tuple[float, int, int, float, str]:
    card, alike = match.card, match.similarities
    return -alike.case, -len(card.effect.span), -len({at.operator for at in card.origins}), -alike.total, card.name
