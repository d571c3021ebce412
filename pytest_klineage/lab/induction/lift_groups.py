"""Which transitions make one card: those of one category and similar locus, in a fixed order. No model is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from pytest_klineage.lab.library.cards import origin_of
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.records import Category, Context, Evidence, Interval, KernelSource, Lineage, Rejection, Transition

ALIKE = 0.5
"""Words that two loci share, over words that either has, from which on they are the same place."""
LEAST_EFFECT = 1.03
"""Estimated speedup from which on a step is worth a card; its whole interval must lie above 1, too."""
LOCUS_WORDS = 3
"""Words of the locus that a group's name has."""
WORD_LENGTH = 16
STOP_WORDS = frozenset((
    "a", "all", "an", "and", "are", "as", "at", "by", "each", "every", "for", "from", "in", "into", "is", "it", "its",
    "loop", "loops", "of", "on", "one", "only", "or", "over", "per", "run", "that", "the", "then", "to", "with",
))  # fmt: skip


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A transition where it stands: its lineage, and the kernels before and after it."""

    lineage: Lineage
    index: int
    before: KernelSource
    after: KernelSource

    @property
    def transition(self) -> Transition:
        """The transition itself."""
        return self.lineage.transitions[self.index]

    @property
    def origin(self) -> tuple[Evidence, Context]:
        """What a card cites of it, and where it is."""
        return origin_of(self.lineage, self.index)

    @property
    def done(self) -> tuple[Category, ...]:
        """Steps that were made before it, in the order of the categories."""
        done = self.lineage.done_before(self.index)
        return tuple(category for category in Category if category in done)

    @property
    def place(self) -> str:
        """Lineage and number, such as "gemm/cpu-cpp step 3"."""
        return f"{self.lineage.name} step {self.index + 1}"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Sites that become one card, in the order of their lineages."""

    name: str
    """For files and chats: platform, surface, category, words of the locus, and the first transition's digest."""
    sites: tuple[Site, ...]

    @property
    def category(self) -> Category:
        """The category that all sites share."""
        return self.sites[0].transition.category

    @property
    def representative(self) -> Site:
        """The site whose effect the card states: the median one, of two the weaker."""
        ranked = sorted(self.sites, key=lambda site: (_estimate(site), site.place))
        return ranked[(len(ranked) - 1) // 2]

    @property
    def rejections(self) -> tuple[tuple[Site, Rejection], ...]:
        """What was refused at these sites, in order: a card's risks are numbered after them, from 1."""
        return tuple((site, rejection) for site in self.sites for rejection in site.transition.rejected)


class Unlifted(msgspec.Struct, frozen=True, kw_only=True):
    """A transition that makes no card, and why."""

    site: Site
    reason: str


def sites_of(lineages: Iterable[StoredLineage]) -> list[Site]:
    """Every transition of these lineages, by lineage and place."""
    return [
        Site(
            lineage=stored.lineage, index=index, before=stored.sources[index], after=stored.sources[index + 1]
        )
        for stored in sorted(lineages, key=lambda stored: stored.lineage.name)
        for index in range(len(stored.lineage.transitions))
    ]  # fmt: skip


def grouped(sites: Iterable[Site]) -> tuple[list[Group], list[Unlifted]]:
    """Groups to lift, by name, and what is left out. The same sites give the same groups, in whatever order they come.

    A site joins the first group of its category, platform and surface whose every locus is like its own.
    """
    groups: list[list[Site]] = []
    left: list[Unlifted] = []
    for site in sorted(sites, key=lambda site: (site.lineage.name, site.index)):
        if why := _not_worth_it(site.transition.effect):
            left.append(Unlifted(site=site, reason=why))
            continue
        home = next((group for group in groups if all(_alike(site, other) for other in group)), None)
        if home is None:
            groups.append([site])
        else:
            home.append(site)
    made = [Group(name=_group_name(group[0]), sites=tuple(group)) for group in groups]
    return sorted(made, key=lambda group: group.name), left


def slug(text: str, limit: int = LOCUS_WORDS) -> str:
    """The first words of a text as lowercase letters, digits and single hyphens; empty when it has none."""
    return "-".join(word[:WORD_LENGTH] for word in words(text)[:limit])


def words(text: str) -> list[str]:
    """Words of a place in code, in order and once each: identifiers are cut at underscores and capitals."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    found = re.findall(r"[a-z0-9]+", spaced.lower())
    return list(dict.fromkeys(word for word in found if word not in STOP_WORDS))


def _not_worth_it(effect: Interval | None) -> str:
    if effect is None:
        return "its effect was not measured"
    if effect.low <= 1 or effect.estimate < LEAST_EFFECT:
        return f"it shows no effect of its own: {effect.estimate:.3g}x [{effect.low:.3g}, {effect.high:.3g}]"
    return ""


def _alike(one: Site, other: Site) -> bool:
    if _kind(one) != _kind(other):
        return False
    mine, theirs = set(words(one.transition.locus)), set(words(other.transition.locus))
    return len(mine & theirs) >= ALIKE * len(mine | theirs)


def _kind(site: Site) -> tuple[str, str, Category]:
    return site.lineage.platform, site.lineage.surface.value, site.transition.category


def _estimate(site: Site) -> float:
    effect = site.transition.effect
    return effect.estimate if effect is not None else 1.0


def _group_name(site: Site) -> str:
    platform, surface, category = _kind(site)
    locus = slug(site.transition.locus)
    parts = (platform, surface, category.value.replace("_", "-"), locus, site.transition.digest[:8])
    return "-".join(part for part in parts if part)
