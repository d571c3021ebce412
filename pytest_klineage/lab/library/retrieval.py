"""Which cards a target gets: the union of the nearest k by case, language, platform and steps done, and why.

Distances are to where a card was verified, not to where it is declared to apply. The same library and target give the
same cards in the same order, whatever order the library was read in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.normalise import canonical_platform, granted, needs, platform_or_same
from pytest_klineage.lab.library.similarity import (
    LANGUAGES,
    NOWHERE,
    VENDORS,
    CaseTable,
    Interner,
    ProblemKey,
    Shape,
    same_family,
    step_similarities,
    steps_mask,
)
from pytest_klineage.records import CardStatus, Category, KernelCase, SkillCard, Surface

DEFAULT_K = 4
UNKNOWN: frozenset[tuple[str, Shape]] = frozenset({("", ())})
"""Origins of a card that says none: they may be any target's own."""


class Dimension(StrEnum):
    """What a card and a target are compared in."""

    CASE = "case"
    """Operator, data type and shape."""
    LANGUAGE = "language"
    PLATFORM = "platform"
    DONE = "done"
    """Steps made before."""


class RetrievalTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel is to be made for, and what has been done to it already."""

    case: KernelCase
    surface: Surface
    platform: str
    done: frozenset[Category] = frozenset()
    capabilities: tuple[str, ...] = ()
    """What this machine has beyond what its platform grants, such as "avx512"."""


class Similarities(NamedTuple):
    """How near a card's verified scope is to the target in each dimension, from 0 to 1."""

    case: float
    language: float
    platform: float
    done: float

    @property
    def total(self) -> float:
        """Their sum: the order of the cards that are in."""
        return self.case + self.language + self.platform + self.done


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A card that the target gets."""

    card: SkillCard
    similarities: Similarities
    by: tuple[Dimension, ...]
    """The dimensions in which it is among the nearest k."""
    contaminated: bool
    """Lifted from a lineage of the target's own operator and shape, or of unknown origin."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a card is in or out."""

    name: str
    chosen: bool
    reason: str
    similarities: Similarities
    contaminated: bool


class Retrieval(msgspec.Struct, frozen=True, kw_only=True):
    """What a target gets."""

    matches: tuple[Match, ...]
    """Nearest in the sum of the similarities first, then by name."""
    explanations: tuple[Explanation, ...] = ()
    """One for every card of the library, by name, when asked for."""


class _Entry(NamedTuple):
    """A card with the numbers of the places at which it was verified."""

    card: SkillCard
    name: str
    cases: tuple[int, ...]
    languages: int
    platforms: int
    steps: tuple[int, ...]
    terms: int
    origins: frozenset[tuple[str, Shape]]


class _Columns(NamedTuple):
    """The four similarities of every card, and their sum, in the order of the entries."""

    case: list[float]
    language: list[float]
    platform: list[float]
    done: list[float]
    total: list[float]

    def at(self, position: int) -> Similarities:
        return Similarities(self.case[position], self.language[position], self.platform[position], self.done[position])


