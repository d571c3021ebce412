"""Cards of other tools' formats become cards of ours: JSON with nine fields, and SKILL.md with four metadata fields.

What is imported is a candidate, whatever it was elsewhere: this gate has not seen it. What has no place in our card is
an error that names the field, never left out in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pytest_klineage.lab.library.foreign import (
    UnmappedField,
    card_name,
    category_of,
    decoded,
    language_of,
    list_of,
    mapped,
    mapping_of,
    object_of,
    text_of,
    texts_of,
)
from pytest_klineage.lab.library.front_matter import markdown_sections, split_front_matter
from pytest_klineage.lab.library.normalise import canonical_capability, canonical_platform, implied_needs
from pytest_klineage.records import (
    CardScope,
    Carrier,
    CarrierKind,
    Category,
    Context,
    Effect,
    Precondition,
    PreconditionClass,
    Risk,
    SkillCard,
    Surface,
    Trial,
    TrialOutcome,
)
from pytest_klineage.records.card import ANY

CLASS_NAMES = {
    "data type": PreconditionClass.DATA_TYPE, "data types": PreconditionClass.DATA_TYPE,
    "dtype": PreconditionClass.DATA_TYPE, "layout": PreconditionClass.LAYOUT, "storage": PreconditionClass.STORAGE,
    "pipeline": PreconditionClass.PIPELINE, "hardware": PreconditionClass.HARDWARE,
}  # fmt: skip
OPERATOR_NAMES = {"matmul": "gemm", "conv": "conv2d", "attention": "fmha", "top-k": "topk", "gated_delta_net": "gdn"}
NO_REASON = "The source states none."
NINE_FIELDS = frozenset({
    "skill_id", "intent", "anchor", "carrier", "precondition", "effect", "evidence", "risk", "scope",
    "verification_log", "requires", "provides", "conflicts",
})  # fmt: skip
FOUR_FIELDS = frozenset({"skill_id", "intent", "preconditions", "scope"})
SCOPE_FIELDS = frozenset({"cases", "languages", "platforms", "prior_actions"})
TARGET_FIELDS = frozenset({"case", "language", "platform", "prior_actions", "capabilities"})
TRIAL_FIELDS = frozenset({"target", "validation", "expected_effect_observed", "held_out"})
GATES = ("compile_passed", "correctness_passed", "profile_passed")
OVERVIEW, CONFIGURATION, SNIPPET = "Overview", "Example configuration", "Code Change Snippet"
PRECONDITION, SCOPE = "Precondition", "Scope"


def from_nine_fields(
    data: bytes | str, *, name: str = "", category: Category | None = None,
    classes: Sequence[PreconditionClass] | None = None,
) -> SkillCard:  # fmt: skip
    """A card of the JSON format with nine fields.

    `classes` gives the class of each precondition where their texts do not begin with one; `category` and `name` stand
    in for what the source has not. Raises UnmappedField.
    """
    card = object_of(decoded(data), "the card", NINE_FIELDS)
    evidence = [mapping_of(item, f"evidence[{at}]") for at, item in enumerate(list_of(card, "evidence"))]
    chosen = category or _category_of(evidence)
    skill_id = text_of(card, "skill_id")
    scope = _scope(object_of(card.get("scope"), "scope", SCOPE_FIELDS), _hardware(card))
    trials = [_trial(item, f"verification_log[{at}]") for at, item in enumerate(list_of(card, "verification_log"))]
    imported = SkillCard(
        name=card_name(name or f"{chosen.value}-{skill_id[:12]}"),
        category=chosen,
        intent=text_of(card, "intent"),
        anchor=text_of(card, "anchor"),
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="text", text=text_of(card, "carrier")),
        preconditions=_preconditions(texts_of(card, "precondition"), "precondition", classes, {}),
        effect=Effect(summary=" ".join(texts_of(card, "effect"))),
        risks=tuple(Risk(text=text) for text in (*texts_of(card, "risk"), *_refused(evidence))),
        scope=scope,
        origins=_origins(scope),
        log=tuple(trials),
        provenance={"imported": "nine fields", "skill_id": skill_id, **_features(card), **_evidence_facts(evidence)},
    )
    return _with_implied(imported)


def from_skill_markdown(text: str, *, category: Category, name: str = "") -> SkillCard:
    """A card of the SKILL.md format with four metadata fields. It names no category: whoever imports it says it.

    The carrier is the overview and the code snippet, both verbatim. Raises UnmappedField, or FrontMatterError.
    """
    front, body = split_front_matter(text)
    card = object_of(front, "the front matter", FOUR_FIELDS)
    parts, chapters = markdown_sections(body), markdown_sections(body, level=1)
    _check_sections(parts, chapters)
    skill_id = text_of(card, "skill_id")
    scope = _scope(object_of(card.get("scope"), "scope", SCOPE_FIELDS - {"prior_actions"}), ())
    reasons = _reasons(parts.get(PRECONDITION, ""))
    configuration = parts.get(CONFIGURATION, "")
    carrier = f"{parts[OVERVIEW]}\n\n{chapters[SNIPPET]}\n"
    imported = SkillCard(
        name=card_name(name or skill_id),
        category=category,
        intent=text_of(card, "intent"),
        anchor=" ".join(re.split(r"\n\s*\n", parts[OVERVIEW].strip())[0].split()),
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="markdown", text=carrier),
        preconditions=_preconditions(texts_of(card, "preconditions"), "preconditions", None, reasons),
        settings={"example configuration": " ".join(configuration.split())} if configuration.strip() else {},
        effect=Effect(summary="The source states no effect."),
        scope=scope,
        origins=_origins(scope),
        provenance={"imported": "SKILL.md with four fields", "skill_id": skill_id},
    )
    return _with_implied(imported)


def _check_sections(parts: Mapping[str, str], chapters: Mapping[str, str]) -> None:
    """Every section has its place in our card, and what makes the carrier is there. Raises UnmappedField."""
    for title, there in ((OVERVIEW, parts), (SNIPPET, chapters)):
        if not there.get(title, "").strip():
            raise UnmappedField(f"# {title}", "the section is not there, and nothing else can be the carrier")
    known = {"", OVERVIEW, PRECONDITION, SCOPE, SNIPPET}
    below = {"", CONFIGURATION}
    unknown = [*(set(chapters) - known), *(set(markdown_sections(chapters[OVERVIEW])) - below)]
    for title in sorted(unknown):
        raise UnmappedField(f"# {title}", "a section that the format has not; move its text to the overview")
    if chapters.get("", "").strip():
        raise UnmappedField("the text before the first heading", "it belongs to no section")


def _category_of(evidence: Sequence[Mapping[str, Any]]) -> Category:
    if not evidence:
        raise UnmappedField("evidence", "empty, so that no category is known; give category=")
    found = mapped([text_of(item, "action_category") for item in evidence], "evidence[].action_category", category_of)
    if len(found) != 1 or not isinstance(found[0], Category):
        raise UnmappedField("evidence[].action_category", f"one category is expected, got {len(found)}; give category=")
    return found[0]


def _preconditions(
    texts: Sequence[str], field: str, classes: Sequence[PreconditionClass] | None, reasons: Mapping[str, str]
) -> tuple[Precondition, ...]:
    if classes is not None and len(classes) != len(texts):
        raise UnmappedField(field, f"{len(texts)} preconditions, but {len(classes)} classes were given")
    found = []
    for at, text in enumerate(texts):
        head, colon, rest = text.partition(":")
        kind = CLASS_NAMES.get(head.strip().lower()) if colon else None
        condition = rest.strip() if kind else text.strip()
        kind = kind or (classes[at] if classes is not None else None)
        if kind is None:
            named = ", ".join(item.value for item in PreconditionClass)
            raise UnmappedField(f"{field}[{at}]", f"its class ({named}) does not show; give classes=")
        found.append(Precondition(kind=kind, condition=condition, reason=reasons.get(kind.value, NO_REASON)))
    return tuple(found)


def _reasons(section: str) -> dict[str, str]:
    """What the section on preconditions says of each class: "- Layout: ..." and the lines that go on with it."""
    found: dict[str, str] = {}
    for item in re.split(r"^- ", section, flags=re.M)[1:]:
        head, _, rest = item.partition(":")
        if kind := CLASS_NAMES.get(head.strip().lower()):
            found[kind.value] = " ".join(rest.split())
    return found


def _scope(scope: Mapping[str, Any], capabilities: Sequence[str]) -> CardScope:
    cases = [OPERATOR_NAMES.get(case.strip().lower(), case.strip().lower()) for case in texts_of(scope, "cases")]
    steps = mapped(texts_of(scope, "prior_actions"), "scope.prior_actions", category_of)
    languages = mapped(texts_of(scope, "languages"), "scope.languages", language_of)
    return CardScope(
        operators=tuple(cases),
        surfaces=tuple(str(language) for language in languages),
        platforms=mapped(texts_of(scope, "platforms"), "scope.platforms", canonical_platform),
        capabilities=mapped(capabilities, "requires", canonical_capability),
        prior=tuple(step for step in steps if isinstance(step, Category)),
    )


def _origins(scope: CardScope) -> tuple[Context, ...]:
    """Where the card says that it comes from; its shape was not recorded, so that any shape counts as its own."""
    return tuple(
        Context(operator=operator, surface=Surface(surface), platform=platform, prior=scope.prior)
        for operator in scope.operators for surface in scope.surfaces for platform in scope.platforms
        if ANY not in (operator, surface, platform)
    )  # fmt: skip


def _hardware(card: Mapping[str, Any]) -> list[str]:
    """Features required at the locus "hardware" are capabilities."""
    found = [mapping_of(item, "requires") for item in list_of(card, "requires")]
    return [text_of(item, "name") for item in found if item.get("locus") == "hardware"]


def _features(card: Mapping[str, Any]) -> dict[str, str]:
    """The feature contracts in words: nothing here checks them, but nothing is lost."""
    found = {}
    for field in ("requires", "provides", "conflicts"):
        pairs = [mapping_of(item, field) for item in list_of(card, field)]
        if pairs:
            found[field] = ", ".join(f"{text_of(pair, 'locus')}: {text_of(pair, 'name')}" for pair in pairs)
    return found


def _evidence_facts(evidence: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Fingerprints, loci, edits and validations of the source. They lead to no lineage of ours, so are no evidence."""
    taken = ("action_category", "rejected_evidence")
    return {
        f"evidence[{at}].{field}": value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for at, item in enumerate(evidence)
        for field, value in sorted(item.items())
        if field not in taken
    }


