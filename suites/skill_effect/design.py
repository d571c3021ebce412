"""The design of the experiment as records: read from experiment.toml, and what is frozen of it. Nothing is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.derive import without_header
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.lineages import find_hand_made, load_lineage
from pytest_klineage.lab.library.rendering import prompt_text
from pytest_klineage.lab.library.retrieval import RetrievalTarget
from pytest_klineage.lab.studies.arms import cards_for, placebo_for
from pytest_klineage.lab.studies.chains import ROOT as NAIVE
from pytest_klineage.lab.studies.effect import Study
from pytest_klineage.lab.studies.pilot import Decision
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase, KernelSource, Option, SkillCard, Surface
from pytest_klineage.results.packed import read_lines
from pytest_klineage.surfaces import read_source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = HERE / "experiment.toml"
THRESHOLDS = HERE / "thresholds.toml"
"""What the pilot sets; not in prompts, and so not in the design's digest."""
KEPT = HERE / "frozen_cards.jsonl"
"""Frozen cards whose text in skills/ is another by now; it is packed."""
MARK = "# Frozen: written by --publish.\n"
"""What stands behind it follows from what stands before it, and from the repository."""
NONE, CARDS, LABELS, PLACEBO = "none", "cards", "labels", "placebo"


class Kin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A case of an operator with lineages."""

    operator: str
    shape: tuple[int, ...]
    dtype: str


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A held-out target."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    reference: str
    described: str
    """The reference in a prompt."""
    root: str
    requires: tuple[str, ...]
    options: dict[str, Option] = {}
    kin: Kin | None = None


class Pilot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How targets are chosen."""

    arm: str
    replies: int
    rank: int
    """Of the reply, the fastest first, whose speed is the target's threshold."""


class Broken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel of a lineage, broken in one place."""

    lineage: str
    state: str
    card: str
    find: str
    replace: str


class Repair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The repair task."""

    arms: tuple[str, ...]
    at_least: float
    run_timeout_s: float
    shapes: dict[str, tuple[int, ...]]
    kernels: dict[str, Broken]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows from the design; by target, arm and shot's number where it has them."""

    design: str
    """SHA-256 of the part before the mark."""
    cards: dict[str, dict[str, list[str]]]
    """Names of cards with the first digits of their digests."""
    prompts: dict[str, dict[str, str]]
    """SHA-256 of everything that a first prompt shows."""


