"""What is wrong with a card as it lies on disk: its fields, its evidence, its two forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.cards import CARD_FILE, SKILL_FILE, read_card
from pytest_klineage.lab.library.lineages import read_timed
from pytest_klineage.lab.library.normalise import (
    canonical_capability,
    canonical_platform,
    capability_or_same,
    granted,
    held_out,
    implied_needs,
    needs,
    platform_or_same,
)
from pytest_klineage.lab.library.rendering import (
    BYTES_PER_TOKEN,
    CARD_TOKENS,
    DESCRIPTION_LIMIT,
    NAME,
    NAME_LIMIT,
    card_tokens,
    full_description,
    skill_markdown,
)
from pytest_klineage.records import CardStatus, Context, Lineage, PreconditionClass, SkillCard, Surface, TrialOutcome
from pytest_klineage.records.card import ANY

INTENT_LIMIT = 400
"""Characters; the intent must leave room for the anchor in the description of 1024."""

SAME = 0.6
"""Share of words, of those that either card has, from which on two cards say the same. Shipped ones reach 0.43."""
BY_MACHINE = frozenset({"avx2", "avx512"})
"""Capabilities that belong to a machine, not to a platform."""


class LintRule(StrEnum):
    """What lint looks at."""

    UNREADABLE = "card.unreadable"
    """The file card.json is missing, does not decode, or has another schema version."""
    NAME = "name.format"
    """Not a valid name."""
    FOLDER = "name.folder"
    """The folder has another name."""
    SKILL_MISSING = "skill.missing"
    """SKILL.md is missing."""
    SKILL_DIFFERS = "skill.differs"
    """SKILL.md is not what card.json renders to."""
    EMPTY = "field.empty"
    """Intent, anchor, carrier, effect, a precondition, its reason or a risk is blank."""
    LENGTH = "field.length"
    """The intent exceeds 400 characters, or the description is cut."""
    TOKENS = "card.tokens"
    """More than 1,500 tokens of a prompt: its text without the log, three bytes a token. A warning for cards of CPUs
    alone, which were lifted before the rule."""
    REPEATS = "card.repeats"
    """Carrier, or anchor and intent, has at least 60 % of the words (of those that either has) of another card of its
    category and languages."""
    CLASS_MISSING = "precondition.class_missing"
    """One of the five classes is not answered."""
    EVIDENCE_MISSING = "evidence.missing"
    """No transition is cited."""
    EVIDENCE_UNKNOWN = "evidence.unknown"
    """A cited transition is in no lineage of that name."""
    ORIGIN_MISSING = "origin.missing"
    """No origin, so held-out and contamination are unknown."""
    ORIGIN_UNKNOWN = "origin.unknown"
    """A cited lineage is of another case than every origin."""
    EFFECT_UNMEASURED = "effect.unmeasured"
    """No measured speedup."""
    EFFECT_SPAN = "effect.span"
    """A speedup without a span, or a span of transitions that are not neighbours."""
    EFFECT_REFUSED = "effect.refused"
    """The speedup of a step that was timed on a busy machine or with unstable times, and not again."""
    EFFECT_OUTDATED = "effect.outdated"
    """Another speedup than its one step has now, which was timed again: `cards lint --update-effects` takes that."""
    RISK_MISSING = "risk.missing"
    """No risk is known."""
    RISK_EVIDENCE = "risk.evidence"
    """A risk cites an unknown transition."""
    SCOPE_NAME = "scope.unknown_name"
    """An unknown platform, surface or capability."""
    CAPABILITY = "scope.capability_undeclared"
    """Category or code use a capability that the scope does not name."""
    SCOPE_PLATFORM = "scope.platform_lacks"
    """The scope names a platform that is not granted what the card needs."""
    ADMITTED = "status.admitted_without_success"
    """Admitted without a held-out success of this gate."""
    CANDIDATE = "status.candidate_with_success"
    """A candidate that could be admitted."""
    HELD_OUT = "log.not_held_out"
    """A trial says held out, but the card was lifted from its target."""
    OUTCOME = "log.outcome"
    """A success with a reason code of a kernel that was not accepted."""


WARNINGS = frozenset({
    LintRule.EFFECT_UNMEASURED, LintRule.EFFECT_REFUSED, LintRule.EFFECT_OUTDATED, LintRule.RISK_MISSING,
    LintRule.CANDIDATE,
})  # fmt: skip
"""Rules that a good card may break; evidence is asked of a candidate as a warning, too."""


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    card: str
    """The folder's name."""
    rule: LintRule
    message: str
    warning: bool = False


