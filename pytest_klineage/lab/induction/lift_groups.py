"""Which transitions make one card, in a fixed order.

On a CPU those of one category and similar locus. On a GPU a category that names a mechanism is the same thing in every
kernel: there each operator's strongest step of it joins one group. A step that shows no effect of its own is lifted
together with the later step that pays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from pytest_klineage.lab.induction.retime import winning
from pytest_klineage.lab.library.cards import origin_of
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.records import (
    GPU_PLATFORMS,
    Category,
    Context,
    Evidence,
    Interval,
    KernelSource,
    Lineage,
    Rejection,
    Transition,
)
from pytest_klineage.results.retimed import read_retimed, with_effects
from pytest_klineage.results.spans import read_spans

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


MECHANISMS = frozenset((
    Category.TILE_STAGE, Category.VECTORIZE_GLOBAL, Category.PIPELINE, Category.PREFETCH, Category.TMA_LOAD,
    Category.TMA_STORE, Category.MULTICAST, Category.WARP_SPECIALIZE, Category.STAGED_OUTPUT, Category.REGISTER_TILE,
    Category.LDMATRIX_SWIZZLE, Category.MMA, Category.WGMMA, Category.SMEM_TRANSPOSE, Category.SHUFFLE_SCAN,
    Category.OVERLAP, Category.PERSISTENT,
))  # fmt: skip
"""Categories that say by which means of a GPU a step works; the others say what is changed, such as `arithmetic`."""
NOT_TIMED = "its steps were not timed together: pytest suites/lineage/test_spans.py does that"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A transition where it stands, or a span of neighbouring ones that ends with it; the kernels before and after."""

    lineage: Lineage
    index: int
    """Of the transition, for a span of its last one."""
    before: KernelSource
    after: KernelSource
    first: int | None = None
    """Of a span, the index of its first transition."""
    over_span: Interval | None = None
    """Of a span, its effect, if it was timed."""

    @property
    def transition(self) -> Transition:
        """The transition itself; of a span the last one, which pays."""
        return self.lineage.transitions[self.index]

    @property
    def begin(self) -> int:
        """Index of the first transition."""
        return self.index if self.first is None else self.first

    @property
    def steps(self) -> tuple[Transition, ...]:
        """The transition, or all those of a span."""
        return self.lineage.transitions[self.begin : self.index + 1]

    @property
    def span(self) -> tuple[str, ...]:
        """Digests of the steps."""
        return tuple(step.digest for step in self.steps)

    @property
    def effect(self) -> Interval | None:
        """Time before over time after, as it was measured; None where it was not."""
        return self.transition.effect if self.first is None else self.over_span

    @property
    def context(self) -> Context:
        """Where it is."""
        return origin_of(self.lineage, self.begin)[1]

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What a card cites of it."""
        return tuple(origin_of(self.lineage, index)[0] for index in range(self.begin, self.index + 1))

    @property
    def done(self) -> tuple[Category, ...]:
        """Steps that were made before it, in the order of the categories."""
        done = self.lineage.done_before(self.begin)
        return tuple(category for category in Category if category in done)

    @property
    def position(self) -> str:
        """Lineage and number, such as "gemm/cpu-cpp step 3"."""
        if self.first is not None:
            return f"{self.lineage.name} steps {self.first + 1} to {self.index + 1}"
        return f"{self.lineage.name} step {self.index + 1}"

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels are a GPU's."""
        return self.lineage.platform in GPU_PLATFORMS


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Sites that become one card, in the order of their lineages."""

    name: str
    """For files and chats: platform, surface, category; but for a joined group, words of the locus and a digest."""
    sites: tuple[Site, ...]

    @property
    def category(self) -> Category:
        """The category that all sites share."""
        return self.sites[0].transition.category

    @property
    def representative(self) -> Site:
        """The site whose effect the card states: the median one, of two the weaker."""
        ranked = sorted(self.sites, key=lambda site: (_estimate(site), site.position))
        return ranked[(len(ranked) - 1) // 2]

    @property
    def rejections(self) -> tuple[tuple[Transition, Rejection], ...]:
        """What was refused at these sites, in order: a card's risks are numbered after them, from 1."""
        steps = [step for site in self.sites for step in site.steps]
        return tuple((step, rejection) for step in steps for rejection in step.rejected)

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels are a GPU's."""
        return self.sites[0].on_gpu

    @property
    def cited(self) -> str:
        """The steps by digest, as a conversation names them: sites apart by spaces, the steps of a span by "+"."""
        return " ".join("+".join(site.span) for site in self.sites)


class SkippedGroup(msgspec.Struct, frozen=True, kw_only=True):
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


def timed_sites(lineages: Iterable[StoredLineage]) -> list[Site]:
    """The same with the effects that count; a re-derived kernel that is better stands after its step.

    What was lifted from the walk's own figures is replayed from `sites_of`.
    """
    found = []
    for stored in lineages:
        again = read_retimed(stored.directory)
        timed = msgspec.structs.replace(stored, lineage=with_effects(stored.lineage, again))
        for site in sites_of([timed]):
            after = winning(stored, site.index, again.get(site.transition.digest))
            found.append(msgspec.structs.replace(site, after=after))
        found += spans_of(timed)
    return found