class CardIndex:
    """A library made ready for retrieval. Raises UsageError when two cards have one name."""

    def __init__(self, cards: Iterable[SkillCard]) -> None:
        self._problem_keys: Interner[ProblemKey] = Interner()
        self._languages: Interner[frozenset[str]] = Interner()
        self._platforms: Interner[frozenset[str]] = Interner()
        self._steps: Interner[int] = Interner()
        self._terms: Interner[tuple[CardStatus, frozenset[str]]] = Interner()
        self._entries = [self._entry(card) for card in sorted(cards, key=lambda card: card.name)]
        for one, other in pairwise(self._entries):
            if one.name == other.name:
                raise UsageError(f"two cards are called {one.name!r}; rename one of them")
        self._table = CaseTable(self._problem_keys)

    def __len__(self) -> int:
        return len(self._entries)

    def retrieve(
        self, target: RetrievalTarget, k: int = DEFAULT_K, *, candidates: bool = False, contaminated: bool = True,
        explain: bool = False,
    ) -> Retrieval:  # fmt: skip
        """The union of the nearest `k` cards in each dimension in which they are near.

        `candidates` takes cards that are not admitted yet, too; `contaminated=False` leaves out what was lifted from
        the target's own operator and shape. Raises UsageError for k < 1, UnknownName for a platform or capability.
        """
        if k < 1:
            raise UsageError(f"k must be at least 1, got {k}")
        own = _own(target.case)
        excluded = self._excluded(target, candidates)
        eligible = [
            position for position, entry in enumerate(self._entries)
            if not excluded[entry.terms] and (contaminated or not own & entry.origins)
        ]  # fmt: skip
        columns = self._columns(target)
        by = _nearest(columns, eligible, k)
        matches = tuple(
            Match(
                card=self._entries[position].card, similarities=columns.at(position), by=by[position],
                contaminated=bool(own & self._entries[position].origins),
            )
            for position in sorted(by, key=lambda position: (-columns.total[position], position))
        )  # fmt: skip
        if not explain:
            return Retrieval(matches=matches)
        return Retrieval(matches=matches, explanations=tuple(self._explained(columns, own, by, excluded, eligible, k)))

    def _entry(self, card: SkillCard) -> _Entry:
        at = card.verified
        problem_keys = {
            self._problem_keys.number((context.operator, context.dtype, _shape(context.shape))) for context in at
        }
        steps = {self._steps.number(steps_mask(context.prior)) for context in at}
        return _Entry(
            card=card,
            name=card.name,
            cases=tuple(sorted(problem_keys)) or (self._problem_keys.number(("", "", ())),),
            languages=self._languages.number(frozenset(context.surface.value for context in at)),
            platforms=self._platforms.number(frozenset(platform_or_same(context.platform) for context in at)),
            steps=tuple(sorted(steps)) or (self._steps.number(NOWHERE),),
            terms=self._terms.number((card.status, needs(card))),
            origins=_origins(card),
        )

    def _columns(self, target: RetrievalTarget) -> _Columns:
        platform, done = canonical_platform(target.platform), target.done
        languages = [max((same_family(target.surface.value, at, LANGUAGES) for at in key), default=0.0)
                     for key in self._languages]  # fmt: skip
        platforms = [max((same_family(platform, at, VENDORS) for at in key), default=0.0) for key in self._platforms]
        case_at = self._table.similarities(target.case).__getitem__
        step_at = step_similarities(done, self._steps).__getitem__
        case = [max(map(case_at, entry.cases)) for entry in self._entries]
        language = [languages[entry.languages] for entry in self._entries]
        where = [platforms[entry.platforms] for entry in self._entries]
        # A step that the kernel has already is nothing to be done next, however alike the rest is.
        near = [0.0 if entry.card.category in done else max(map(step_at, entry.steps)) for entry in self._entries]
        total = [sum(four) for four in zip(case, language, where, near, strict=True)]
        return _Columns(case, language, where, near, total)

    def _excluded(self, target: RetrievalTarget, candidates: bool) -> list[str]:
        """Why cards of each status and each set of needs are no choice for this target; empty where they are one."""
        has = granted(target.platform, target.capabilities)
        reasons = []
        for status, wanted in self._terms:
            if status is CardStatus.RETIRED:
                reasons.append("retired")
            elif status is CardStatus.CANDIDATE and not candidates:
                reasons.append("a candidate: only admitted cards are retrieved")
            elif lacking := wanted - has:
                reasons.append(f"needs {', '.join(sorted(lacking))}, which {target.platform} is not granted")
            else:
                reasons.append("")
        return reasons

    def _explained(
        self, columns: _Columns, own: frozenset[tuple[str, Shape]], by: dict[int, tuple[Dimension, ...]],
        excluded: list[str], eligible: Sequence[int], k: int,
    ) -> Iterator[Explanation]:  # fmt: skip
        choices = set(eligible)
        for position, entry in enumerate(self._entries):
            if position in by:
                reason = f"among the nearest {k} by {', '.join(by[position])}"
            elif position in choices:
                reason = f"not among the nearest {k} in any dimension"
            else:
                reason = excluded[entry.terms] or "lifted from this very operator and shape"
            yield Explanation(
                name=entry.name, chosen=position in by, reason=reason, similarities=columns.at(position),
                contaminated=bool(own & entry.origins),
            )  # fmt: skip


def _nearest(columns: _Columns, eligible: Sequence[int], k: int) -> dict[int, tuple[Dimension, ...]]:
    """The nearest k in each dimension: among equals the nearest in all, then by name.

    Cards with similarity 0 are never selected.
    """
    by: dict[int, tuple[Dimension, ...]] = {}
    for dimension, column in zip(Dimension, columns, strict=False):
        best = heapq.nlargest(k, (column[position] for position in eligible))
        least = best[-1] if best else 0.0
        near = [position for position in eligible if column[position] >= least and column[position] > 0]
        # Entries are sorted by name, so that a smaller place is an earlier name.
        for _, _, position in heapq.nsmallest(
            k, ((-column[position], -columns.total[position], position) for position in near)
        ):
            by[position] = (*by.get(position, ()), dimension)
    return by


def lifted_from(card: SkillCard, case: KernelCase) -> bool:
    """Whether a card comes from a lineage of the case's operator and shape, or may."""
    return bool(_own(case) & _origins(card))


def _origins(card: SkillCard) -> frozenset[tuple[str, Shape]]:
    return frozenset((context.operator, _shape(context.shape)) for context in card.origins) or UNKNOWN


def _own(case: KernelCase) -> frozenset[tuple[str, Shape]]:
    """Origins that a card of this very problem may have: its shape, no shape, or nothing that was recorded."""
    return UNKNOWN | {(case.operator, _shape(case.shape)), (case.operator, ())}


def _shape(shape: dict[str, int]) -> Shape:
    return tuple(sorted(shape.items()))
