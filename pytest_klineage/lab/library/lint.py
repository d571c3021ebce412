"""What is wrong with a card as it lies on disk: its fields, its evidence, its two forms. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.cards import CARD_FILE, SKILL_FILE, read_card
from pytest_klineage.lab.library.lineages import read_record
from pytest_klineage.lab.library.normalise import (
    canonical_capability,
    canonical_platform,
    granted,
    held_out,
    implied_needs,
    needs,
)
from pytest_klineage.lab.library.rendering import DESCRIPTION_LIMIT, NAME, NAME_LIMIT, description, skill_markdown
from pytest_klineage.records import CardStatus, Context, Lineage, PreconditionClass, SkillCard, Surface, TrialOutcome
from pytest_klineage.records.card import ANY

INTENT_LIMIT = 400
"""Characters; the intent must leave room for the anchor in the description of 1024."""

BY_MACHINE = frozenset({"avx2", "avx512"})
"""Capabilities that belong to a machine, not to a platform."""


class Rule(StrEnum):
    """What lint looks at. `docs/reference/card-format.md` explains each."""

    UNREADABLE = "card.unreadable"
    NAME = "name.format"
    FOLDER = "name.folder"
    SKILL_MISSING = "skill.missing"
    SKILL_DIFFERS = "skill.differs"
    EMPTY = "field.empty"
    LENGTH = "field.length"
    CLASS_MISSING = "precondition.class_missing"
    EVIDENCE_MISSING = "evidence.missing"
    EVIDENCE_UNKNOWN = "evidence.unknown"
    ORIGIN_MISSING = "origin.missing"
    ORIGIN_UNKNOWN = "origin.unknown"
    EFFECT_UNMEASURED = "effect.unmeasured"
    EFFECT_SPAN = "effect.span"
    RISK_MISSING = "risk.missing"
    RISK_EVIDENCE = "risk.evidence"
    SCOPE_NAME = "scope.unknown_name"
    CAPABILITY = "scope.capability_undeclared"
    SCOPE_PLATFORM = "scope.platform_lacks"
    ADMITTED = "status.admitted_without_success"
    CANDIDATE = "status.candidate_with_success"
    HELD_OUT = "log.not_held_out"
    OUTCOME = "log.outcome"


WARNINGS = frozenset({Rule.EFFECT_UNMEASURED, Rule.RISK_MISSING, Rule.CANDIDATE})
"""Rules that a good card may break; evidence is asked of a candidate as a warning, too."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    card: str
    """The folder's name."""
    rule: Rule
    message: str
    warning: bool = False


def lint_folder(directory: Path, lineages: Mapping[str, Lineage]) -> list[Finding]:
    """Findings about one folder below skills/; `lineages` by name are what evidence is looked up in."""
    try:
        card = read_card(directory)
    except UsageError as error:
        return [Finding(card=directory.name, rule=Rule.UNREADABLE, message=str(error))]
    found = [*_forms(directory, card), *lint_card(card, lineages)]
    return [msgspec.structs.replace(finding, card=directory.name) for finding in found]


def lint_card(card: SkillCard, lineages: Mapping[str, Lineage]) -> list[Finding]:
    """Findings about the card itself, in the order of the rules."""
    checks: tuple[Callable[[SkillCard, Mapping[str, Lineage]], Iterable[tuple[Rule, str]]], ...] = (
        _fields, _preconditions, _evidence, _effect_and_risks, _scope, _log,
    )  # fmt: skip
    return [_finding(card, rule, message) for check in checks for rule, message in check(card, lineages)]


def known_lineages(folders: Iterable[Path]) -> dict[str, Lineage]:
    """The lineages of these folders by name. Raises UsageError or BadRecord for one that cannot be read."""
    return {lineage.name: lineage for lineage in map(read_record, folders)}


def _finding(card: SkillCard, rule: Rule, message: str) -> Finding:
    hypothesis = rule in (Rule.EVIDENCE_MISSING, Rule.ORIGIN_MISSING) and card.status is CardStatus.CANDIDATE
    return Finding(card=card.name, rule=rule, message=message, warning=rule in WARNINGS or hypothesis)


def _forms(directory: Path, card: SkillCard) -> Iterator[Finding]:
    if card.name != directory.name:
        yield _finding(card, Rule.FOLDER, f"the card calls itself {card.name!r}; its folder must have the same name")
    path = directory / SKILL_FILE
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        yield _finding(card, Rule.SKILL_MISSING, f"{SKILL_FILE} cannot be read; render the card again")
        return
    wanted = skill_markdown(card)
    if text != wanted:
        pairs = enumerate(zip(text.split("\n"), wanted.split("\n"), strict=False), start=1)
        line = next((number for number, (one, other) in pairs if one != other), 0)
        where = f"from line {line} on" if line else "at its end"
        yield _finding(card, Rule.SKILL_DIFFERS, f"{SKILL_FILE} is not what {CARD_FILE} renders to {where}")


