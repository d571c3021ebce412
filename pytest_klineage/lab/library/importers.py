"""Cards of other tools' formats become cards of ours: JSON with nine fields, and SKILL.md with four metadata fields.

What is imported is a candidate, whatever it was elsewhere: this gate has not seen it. What has no place in our card is
an error that names the field, never left out in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.front_matter import markdown_sections, split_front_matter
from pytest_klineage.lab.library.normalise import canonical_capability, canonical_platform, with_implied_needs
from pytest_klineage.lab.library.rendering import NAME, NAME_LIMIT
from pytest_klineage.operators import by_alias
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

T = TypeVar("T")
Text: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\S")]
"""A text that is not blank."""
CATEGORY_NAMES = {
    "tile": Category.TILE_STAGE, "sm_stage": Category.TILE_STAGE, "shared_memory_staging": Category.TILE_STAGE,
    "cp_async": Category.PIPELINE, "cp_async_pipeline": Category.PIPELINE, "software_pipelining": Category.PIPELINE,
    "vectorize": Category.VECTORIZE_GLOBAL, "warp_specialization": Category.WARP_SPECIALIZE, "tma": Category.TMA_LOAD,
    "gemm_phase_decomposition": Category.PHASE_DECOMPOSITION, "warp_shuffle_scan": Category.SHUFFLE_SCAN,
    "multi_threaded_block_parallelism": Category.BLOCK_PARALLEL, "threads": Category.BLOCK_PARALLEL,
    "persistent_scheduling": Category.PERSISTENT, "cluster_multicast": Category.MULTICAST,
}  # fmt: skip
"""Words for our categories that are not their names; written with underscores."""
LANGUAGE_NAMES = {"c++": Surface.CPP, "cuda c++": Surface.CUDA, "cuda-c++": Surface.CUDA}
CLASS_NAMES = {
    "data type": PreconditionClass.DATA_TYPE, "data types": PreconditionClass.DATA_TYPE,
    "dtype": PreconditionClass.DATA_TYPE, "layout": PreconditionClass.LAYOUT, "storage": PreconditionClass.STORAGE,
    "pipeline": PreconditionClass.PIPELINE, "hardware": PreconditionClass.HARDWARE,
}  # fmt: skip
NO_REASON = "The source states none."
GATES = ("compile_passed", "correctness_passed", "profile_passed")
OVERVIEW, CONFIGURATION, SNIPPET = "Overview", "Example configuration", "Code Change Snippet"
PRECONDITION, SCOPE = "Precondition", "Scope"


class UnmappedField(UsageError):
    """A field of a foreign card that has no place in ours, or that is not what its format says."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"the card cannot be imported: {field}: {problem}")


class _Scope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cases: list[str] = []
    languages: list[str] = []
    platforms: list[str] = []
    prior_actions: list[str] = []


class _Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    case: Text
    language: Text
    platform: Text
    prior_actions: list[str] = []
    capabilities: list[Any] = []


class _Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    target: _Target
    validation: dict[str, Any]
    expected_effect_observed: bool = False
    held_out: bool = False


class _Feature(msgspec.Struct, frozen=True):
    locus: Text
    name: Text


class _Evidence(msgspec.Struct, frozen=True):
    action_category: str = ""
    rejected_evidence: list[str] = []


class _NineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skill_id: Text
    intent: Text
    anchor: Text
    carrier: Text
    scope: _Scope
    precondition: list[str] = []
    effect: list[str] = []
    evidence: list[dict[str, Any]] = []
    """The source's own fields too, which are kept in words."""
    risk: list[str] = []
    verification_log: list[_Attempt] = []
    requires: list[_Feature] = []
    provides: list[_Feature] = []
    conflicts: list[_Feature] = []


class _FourScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cases: list[str] = []
    languages: list[str] = []
    platforms: list[str] = []


class _FourFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skill_id: Text
    intent: Text
    scope: _FourScope
    preconditions: list[str] = []


def from_nine_fields(
    data: bytes | str, *, name: str = "", category: Category | None = None,
    classes: Sequence[PreconditionClass] | None = None,
) -> SkillCard:  # fmt: skip
    """A card of the JSON format with nine fields.

    `classes` gives the class of each precondition where their texts do not begin with one; `category` and `name` stand
    in for what the source has not. Raises UnmappedField.
    """
    try:
        found = json.loads(data)
    except ValueError as error:
        raise UnmappedField("the card", f"not JSON: {error}") from error
    card = _converted(found, _NineFields)
    evidence = _converted(card.evidence, list[_Evidence], "evidence")
    chosen = category or _category_in(evidence)
    capabilities = [feature.name for feature in card.requires if feature.locus == "hardware"]
    scope = _scope(card.scope, capabilities)
    refused = (text for item in evidence for text in item.rejected_evidence)
    imported = SkillCard(
        name=_card_name(name or f"{chosen.value}-{card.skill_id[:12]}"),
        category=chosen,
        intent=card.intent,
        anchor=card.anchor,
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="text", text=card.carrier),
        preconditions=_preconditions(card.precondition, "precondition", classes, {}),
        effect=Effect(summary=" ".join(card.effect)),
        risks=tuple(Risk(text=text) for text in (*card.risk, *refused)),
        scope=scope,
        origins=_origins(scope),
        log=tuple(_trial(item, f"verification_log[{at}]") for at, item in enumerate(card.verification_log)),
        provenance={"imported": "nine fields", "skill_id": card.skill_id, **dict(_in_words(card))},
    )
    return with_implied_needs(imported)


