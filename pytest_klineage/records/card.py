"""SkillCard: one optimization that can be used again, with the conditions, effects and failures that go with it.

A card is the nine fields of the paper (intent, anchor, carrier, precondition, effect, evidence, risk, scope and
verification log) and what a reader needs to trust them. Where cards lie and how they are found is the library's.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pytest_klineage.records.lineage import Category, content_digest
from pytest_klineage.records.source import Surface
from pytest_klineage.records.verdict import SCHEMA_VERSION, Code, Interval

ANY = "*"
"""In a scope: no restriction."""


class CardStatus(StrEnum):
    """How far a card has come. Only admitted cards are retrieved unless others are asked for."""

    CANDIDATE = "candidate"
    """A hypothesis: lifted or imported, not yet shown on a held-out target."""
    ADMITTED = "admitted"
    """At least one held-out roundtrip has succeeded."""
    RETIRED = "retired"
    """Kept for its log; never retrieved."""


class CarrierKind(StrEnum):
    """What the code-bearing hint is. None of them is executed."""

    DIFF = "diff"
    PSEUDOCODE = "pseudocode"
    SNIPPET = "snippet"
    SCHEDULE = "schedule"
    ANNOTATION = "annotation"


class PreconditionClass(StrEnum):
    """What a precondition is about: every card answers all five."""

    DATA_TYPE = "data_type"
    """Numbers: representation, range, rounding, order of sums."""
    LAYOUT = "layout"
    """Where elements lie: strides, alignment, divisibility, who owns which."""
    STORAGE = "storage"
    """Where room is: registers, shared memory, caches, lifetimes of buffers."""
    PIPELINE = "pipeline"
    """What happens when: producers, consumers, barriers, reuse of stages."""
    HARDWARE = "hardware"
    """What the machine must have: instructions, sizes, limits."""


class TrialOutcome(StrEnum):
    """How a roundtrip ended."""

    SUCCESS = "success"
    """The kernel was accepted, and the expected effect was measured."""
    NO_EFFECT = "no_effect"
    """Right, but not as much faster as the card says."""
    REJECTED = "rejected"
    """The gate refused the kernel."""
    NOT_MATERIALIZED = "not_materialized"
    """No kernel came of it."""
    OUT_OF_BUDGET = "out_of_budget"


class AdmissionRule(StrEnum):
    """Where a trial began, and how much of the expected effect it had to show."""

    STRICT = "strict"
    """Another operator's kernel, or one at another shape that is not what the card's own step began from; 70 %."""
    PREDECESSOR = "predecessor"
    """The paper's: the very kernel that the card's own step began from; 70 % as well. It admits no card here."""
    LANGUAGE = "language"
    """A kernel in another language of the platform before its own step of the card's category; 70 %. It admits none."""
    SQUARE_ROOT = "square_root"
    """Until November 2026: another operator, or the card's own predecessor at another shape; the square root of it."""


class Carrier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hint that bears code. It goes into prompts verbatim."""

    kind: CarrierKind
    language: str
    """Of the text, as fenced blocks name it: "cpp", "cuda", "python", "diff", "text"."""
    text: str


class Precondition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that must hold, and what fails when it does not."""

    kind: PreconditionClass
    condition: str
    """What must hold, or that nothing is needed; no setting of one instance."""
    reason: str
    """The operation that needs it."""


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the card is good for. A speedup is measured over its span, never multiplied from others."""

    summary: str
    speedup: Interval | None = None
    """Time before the span over time after it; None when it was not measured."""
    span: tuple[str, ...] = ()
    """Digests of the neighbouring transitions that the speedup is over."""
    case: str = ""
    """Id of the case that it was measured on."""
    device: str = ""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transition that the card was lifted from."""

    lineage: str
    """Name of the lineage, such as "gemm/cpu-cpp"."""
    transition: str
    """Digest of the transition."""


class Risk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong when a condition does not hold."""

    text: str
    code: Code | None = None
    """The gate's reason where it was seen."""
    evidence: str = ""
    """Digest of the transition whose refused proposals show it."""


class CardScope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the card is declared to apply. Empty or "*" is no restriction; retrieval uses what was verified instead."""

    operators: tuple[str, ...] = ()
    shape_classes: tuple[str, ...] = ()
    """As `library.normalise.shape_class` writes them."""
    dtypes: tuple[str, ...] = ()
    surfaces: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    """What the platform must have: names of `library.normalise.CAPABILITIES`."""
    prior: tuple[Category, ...] = ()
    """Steps that must have been made before."""


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place at which something was tried: case, language, platform, and what had been done before."""

    operator: str
    shape: dict[str, int] = {}
    dtype: str = ""
    surface: Surface
    platform: str
    prior: tuple[Category, ...] = ()


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One roundtrip: a kernel was to be made with this card alone. Failed ones stay."""

    context: Context
    outcome: TrialOutcome
    held_out: bool
    """Whether the context is not one that the card was lifted from: see `library.normalise.held_out`."""
    code: Code | None = None
    """The gate's deciding reason, if it was asked."""
    speedup: Interval | None = None
    """Time before over time after, as measured in this trial."""
    source_digest: str = ""
    """The kernel that was made."""
    method: str = ""
    """Who made it: backend and model."""
    tried_at: str = ""
    """UTC, ISO 8601."""
    note: str = ""
    rule: AdmissionRule = AdmissionRule.SQUARE_ROOT
    expected: float | None = None
    """Speedup of the lineage's own step, of which the rule asks for a part; None where the card's own was meant."""
    imported: bool = False
    """Taken over from elsewhere: not judged by this gate, and no reason to admit the card."""


class SkillCard(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="schema_version", tag=SCHEMA_VERSION,
):  # fmt: skip
    """One optimization that can be used again."""

    name: str
    """Lowercase letters, digits and single hyphens, at most 64; also the folder's name."""
    status: CardStatus = CardStatus.CANDIDATE
    category: Category
    intent: str
    """The code construct that is changed and the property of the platform that is used."""
    anchor: str
    """Where it acts: the construct in source or IR by which the place is recognised."""
    carrier: Carrier
    preconditions: tuple[Precondition, ...]
    settings: dict[str, str] = {}
    """Figures of the instance it comes from (tile sizes, threads, stages): a start, no condition."""
    effect: Effect
    evidence: tuple[Evidence, ...] = ()
    risks: tuple[Risk, ...] = ()
    scope: CardScope
    origins: tuple[Context, ...] = ()
    """Contexts of the transitions in `evidence`."""
    log: tuple[Trial, ...] = ()
    """The verification log."""
    provenance: dict[str, str] = {}
    """Digests and versions: lineage, prompts, model, importer."""

    @property
    def digest(self) -> str:
        """SHA-256 over the card's content, in hexadecimal."""
        return content_digest(self)

    @property
    def successes(self) -> tuple[Trial, ...]:
        """Held-out trials of this gate that succeeded: what admission rests on."""
        return tuple(
            trial for trial in self.log
            if trial.held_out and not trial.imported and trial.outcome is TrialOutcome.SUCCESS
        )  # fmt: skip

    @property
    def verified(self) -> tuple[Context, ...]:
        """Where the card is known to work: the transitions it was lifted from, and its successes."""
        return (*self.origins, *(trial.context for trial in self.successes))
