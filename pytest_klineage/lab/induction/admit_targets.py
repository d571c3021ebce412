"""On what a card is tried: kernels without its step at places that it was not lifted from, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.normalise import held_out
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import named_shape
from pytest_klineage.records import Category, Context, KernelCase, KernelSource, SkillCard, Surface

SHARE = 0.5
"""Of the card's speedup, in logarithms, that a trial must show: the square root of it."""
Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""By operator: shapes to try cards at, in the operator's order of axes."""


class AdmissionTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A fresh state at a held-out place."""

    case: KernelCase
    """With `at_least`: the speedup over `state` that the trial must show."""
    platform: str
    surface: Surface
    state: KernelSource
    """The kernel to begin from, and to be compared with."""
    prior: tuple[Category, ...]
    """Steps that were made before it."""
    why: str
    """Where the state comes from and what is held out about the place."""

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


def expected_speedup(card: SkillCard, share: float = SHARE) -> float:
    """What a trial must show at least, to three decimals: the card's measured speedup to the power of `share`.

    Raises UsageError for a card whose effect was not measured, or that has none.
    """
    speedup = card.effect.speedup
    if speedup is None or speedup.estimate <= 1:
        raise UsageError(
            f"the card {card.name} states no measured speedup above 1: there is nothing that a trial could show; lift "
            "it from a transition with a measured effect"
        )
    return float(round(speedup.estimate**share, 3))


def targets_for(
    card: SkillCard, lineages: Iterable[StoredLineage], shapes: Shapes, *, share: float = SHARE
) -> list[AdmissionTarget]:
    """Targets for a card, the nearest first; the same library gives the same list.

    First the states before the card's own transitions at other shapes of their operator, then, on the same platform
    and surface, the states of other operators before their step of the card's category, at their own shape. Places
    that the card was lifted from are left out. Raises UsageError for a card without a measured effect, or an invalid
    shape.
    """
    expected = expected_speedup(card, share)
    known = sorted(lineages, key=lambda stored: stored.lineage.name)
    found = [*_at_other_shapes(card, known, shapes), *_of_other_operators(card, known)]
    chosen: dict[str, AdmissionTarget] = {}
    for target in found:
        if held_out(target.context, card.origins):
            case = msgspec.structs.replace(target.case, at_least=expected)
            chosen.setdefault(target.name, msgspec.structs.replace(target, case=case))
    return list(chosen.values())


def _at_other_shapes(card: SkillCard, lineages: Sequence[StoredLineage], shapes: Shapes) -> Iterator[AdmissionTarget]:
    cited = {item.transition for item in card.evidence}
    positions = [
        (stored, index)
        for stored in lineages
        for index, transition in enumerate(stored.lineage.transitions)
        if transition.digest in cited
    ]
    rounds = max((len(shapes.get(stored.lineage.operator, ())) for stored, _ in positions), default=0)
    for number in range(rounds):
        for stored, index in positions:
            own = shapes.get(stored.lineage.operator, ())
            if number < len(own):
                case = _reshaped(stored.lineage.case, own[number])
                yield _target(stored, index, case, "the state before its own step, at another shape")


def _of_other_operators(card: SkillCard, lineages: Sequence[StoredLineage]) -> Iterator[AdmissionTarget]:
    operators = {origin.operator for origin in card.origins}
    kinds = {(origin.platform, origin.surface) for origin in card.origins}
    for stored in lineages:
        lineage = stored.lineage
        if lineage.operator in operators or (lineage.platform, lineage.surface) not in kinds:
            continue
        own = [i for i, transition in enumerate(lineage.transitions) if transition.category is card.category]
        for index in own:
            case = lineage.case.at_shape(dict(lineage.case.shape))
            yield _target(stored, index, case, f"a state of another operator before a step of {card.category.value}")


def _target(stored: StoredLineage, index: int, case: KernelCase, why: str) -> AdmissionTarget:
    lineage, source = stored.lineage, stored.sources[index]
    done = lineage.done_before(index)
    return AdmissionTarget(
        case=case,
        platform=lineage.platform,
        surface=lineage.surface,
        # A name without a hint at the lineage: it must not lead the model that gets the kernel.
        state=msgspec.structs.replace(source, label="state"),
        prior=tuple(category for category in Category if category in done),
        why=f"{lineage.name} step {index + 1}: {why}",
    )


def _reshaped(case: KernelCase, shape: tuple[int, ...]) -> KernelCase:
    """The case at another shape. Raises UsageError for one that the operator does not allow."""
    chosen = operator_of(case)
    changed = case.at_shape(named_shape(chosen, shape))
    chosen.validate(changed)
    return changed