def _refused(evidence: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the source's own gate refused on the way: risks."""
    named = {f"evidence[{at}].rejected_evidence": item.get("rejected_evidence", []) for at, item in enumerate(evidence)}
    return [text for field in named for text in texts_of(named, field)]


def _trial(item: Any, field: str) -> Trial:
    trial = object_of(item, field, TRIAL_FIELDS)
    target = object_of(trial.get("target"), f"{field}.target", TARGET_FIELDS)
    validation = mapping_of(trial.get("validation"), f"{field}.validation")
    if not all(validation.get(gate) is True for gate in GATES):
        outcome = TrialOutcome.REJECTED
    else:
        outcome = TrialOutcome.SUCCESS if trial.get("expected_effect_observed") is True else TrialOutcome.NO_EFFECT
    scope = _scope(
        {
            "cases": [text_of(target, "case")],
            "languages": [text_of(target, "language")],
            "platforms": [text_of(target, "platform")],
            "prior_actions": list_of(target, "prior_actions"),
        },
        (),
    )
    if not (origins := _origins(scope)):
        raise UnmappedField(f"{field}.target", "'*' is no place at which anything was tried")
    note = json.dumps({"validation": validation, "capabilities": target.get("capabilities", [])}, sort_keys=True)
    return Trial(context=origins[0], outcome=outcome, held_out=trial.get("held_out") is True, imported=True, note=note)


def _with_implied(card: SkillCard) -> SkillCard:
    """The card with the capabilities that its category and its code show, which the source had no field for."""
    every = sorted({*card.scope.capabilities, *implied_needs(card)})
    return msgspec.structs.replace(card, scope=msgspec.structs.replace(card.scope, capabilities=tuple(every)))