def lint_folder(
    directory: Path, lineages: Mapping[str, Lineage], others: Iterable[SkillCard] = ()
) -> list[LintFinding]:
    """Findings about one folder below skills/.

    `lineages` by name are what evidence is looked up in, `others` the cards that it must not repeat; its own may be
    among them.
    """
    try:
        card = read_card(directory)
    except UsageError as error:
        return [LintFinding(card=directory.name, rule=LintRule.UNREADABLE, message=str(error))]
    found = [*_forms(directory, card), *lint_card(card, lineages), *_repeats(card, others)]
    return [msgspec.structs.replace(finding, card=directory.name) for finding in found]


def lint_card(card: SkillCard, lineages: Mapping[str, Lineage]) -> list[LintFinding]:
    """Findings about the card itself, in the order of the rules.

    Length is a warning for a card of CPUs alone: those were lifted before there was a limit.
    """
    checks: tuple[Callable[[SkillCard, Mapping[str, Lineage]], Iterable[tuple[LintRule, str]]], ...] = (
        _fields, _preconditions, _evidence, _effect_and_risks, _scope, _log,
    )  # fmt: skip
    return [_finding(card, rule, message) for check in checks for rule, message in check(card, lineages)]


def known_lineages(folders: Iterable[Path]) -> dict[str, Lineage]:
    """The lineages of these folders by name. Raises UsageError or BadRecord for one that cannot be read."""
    return {lineage.name: lineage for lineage in map(read_timed, folders)}


def _finding(card: SkillCard, rule: LintRule, message: str) -> LintFinding:
    hypothesis = rule in (LintRule.EVIDENCE_MISSING, LintRule.ORIGIN_MISSING) and card.status is CardStatus.CANDIDATE
    old = rule is LintRule.TOKENS and set(card.scope.platforms) == {"cpu"}
    return LintFinding(card=card.name, rule=rule, message=message, warning=rule in WARNINGS or hypothesis or old)


def _forms(directory: Path, card: SkillCard) -> Iterator[LintFinding]:
    if card.name != directory.name:
        yield _finding(
            card, LintRule.FOLDER, f"the card calls itself {card.name!r}; its folder must have the same name"
        )
    path = directory / SKILL_FILE
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        yield _finding(card, LintRule.SKILL_MISSING, f"{SKILL_FILE} cannot be read; render the card again")
        return
    wanted = skill_markdown(card)
    if text != wanted:
        pairs = enumerate(zip(text.split("\n"), wanted.split("\n"), strict=False), start=1)
        line = next((number for number, (one, other) in pairs if one != other), 0)
        where = f"from line {line} on" if line else "at its end"
        yield _finding(card, LintRule.SKILL_DIFFERS, f"{SKILL_FILE} is not what {CARD_FILE} renders to {where}")


def _repeats(card: SkillCard, others: Iterable[SkillCard]) -> Iterator[LintFinding]:
    """Cards of the same category and language whose code, or whose anchor and intent, has nearly the same words.

    A retired card is kept for its log, and repeats nothing.
    """
    for other in others:
        retired = CardStatus.RETIRED in (card.status, other.status)
        if other.name == card.name or retired or _kind(other) != _kind(card):
            continue
        code = _shared(card.carrier.text, other.carrier.text)
        prose = _shared(f"{card.anchor} {card.intent}", f"{other.anchor} {other.intent}")
        if max(code, prose) >= SAME:
            where = "carrier" if code >= prose else "anchor and intent"
            text = f"its {where} has {max(code, prose):.0%} of the words of {other.name}: keep one of the two"
            yield _finding(card, LintRule.REPEATS, text)