class Design(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole experiment."""

    platform: str
    surface: Surface
    machine: str
    model: str
    prompt_set: int
    seed: int
    repeats: int
    shots: int
    budget_usd: float
    success: float
    cards_per_dimension: int
    cards_at_most: int
    arms: tuple[str, ...]
    contrasts: tuple[tuple[str, str], ...]
    gate: dict[str, float]
    pilot: Pilot
    targets: dict[str, Target]
    repair: Repair
    frozen: Frozen | None = None

    @property
    def study(self) -> Study:
        """What is compared."""
        return Study(contrasts=self.contrasts, success=self.success, of_target=thresholds(), seed=self.seed)

    def case(self, name: str, *, of_root: bool = False) -> KernelCase:
        """A target's case. The root may have any speed and instructions."""
        target = self.targets[name]
        operator = str(ROOT / target.operator) if ".py:" in target.operator else target.operator
        chosen = make_case(
            operator, target.shape, target.dtype, target.reference, at_least=self.success, **target.options
        )
        if of_root:
            return msgspec.structs.replace(chosen, at_least=1e-6)
        return msgspec.structs.replace(chosen, requires=target.requires)

    def root(self, name: str) -> KernelSource:
        """The naive kernel of a target."""
        source = without_header(read_source(ROOT / self.targets[name].root))
        return msgspec.structs.replace(source, label=NAIVE)

    def cards(self, name: str, arm: str) -> tuple[SkillCard, ...]:
        """The cards whose text or name a prompt of this arm shows: the frozen ones, whatever the library has since."""
        if arm == NONE:
            return ()
        if self.frozen is not None:
            return tuple(map(frozen_card, self.frozen.cards[name][arm]))
        chosen = self._retrieved(name)
        return placebo_for(library(), self.platform, chosen) if arm == PLACEBO else chosen

    def _retrieved(self, name: str) -> tuple[SkillCard, ...]:
        own, kin = self.case(name), self.targets[name].kin
        near = own if kin is None else make_case(kin.operator, kin.shape, kin.dtype, "torch")
        target = RetrievalTarget(case=near, surface=self.surface, platform=self.platform)
        return cards_for(library(), target, own, k=self.cards_per_dimension, at_most=self.cards_at_most)

    def broken(self, name: str) -> tuple[KernelCase, KernelSource, KernelSource]:
        """Of a repair: the case, the broken kernel, the whole one. Raises UsageError for a place that is not there."""
        wanted = self.repair.kernels[name]
        whole = state_of(wanted.lineage, wanted.state)
        operator = wanted.lineage.partition("/")[0]
        dtype = {"gemm": "bf16", "fmha": "fp16"}[operator]
        case = make_case(operator, self.repair.shapes[operator], dtype, "torch", at_least=self.repair.at_least)
        (file,) = whole.files
        if file.text.count(wanted.find) != 1:
            raise UsageError(f"{name}: {wanted.find!r} stands {file.text.count(wanted.find)} times in {wanted.state}")
        text = file.text.replace(wanted.find, wanted.replace)
        files = (msgspec.structs.replace(file, name="kernel.cu", text=text),)
        return case, msgspec.structs.replace(whole, files=files, label="broken"), whole

    def repair_cards(self, name: str, arm: str) -> tuple[SkillCard, ...]:
        """The card that knows what is broken, or none."""
        return tuple(card for card in library() if arm == CARDS and card.name == self.repair.kernels[name].card)


@cache
def library() -> tuple[SkillCard, ...]:
    """The repository's cards."""
    return tuple(find_cards(ROOT / "skills"))


@cache
def kept_cards() -> dict[str, SkillCard]:
    """Cards as they were when the experiment was frozen, of those that the library has changed since; by digest."""
    return {card_digest(card): card for card in read_lines(KEPT, SkillCard)}


def frozen_card(digest: str) -> SkillCard:
    """The card of a digest: the library's, or the one that was kept where that differs.

    One that is in neither is the library's of that name: its digest shows the change. Raises UsageError without one.
    """
    name = digest.partition("@")[0]
    own = next((card for card in library() if card.name == name), None)
    if own is not None and card_digest(own) == digest:
        return own
    found = kept_cards().get(digest, own)
    if found is None:
        raise UsageError(f"{FILE.name} has a frozen card that is neither in skills/ nor in {KEPT.name}: {name}")
    return found


@cache
def state_of(lineage: str, state: str) -> KernelSource:
    """A kernel of a lineage that an author wrote, without what he wrote above the code."""
    for folder in find_hand_made(ROOT / "experts"):
        stored = load_lineage(folder)
        if stored.lineage.name == lineage:
            index = [one.name for one in stored.lineage.states].index(state)
            return without_header(stored.sources[index])
    raise UsageError(f"there is no lineage {lineage}")


def read_design(path: Path = FILE) -> Design:
    """The design. Raises UsageError for unknown or missing fields."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Design)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path.name}: {error}") from error


def thresholds(path: Path = THRESHOLDS) -> dict[str, float]:
    """By target, from which share of the reference's speed on a right kernel is a success; empty before the pilot."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, float]) if path.exists() else {}


def write_thresholds(found: Mapping[str, float | Decision], path: Path = THRESHOLDS) -> None:
    """Keep what a pilot has set, of all targets. Raises UsageError while one has no threshold: the file stays then."""
    left = [f"{target} ({one.value})" for target, one in found.items() if isinstance(one, Decision)]
    if left:
        raise UsageError(f"{path.name} stays as it is, since targets have no threshold yet: {', '.join(left)}")
    path.write_text("".join(f"{target} = {least:.2f}\n" for target, least in found.items()))


def digest_of(path: Path = FILE) -> str:
    """SHA-256 of the part of the file that people write."""
    return hashlib.sha256(path.read_text().partition(MARK)[0].encode()).hexdigest()


def card_digest(card: SkillCard) -> str:
    """A card's name with the first digits of the digest of what a prompt shows of it."""
    return f"{card.name}@{hashlib.sha256(prompt_text(card).encode()).hexdigest()[:16]}"


def quoted(text: str) -> str:
    """A name as TOML has it."""
    return f'"{text}"'


def frozen_part(frozen: Frozen) -> str:
    """The part behind the mark."""
    lines = [MARK, "[frozen]\n", f'design = "{frozen.design}"\n']
    for target, arms in frozen.cards.items():
        lines.append(f"\n[frozen.cards.{target}]\n")
        lines += [f"{arm} = [{', '.join(map(quoted, names))}]\n" for arm, names in arms.items()]
    for target, prompts in frozen.prompts.items():
        lines.append(f"\n[frozen.prompts.{target}]\n")
        lines += [f'{arm} = "{digest}"\n' for arm, digest in prompts.items()]
    return "".join(lines)