def _fields(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    if len(card.name) > NAME_LIMIT or not NAME.fullmatch(card.name):
        yield Rule.NAME, f"{card.name!r}: lowercase letters, digits and single hyphens, at most {NAME_LIMIT}"
    texts = {
        "intent": card.intent,
        "anchor": card.anchor,
        "carrier.text": card.carrier.text,
        "effect.summary": card.effect.summary,
        **{f"risks[{place}].text": risk.text for place, risk in enumerate(card.risks)},
    }
    for place, item in enumerate(card.preconditions):
        texts |= {f"preconditions[{place}].condition": item.condition, f"preconditions[{place}].reason": item.reason}
    for name, text in texts.items():
        if not text.strip():
            yield Rule.EMPTY, f"{name} is empty"
    if len(card.intent) > INTENT_LIMIT:
        yield Rule.LENGTH, f"intent has {len(card.intent)} characters; at most {INTENT_LIMIT}"
    if len(description(card)) == DESCRIPTION_LIMIT:
        yield Rule.LENGTH, f"intent and anchor are cut in the description of {DESCRIPTION_LIMIT} characters"


def _preconditions(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    there = {item.kind for item in card.preconditions}
    for kind in PreconditionClass:
        if kind not in there:
            yield Rule.CLASS_MISSING, f"nothing is said about {kind.value}; if nothing is needed, say that and why"


def _evidence(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    if not card.evidence:
        yield Rule.EVIDENCE_MISSING, "no transition is cited"
    if not card.origins:
        yield Rule.ORIGIN_MISSING, "no origin is given: neither held-out nor contamination can be told"
    for item in card.evidence:
        lineage = lineages.get(item.lineage)
        if lineage is None:
            yield Rule.EVIDENCE_UNKNOWN, f"there is no lineage {item.lineage!r}"
        elif item.transition not in {transition.digest for transition in lineage.transitions}:
            yield Rule.EVIDENCE_UNKNOWN, f"the lineage {item.lineage} has no transition {item.transition[:12]!r}"
        elif card.origins and not any(_comes_from(origin, lineage) for origin in card.origins):
            yield Rule.ORIGIN_UNKNOWN, f"no origin is {lineage.case.id} on {lineage.name}, which is cited"


def _comes_from(origin: Context, lineage: Lineage) -> bool:
    place = (origin.operator, origin.shape, origin.surface, _canonical(canonical_platform, origin.platform))
    return place == (lineage.operator, lineage.case.shape, lineage.surface, lineage.platform)


def _effect_and_risks(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    if card.effect.speedup is None:
        yield Rule.EFFECT_UNMEASURED, "no measured speedup"
    elif not card.effect.span:
        yield Rule.EFFECT_SPAN, "a speedup is given, but not the transitions that it was measured over"
    chains = [[transition.digest for transition in lineage.transitions] for lineage in lineages.values()]
    span = list(card.effect.span)
    if span and not any(span == chain[at : at + len(span)] for chain in chains for at in range(len(chain))):
        yield Rule.EFFECT_SPAN, "the span is no run of neighbouring transitions of a lineage"
    if not card.risks:
        yield Rule.RISK_MISSING, "no risk is known"
    digests = {digest for chain in chains for digest in chain}
    for risk in card.risks:
        if risk.evidence and risk.evidence not in digests:
            yield Rule.RISK_EVIDENCE, f"a risk cites the transition {risk.evidence[:12]!r}, which is nowhere"


def _scope(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    contexts = (*card.origins, *(trial.context for trial in card.log))
    for platform in (*card.scope.platforms, *(context.platform for context in contexts)):
        if platform != ANY and (message := _unknown(canonical_platform, platform)):
            yield Rule.SCOPE_NAME, message
    for surface in card.scope.surfaces:
        if surface != ANY and surface not in list(Surface):
            yield Rule.SCOPE_NAME, str(UnknownName("surface", surface, list(Surface)))
    for capability in card.scope.capabilities:
        if message := _unknown(canonical_capability, capability):
            yield Rule.SCOPE_NAME, message
    declared = {_canonical(canonical_capability, name) for name in card.scope.capabilities}
    for name in sorted(implied_needs(card) - declared):
        yield Rule.CAPABILITY, f"category or carrier use {name}, which scope.capabilities does not name"
    for platform in card.scope.platforms:
        if platform != ANY and (names := _lacks(card, platform)):
            yield Rule.SCOPE_PLATFORM, f"scope.platforms names {platform}, which is not granted {names}"


def _lacks(card: SkillCard, platform: str) -> str:
    """What the card needs and a platform of its scope is not granted; nothing for a name that is reported anyway."""
    if _unknown(canonical_platform, platform):
        return ""
    return ", ".join(sorted(needs(card) - granted(platform) - BY_MACHINE))


def _log(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[Rule, str]]:
    if card.status is CardStatus.ADMITTED and not card.successes:
        yield Rule.ADMITTED, "admitted, but no held-out trial of this gate has succeeded"
    if card.status is CardStatus.CANDIDATE and card.successes:
        yield Rule.CANDIDATE, "a candidate, although a held-out trial has succeeded"
    for number, trial in enumerate(card.log, start=1):
        told = trial.held_out and not trial.imported and bool(card.origins)
        if told and not held_out(trial.context, card.origins):
            yield Rule.HELD_OUT, f"trial {number} says held out, but its target is one that the card was lifted from"
        if trial.outcome is TrialOutcome.SUCCESS and trial.code is not None and trial.code.status.value != "accepted":
            yield Rule.OUTCOME, f"trial {number} is a success, but the gate's reason is {trial.code.value}"


def _unknown(canonical: Callable[[str], str], name: str) -> str:
    try:
        canonical(name)
    except UnknownName as error:
        return str(error)
    return ""


def _canonical(canonical: Callable[[str], str], name: str) -> str:
    try:
        return canonical(name)
    except UnknownName:
        return name
