"""From a group of transitions and a model's hypothesis to a candidate card. What is measured comes from the records."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from pytest_klineage.lab.induction.lift_groups import Group, Site, slug
from pytest_klineage.lab.induction.lift_hypothesis import Hypothesis, RiskNote
from pytest_klineage.lab.library.normalise import shape_class, with_implied_needs
from pytest_klineage.lab.library.rendering import NAME_LIMIT
from pytest_klineage.records import CardScope, Category, Effect, Risk, SkillCard

NAME_WORDS = 4
T = TypeVar("T")


def card_of(group: Group, hypothesis: Hypothesis, *, model: str = "", taken: Collection[str] = ()) -> SkillCard:
    """The candidate card. Its name is not one of `taken`.

    Category, effect, evidence, origins and scope are those of the group's transitions; the codes of risks are those of
    the refused proposals that the hypothesis names. A number that names none is left to `checks`.
    """
    card = SkillCard(
        name=card_name(group, hypothesis.name, taken),
        category=group.category,
        intent=hypothesis.intent,
        anchor=hypothesis.anchor,
        carrier=hypothesis.carrier,
        preconditions=hypothesis.preconditions,
        settings={name: str(value) for name, value in hypothesis.settings.items()},
        effect=_effect(group.representative, hypothesis.effect),
        evidence=tuple(evidence for site in group.sites for evidence in site.evidence),
        risks=tuple(_risk(group, note) for note in hypothesis.risks),
        scope=_scope(group, hypothesis),
        origins=_distinct(site.context for site in group.sites),
        provenance=_provenance(group, model),
    )
    return with_implied_needs(card)


def card_name(group: Group, words: str, taken: Collection[str] = ()) -> str:
    """Platform, language, category and the hypothesis's words (the locus's, if it has none), with a number if taken."""
    lineage, category = group.sites[0].lineage, group.category.value.replace("_", "-")
    own = slug(words, NAME_WORDS) or slug(group.sites[0].transition.locus)
    own = own.removeprefix(f"{category}-") if own != category else ""
    parts = (lineage.platform, lineage.surface.value, category, own)
    stem = "-".join(part for part in parts if part)[: NAME_LIMIT - 3].rstrip("-")
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _effect(site: Site, summary: str) -> Effect:
    """The effect that was measured over this one step, or this one span; it is not multiplied from anything."""
    verdict = site.lineage.states[site.index + 1].verdict or site.transition.forward_verdict
    machine = verdict.machine if verdict is not None else None
    return Effect(
        summary=summary, speedup=site.effect, span=site.span, case=site.lineage.case.id,
        device=machine.device if machine is not None else "",
    )  # fmt: skip


def _risk(group: Group, note: RiskNote) -> Risk:
    refused = group.rejections
    if note.rejection is None or not 1 <= note.rejection <= len(refused):
        return Risk(text=note.text)
    step, rejection = refused[note.rejection - 1]
    return Risk(text=note.text, code=rejection.code, evidence=step.digest)


def _scope(group: Group, hypothesis: Hypothesis) -> CardScope:
    """Where the transitions are; of the hypothesis only what a target must have and which steps must come before."""
    lineages = [site.lineage for site in group.sites]
    return CardScope(
        operators=_distinct(lineage.operator for lineage in lineages),
        shape_classes=_distinct(shape_class(lineage.case.shape) for lineage in lineages),
        dtypes=_distinct(lineage.case.dtype for lineage in lineages),
        surfaces=_distinct(lineage.surface.value for lineage in lineages),
        platforms=_distinct(lineage.platform for lineage in lineages),
        capabilities=tuple(sorted(set(hypothesis.capabilities))),
        prior=tuple(category for category in Category if category in hypothesis.prior),
    )


def _provenance(group: Group, model: str) -> dict[str, str]:
    found = {f"lineage {site.lineage.name}": site.lineage.digest for site in group.sites}
    return {"lifted by": model, **found} if model else found


def _distinct(values: Iterable[T]) -> tuple[T, ...]:
    """Each value once, in order."""
    found: list[T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return tuple(found)