def _kind(card: SkillCard) -> tuple[str, tuple[str, ...]]:
    return card.category.value, card.scope.surfaces


def _shared(one: str, other: str) -> float:
    """Words that two texts share, over words that either has."""
    mine, theirs = (set(re.findall(r"[a-z0-9]+", text.lower())) for text in (one, other))
    return len(mine & theirs) / max(len(mine | theirs), 1)


def _fields(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    if len(card.name) > NAME_LIMIT or not NAME.fullmatch(card.name):
        yield LintRule.NAME, f"{card.name!r}: lowercase letters, digits and single hyphens, at most {NAME_LIMIT}"
    texts = {
        "intent": card.intent,
        "anchor": card.anchor,
        "carrier.text": card.carrier.text,
        "effect.summary": card.effect.summary,
        **{f"risks[{key}].text": risk.text for key, risk in enumerate(card.risks)},
    }
    for key, item in enumerate(card.preconditions):
        texts |= {f"preconditions[{key}].condition": item.condition, f"preconditions[{key}].reason": item.reason}
    for name, text in texts.items():
        if not text.strip():
            yield LintRule.EMPTY, f"{name} is empty"
    if len(card.intent) > INTENT_LIMIT:
        yield LintRule.LENGTH, f"intent has {len(card.intent)} characters; at most {INTENT_LIMIT}"
    if len(full_description(card)) > DESCRIPTION_LIMIT:
        yield LintRule.LENGTH, f"intent and anchor are cut in the description of {DESCRIPTION_LIMIT} characters"
    if (tokens := card_tokens(card)) > CARD_TOKENS:
        yield (
            LintRule.TOKENS,
            f"takes about {tokens:,} tokens of a prompt ({tokens * BYTES_PER_TOKEN:,} bytes); at most {CARD_TOKENS:,}",
        )


def _preconditions(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    there = {item.kind for item in card.preconditions}
    for kind in PreconditionClass:
        if kind not in there:
            yield LintRule.CLASS_MISSING, f"nothing is said about {kind.value}; if nothing is needed, say that and why"


def _evidence(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    if not card.evidence:
        yield LintRule.EVIDENCE_MISSING, "no transition is cited"
    if not card.origins:
        yield LintRule.ORIGIN_MISSING, "no origin is given: neither held-out nor contamination can be determined"
    for item in card.evidence:
        lineage = lineages.get(item.lineage)
        if lineage is None:
            yield LintRule.EVIDENCE_UNKNOWN, f"there is no lineage {item.lineage!r}"
        elif item.transition not in {transition.digest for transition in lineage.transitions}:
            yield LintRule.EVIDENCE_UNKNOWN, f"the lineage {item.lineage} has no transition {item.transition[:12]!r}"
        elif card.origins and not any(_comes_from(origin, lineage) for origin in card.origins):
            yield LintRule.ORIGIN_UNKNOWN, f"no origin is {lineage.case.id} on {lineage.name}, which is cited"


def with_effect_of_step(card: SkillCard, lineages: Mapping[str, Lineage]) -> SkillCard:
    """The card with the speedup that its step has in a lineage, where it was measured over one step alone."""
    found = [
        step.effect for lineage in lineages.values() for step in lineage.transitions
        if (step.digest,) == card.effect.span and step.effect is not None
    ]  # fmt: skip
    if not found:
        return card
    return msgspec.structs.replace(card, effect=msgspec.structs.replace(card.effect, speedup=found[0]))


def _comes_from(origin: Context, lineage: Lineage) -> bool:
    key = (origin.operator, origin.shape, origin.surface, platform_or_same(origin.platform))
    return key == (lineage.operator, lineage.case.shape, lineage.surface, lineage.platform)


def _effect_and_risks(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    if card.effect.speedup is None:
        yield LintRule.EFFECT_UNMEASURED, "no measured speedup"
    elif not card.effect.span:
        yield LintRule.EFFECT_SPAN, "a speedup is given, but not the transitions that it was measured over"
    chains = [[transition.digest for transition in lineage.transitions] for lineage in lineages.values()]
    span = list(card.effect.span)
    if span and not any(span == chain[at : at + len(span)] for chain in chains for at in range(len(chain))):
        yield LintRule.EFFECT_SPAN, "the span is no run of neighbouring transitions of a lineage"
    steps = {step.digest: step for lineage in lineages.values() for step in lineage.transitions}
    if card.effect.speedup is not None and any(digest in steps and steps[digest].effect is None for digest in span):
        yield LintRule.EFFECT_REFUSED, "its speedup is of a disturbed timing: time the step again, and lift it"
    if with_effect_of_step(card, lineages) != card:
        yield LintRule.EFFECT_OUTDATED, "its speedup is not that of its step, which was timed again"
    if not card.risks:
        yield LintRule.RISK_MISSING, "no risk is known"
    digests = {digest for chain in chains for digest in chain}
    for risk in card.risks:
        if risk.evidence and risk.evidence not in digests:
            yield LintRule.RISK_EVIDENCE, f"a risk cites the transition {risk.evidence[:12]!r}, which is nowhere"


def _scope(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    contexts = (*card.origins, *(trial.context for trial in card.log))
    for platform in (*card.scope.platforms, *(context.platform for context in contexts)):
        if platform != ANY and (message := _unknown(canonical_platform, platform)):
            yield LintRule.SCOPE_NAME, message
    for surface in card.scope.surfaces:
        if surface != ANY and surface not in list(Surface):
            yield LintRule.SCOPE_NAME, str(UnknownName("surface", surface, list(Surface)))
    for capability in card.scope.capabilities:
        if message := _unknown(canonical_capability, capability):
            yield LintRule.SCOPE_NAME, message
    declared = set(map(capability_or_same, card.scope.capabilities))
    for name in sorted(implied_needs(card) - declared):
        yield LintRule.CAPABILITY, f"category or carrier use {name}, which scope.capabilities does not name"
    for platform in card.scope.platforms:
        if platform != ANY and (names := _lacks(card, platform)):
            yield LintRule.SCOPE_PLATFORM, f"scope.platforms names {platform}, which is not granted {names}"


def _lacks(card: SkillCard, platform: str) -> str:
    """What the card needs and a platform of its scope is not granted; nothing for a name that is reported anyway."""
    if _unknown(canonical_platform, platform):
        return ""
    return ", ".join(sorted(needs(card) - granted(platform) - BY_MACHINE))


def _log(card: SkillCard, lineages: Mapping[str, Lineage]) -> Iterator[tuple[LintRule, str]]:
    if card.status is CardStatus.ADMITTED and not card.successes:
        yield LintRule.ADMITTED, "admitted, but no held-out trial of this gate has succeeded"
    if card.status is CardStatus.CANDIDATE and card.successes:
        yield LintRule.CANDIDATE, "a candidate, although a held-out trial has succeeded"
    for number, trial in enumerate(card.log, start=1):
        checkable = trial.held_out and not trial.imported and bool(card.origins)
        if checkable and not held_out(trial.context, card.origins):
            yield (
                LintRule.HELD_OUT,
                f"trial {number} says held out, but its target is one that the card was lifted from",
            )
        if trial.outcome is TrialOutcome.SUCCESS and trial.code is not None and trial.code.status.value != "accepted":
            yield LintRule.OUTCOME, f"trial {number} is a success, but the gate's reason is {trial.code.value}"


def _unknown(canonical: Callable[[str], str], name: str) -> str:
    try:
        canonical(name)
    except UnknownName as error:
        return str(error)
    return ""
