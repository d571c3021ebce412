"""On what a card is tried: kernels without its step, by two rules, in an order that the card's content fixes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.derive import without_header
from pytest_klineage.lab.induction.lift_groups import LEAST_EFFECT, MECHANISMS, Site, not_worth_it, timed_sites
from pytest_klineage.lab.induction.retime import rederived_source
from pytest_klineage.lab.library.cards import untried
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.normalise import held_out
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import named_shape
from pytest_klineage.records import AdmissionRule, Category, Context, KernelCase, KernelSource, SkillCard, Surface

SHARE = 0.7
"""Of what the expected speedup is above 1, the part that a trial must show."""
TRIALS = {AdmissionRule.STRICT: 2, AdmissionRule.PREDECESSOR: 1, AdmissionRule.LANGUAGE: 1}
"""How often a card is tried by each rule."""
OWN_TO_EACH = (Category.ARITHMETIC, Category.TEMPLATIZE, Category.AUTOTUNE)
"""Categories whose steps have no more than the name in common, also on a CPU."""
Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""By operator: shapes to try cards at, in the operator's order of axes."""


class AdmissionTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that a card is tried on, and what is expected there."""

    case: KernelCase
    """With `at_least`, once what is expected is known: the speedup over `state` that the trial must show."""
    platform: str
    surface: Surface
    state: KernelSource
    """The kernel to begin from, and to be compared with."""
    prior: tuple[Category, ...]
    """Steps that were made before it."""
    why: str
    """Where the state comes from and what is held out about the place."""
    rule: AdmissionRule
    expected: float | None = None
    """Speedup that the lineage's own step has; None where it was not timed, or a trial of old."""
    after: KernelSource | None = None
    """Where that step was not timed: the kernel that it leads to. The trial times it first."""

    @property
    def context(self) -> Context:
        """The place, as a card's log names it."""
        return Context(
            operator=self.case.operator, shape=dict(self.case.shape), dtype=self.case.dtype, surface=self.surface,
            platform=self.platform, prior=self.prior,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """For files: the case and the state's digest."""
        return f"{self.case.id}-{self.state.digest[:8]}"

    def expecting(self, speedup: float) -> AdmissionTarget:
        """The target with what is expected, and what must be shown of it."""
        case = msgspec.structs.replace(self.case, at_least=required_speedup(speedup))
        return msgspec.structs.replace(self, case=case, expected=speedup)


def required_speedup(expected: float) -> float:
    """What a trial must show at least, to three decimals: SHARE of the gain, such as 1.7 of 2."""
    return float(round(1 + SHARE * (expected - 1), 3))


def targets_for(card: SkillCard, lineages: Iterable[StoredLineage], shapes: Shapes) -> list[AdmissionTarget]:
    """Targets for a card, in the order in which they are tried; the same card and lineages give the same list.

    By the strict rule first other operators' kernels before their step of the card's category, at their own shape;
    then, at other shapes, re-derived kernels to which the card's own step was never applied. By the paper's rule the
    kernel before the step whose effect the card states; last, kernels in other languages. Raises UsageError for a card
    without a measured effect, or an invalid shape.
    """
    speedup = card.effect.speedup
    if speedup is None or speedup.estimate <= 1:
        raise UsageError(
            f"the card {card.name} states no measured speedup above 1: there is nothing that a trial could show; lift "
            "it from a transition with a measured effect"
        )
    known = list(lineages)
    sites = timed_sites(known)
    strict = [
        *_ranked(card, _of_other_operators(card, sites)),
        *_ranked(card, _at_other_shapes(card, sites, known, shapes)),
    ]
    chosen = {target.name: target for target in strict if held_out(target.context, card.origins)}
    return [
        *chosen.values(), *_own_predecessor(card, sites, speedup.estimate), *_ranked(card, _in_others(card, sites))
    ]  # fmt: skip


def _ranked(card: SkillCard, targets: Iterable[AdmissionTarget]) -> list[AdmissionTarget]:
    """In an order without choice: by a digest over the card, as it was before any trial, and the target."""
    seed = untried(card).digest
    return sorted(targets, key=lambda target: hashlib.sha256(f"{seed} {target.name}".encode()).hexdigest())


def _of_other_operators(card: SkillCard, sites: Iterable[Site]) -> Iterator[AdmissionTarget]:
    """Of each other operator the first step that adds the card's mechanism, if it pays or may pay."""
    operators = {origin.operator for origin in card.origins}
    kinds = {(origin.platform, origin.surface) for origin in card.origins}
    for site in sites:
        lineage = site.lineage
        if lineage.operator in operators or (lineage.platform, lineage.surface) not in kinds:
            continue
        if adds(site, card.category) and may_pay(site):
            after = site.after if site.effect is None else None
            why = f"{site.position}: a kernel of another operator before its own step of {card.category.value}"
            yield _target(site, site.before, lineage.case.shape, AdmissionRule.STRICT, why, after)


def _in_others(card: SkillCard, sites: Iterable[Site]) -> Iterator[AdmissionTarget]:
    """Kernels in other languages of the platform before their step of the card's category, if it pays or may pay."""
    platforms = {origin.platform for origin in card.origins}
    surfaces = {origin.surface for origin in card.origins}
    for site in sites:
        lineage = site.lineage
        elsewhere = lineage.platform in platforms and lineage.surface not in surfaces
        if elsewhere and adds(site, card.category) and may_pay(site):
            after = site.after if site.effect is None else None
            why = f"{site.position}: a kernel in {lineage.surface.value} before its own step of {card.category.value}"
            yield _target(site, site.before, lineage.case.shape, AdmissionRule.LANGUAGE, why, after)


def _at_other_shapes(
    card: SkillCard, sites: Iterable[Site], lineages: Sequence[StoredLineage], shapes: Shapes
) -> Iterator[AdmissionTarget]:
    """What a model made of the step before each of the card's own, at shapes that its lineage has not."""
    stored_of = {step.digest: stored for stored in lineages for step in stored.lineage.transitions}
    for site in _own(card, sites):
        if site.begin == 0 or site.effect is None:
            continue
        made = rederived_source(stored_of[site.transition.digest], site.begin - 1)
        if made is None:
            continue
        for shape in shapes.get(site.lineage.operator, ()):
            named = named_shape(operator_of(site.lineage.case), shape)
            why = f"{site.position}: the kernel before it as a model re-derived it, at another shape"
            yield _target(site, made, named, AdmissionRule.STRICT, why)


def _own_predecessor(card: SkillCard, sites: Iterable[Site], expected: float) -> Iterator[AdmissionTarget]:
    """The kernel before the step or span whose effect the card states, where it was measured."""
    for site in _own(card, sites):
        if site.span == card.effect.span:
            why = f"{site.position}: the card's own predecessor, where its effect was measured"
            target = _target(site, site.before, site.lineage.case.shape, AdmissionRule.PREDECESSOR, why)
            yield target.expecting(expected)


def _own(card: SkillCard, sites: Iterable[Site]) -> list[Site]:
    """The steps, or the span, that the card was lifted from."""
    cited = {item.transition for item in card.evidence}
    whole = len(card.effect.span) > 1
    return [site for site in sites if (site.first is not None) == whole and cited.issuperset(site.span)]


def adds(site: Site, category: Category) -> bool:
    """Whether a step adds the category, the kernel before it lacks that, and it means the same in every operator."""
    same = site.transition.category is category and category not in site.done
    return same and (category in MECHANISMS or not site.on_gpu) and category not in OWN_TO_EACH


def may_pay(site: Site) -> bool:
    """Whether a step is worth a trial: by its effect, or as long as it has none, by its kernels' own verdicts.

    Two timings against a third kernel only choose here; what is expected is timed.
    """
    if site.effect is not None:
        return not not_worth_it(site)
    if site.first is not None:
        return False
    before, after = (state.timing for state in site.lineage.states[site.index : site.index + 2])
    return before is None or after is None or after.speedup.estimate >= LEAST_EFFECT * before.speedup.estimate


def _target(
    site: Site, source: KernelSource, shape: Mapping[str, int], rule: AdmissionRule, why: str,
    after: KernelSource | None = None,
) -> AdmissionTarget:  # fmt: skip
    """Raises UsageError for a shape that the operator does not allow."""
    lineage = site.lineage
    case = lineage.case.at_shape(dict(shape))
    operator_of(case).validate(case)
    # Neither a name nor a header that hints at the lineage: they must not lead the model that gets the kernel.
    bare = without_header(source) if lineage.hand_made else source
    target = AdmissionTarget(
        case=case, platform=lineage.platform, surface=lineage.surface, prior=site.done, why=why, rule=rule, after=after,
        state=msgspec.structs.replace(bare, label="state"),
    )  # fmt: skip
    return target if site.effect is None else target.expecting(site.effect.estimate)