def from_skill_markdown(text: str, *, category: Category, name: str = "") -> SkillCard:
    """A card of the SKILL.md format with four metadata fields. It names no category: the caller gives one.

    The carrier is the overview and the code snippet, both verbatim. Raises UnmappedField, or FrontMatterError.
    """
    front, body = split_front_matter(text)
    card = _converted(front, _FourFields)
    parts, chapters = markdown_sections(body), markdown_sections(body, level=1)
    _check_sections(parts, chapters)
    scope = _scope(_Scope(card.scope.cases, card.scope.languages, card.scope.platforms), ())
    configuration = " ".join(parts.get(CONFIGURATION, "").split())
    carrier = f"{parts[OVERVIEW]}\n\n{chapters[SNIPPET]}\n"
    imported = SkillCard(
        name=_card_name(name or card.skill_id),
        category=category,
        intent=card.intent,
        anchor=" ".join(re.split(r"\n\s*\n", parts[OVERVIEW].strip())[0].split()),
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="markdown", text=carrier),
        preconditions=_preconditions(card.preconditions, "preconditions", None, _reasons(parts.get(PRECONDITION, ""))),
        settings={"example configuration": configuration} if configuration else {},
        effect=Effect(summary="The source states no effect."),
        scope=scope,
        origins=_origins(scope),
        provenance={"imported": "SKILL.md with four fields", "skill_id": card.skill_id},
    )
    return with_implied_needs(imported)


def _converted(value: Any, kind: type[T], field: str = "") -> T:
    """The value as its format has it. Raises UnmappedField, with the path of the field that is not."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise UnmappedField(f"{field}{path.rstrip('`')}".lstrip(".") or "the card", problem) from error


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


def _category_in(evidence: Sequence[_Evidence]) -> Category:
    if not evidence:
        raise UnmappedField("evidence", "empty, so that no category is known; give category=")
    field = "evidence[].action_category"
    found = _mapped([item.action_category for item in evidence], field, _category_of)
    if len(found) != 1 or not isinstance(found[0], Category):
        raise UnmappedField(field, f"one category is expected, got {len(found)}; give category=")
    return found[0]


def _card_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(name) > NAME_LIMIT or not NAME.fullmatch(name):
        raise UnmappedField("skill_id", f"{name!r} cannot be a card's name of at most {NAME_LIMIT}; give name=")
    return name


def _mapped(values: Sequence[str], field: str, canonical: Callable[[str], T]) -> tuple[T | str, ...]:
    """Each value in our words; "*" stays. Raises UnmappedField."""
    try:
        return tuple(dict.fromkeys(value if value == ANY else canonical(value) for value in values))
    except UnknownName as error:
        raise UnmappedField(field, str(error)) from error


def _language_of(name: str) -> Surface:
    lower = name.strip().lower()
    if lower in list(Surface):
        return Surface(lower)
    if lower in LANGUAGE_NAMES:
        return LANGUAGE_NAMES[lower]
    raise UnknownName("surface", name, list(Surface))


def _category_of(name: str) -> Category:
    lower = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if lower in list(Category):
        return Category(lower)
    if lower in CATEGORY_NAMES:
        return CATEGORY_NAMES[lower]
    raise UnknownName("category", name, list(Category))


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


def _scope(scope: _Scope, capabilities: Sequence[str]) -> CardScope:
    cases = [by_alias(case.strip().lower()) for case in scope.cases]
    steps = _mapped(scope.prior_actions, "scope.prior_actions", _category_of)
    return CardScope(
        operators=tuple(cases),
        surfaces=tuple(map(str, _mapped(scope.languages, "scope.languages", _language_of))),
        platforms=_mapped(scope.platforms, "scope.platforms", canonical_platform),
        capabilities=_mapped(capabilities, "requires", canonical_capability),
        prior=tuple(step for step in steps if isinstance(step, Category)),
    )


def _origins(scope: CardScope) -> tuple[Context, ...]:
    """Where the card says that it comes from; its shape was not recorded, so that any shape counts as its own."""
    return tuple(
        Context(operator=operator, surface=Surface(surface), platform=platform, prior=scope.prior)
        for operator in scope.operators for surface in scope.surfaces for platform in scope.platforms
        if ANY not in (operator, surface, platform)
    )  # fmt: skip


def _in_words(card: _NineFields) -> Iterator[tuple[str, str]]:
    """What nothing here checks, so that it is not lost: feature contracts; fingerprints, loci, edits, validations.

    They lead to no lineage of ours, so they are no evidence.
    """
    for field in ("requires", "provides", "conflicts"):
        if features := getattr(card, field):
            yield field, ", ".join(f"{feature.locus}: {feature.name}" for feature in features)
    for at, item in enumerate(card.evidence):
        for field in sorted(item.keys() - {*_Evidence.__struct_fields__}):
            value = item[field]
            yield f"evidence[{at}].{field}", value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _trial(item: _Attempt, field: str) -> Trial:
    if not all(item.validation.get(gate) is True for gate in GATES):
        outcome = TrialOutcome.REJECTED
    else:
        outcome = TrialOutcome.SUCCESS if item.expected_effect_observed else TrialOutcome.NO_EFFECT
    target = item.target
    origins = _origins(_scope(_Scope([target.case], [target.language], [target.platform], target.prior_actions), ()))
    if not origins:
        raise UnmappedField(f"{field}.target", "'*' is no place at which anything was tried")
    note = json.dumps({"validation": item.validation, "capabilities": target.capabilities}, sort_keys=True)
    return Trial(context=origins[0], outcome=outcome, held_out=item.held_out, imported=True, note=note)