def spans_of(stored: StoredLineage) -> list[Site]:
    """Steps of a GPU's lineage without an effect of their own, each run of them with the next step if that pays."""
    sites = sites_of([stored])
    if not sites or not sites[0].on_gpu:
        return []
    timed = read_spans(stored.directory)
    found, losing = list[Site](), list[Site]()
    for site in sites:
        if site.effect is not None and not_worth_it(site):
            losing.append(site)
            continue
        if losing and not not_worth_it(site):
            span = msgspec.structs.replace(site, first=losing[0].index, before=losing[0].before)
            found.append(msgspec.structs.replace(span, over_span=timed.get(span.span)))
        losing = []
    return found


def grouped(sites: Iterable[Site]) -> tuple[list[Group], list[SkippedGroup]]:
    """Groups to lift, by name, and what is left out. The same sites give the same groups, in whatever order they come.

    The strongest site of each operator joins the group of a GPU's mechanism. Spans stand alone. Every other site joins
    the first group of its category, platform and surface whose every locus is like its own.
    """
    worth, left = list[Site](), list[SkippedGroup]()
    for site in sorted(sites, key=lambda site: (site.lineage.name, site.index, site.begin)):
        if why := not_worth_it(site):
            left.append(SkippedGroup(site=site, reason=why))
        else:
            worth.append(site)
    joined = _joined(worth)
    taken = [site for group in joined for site in group.sites]
    rest = [Group(name=_group_name(group[0]), sites=tuple(group)) for group in _alike_sites(worth, taken)]
    return sorted([*joined, *rest], key=lambda group: group.name), left


def group_of(name: str, cited: str, sites: Iterable[Site]) -> Group | None:
    """The group of these steps, as `Group.cited` writes them; None where one of them is nowhere."""
    known = {"+".join(site.span): site for site in sites}
    found = [known.get(steps) for steps in cited.split()]
    whole = tuple(site for site in found if site is not None)
    return Group(name=name, sites=whole) if whole and len(whole) == len(found) else None


def _joined(sites: Iterable[Site]) -> list[Group]:
    """One group for each mechanism of a GPU and surface: of each operator the step with the largest effect."""
    kinds: dict[tuple[str, str, Category], dict[str, Site]] = {}
    for site in sites:
        if site.on_gpu and site.first is None and site.transition.category in MECHANISMS:
            strongest = kinds.setdefault(_kind(site), {})
            known = strongest.get(site.lineage.name)
            if known is None or _estimate(site) > _estimate(known):
                strongest[site.lineage.name] = site
    return [Group(name=_kind_name(kind), sites=tuple(own.values())) for kind, own in kinds.items()]


def _alike_sites(sites: Iterable[Site], taken: Sequence[Site]) -> list[list[Site]]:
    """The sites that are not taken, by category and place."""
    groups: list[list[Site]] = []
    for site in sites:
        if any(site is other for other in taken):
            continue
        home = next((group for group in groups if all(_alike(site, other) for other in group)), None)
        if home is None:
            groups.append([site])
        else:
            home.append(site)
    return groups


def slug(text: str, limit: int = LOCUS_WORDS) -> str:
    """The first words of a text as lowercase letters, digits and single hyphens; empty when it has none."""
    return "-".join(word[:WORD_LENGTH] for word in words(text)[:limit])


def words(text: str) -> list[str]:
    """Words of a place in code, in order and once each: identifiers are cut at underscores and capitals."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    found = re.findall(r"[a-z0-9]+", spaced.lower())
    return list(dict.fromkeys(word for word in found if word not in STOP_WORDS))


def not_worth_it(site: Site) -> str:
    """Why a site makes no card by itself; empty where it does."""
    effect = site.effect
    if effect is None:
        return "its effect was not measured" if site.first is None else NOT_TIMED
    if effect.low <= 1 or effect.estimate < LEAST_EFFECT:
        return f"it shows no effect of its own: {effect.estimate:.3g}x [{effect.low:.3g}, {effect.high:.3g}]"
    return ""


def _alike(one: Site, other: Site) -> bool:
    if _kind(one) != _kind(other) or one.first is not None or other.first is not None:
        return False
    mine, theirs = set(words(one.transition.locus)), set(words(other.transition.locus))
    return len(mine & theirs) >= ALIKE * len(mine | theirs)


def _kind(site: Site) -> tuple[str, str, Category]:
    return site.lineage.platform, site.lineage.surface.value, site.transition.category


def _estimate(site: Site) -> float:
    effect = site.effect
    return effect.estimate if effect is not None else 1.0


def _group_name(site: Site) -> str:
    locus = slug(site.transition.locus) if site.first is None else f"span-of-{len(site.steps)}"
    return "-".join(part for part in (_kind_name(_kind(site)), locus, site.transition.digest[:8]) if part)


def _kind_name(kind: tuple[str, str, Category]) -> str:
    platform, surface, category = kind
    return f"{platform}-{surface}-{category.value.replace('_', '-')}"
