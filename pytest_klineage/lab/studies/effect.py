"""Do cards help? The comparisons of an experiment's arms and the page that tells them, from chains alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from tabulate import tabulate

from pytest_klineage.lab.studies.chains import SUCCESS, Chain, ShotFailure
from pytest_klineage.lab.studies.paired import (
    Discordance,
    Pair,
    discordance,
    geomean_ratio,
    holm,
    sign_flip,
    success_difference,
)
from pytest_klineage.records import Interval

Trial = tuple[str, int]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared, as it was fixed before the first result."""

    contrasts: tuple[tuple[str, str], ...]
    """Pairs of arms, the primary one first; all are in one correction by Holm."""
    success: float = SUCCESS
    """Share of the reference's speed that a right kernel needs, for targets without one of their own."""
    of_target: dict[str, float] = {}
    """Targets' own shares."""
    seed: int = 0
    """Of permutations and resampling."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm, in the order in which the contrasts name them."""
        return tuple(dict.fromkeys(arm for contrast in self.contrasts for arm in contrast))

    def least(self, chain: Chain) -> float:
        """The share that a chain's kernels need."""
        return self.of_target.get(chain.target, self.success)


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """Two arms' first shots."""

    name: str
    counts: Discordance
    difference: Interval
    """Of the shares of successes, the first arm's less the second's."""
    p_holm: float
    """That the first arm does not succeed more often, corrected for the number of contrasts."""
    p_permuted: float
    """Two-sided, by exchanging arms within pairs."""


class SpeedRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Two arms' best kernels, geometric means."""

    pairs: int
    ratio: Interval
    p: float


def compare(study: Study, chains: Iterable[Chain]) -> list[Contrast]:
    """Every contrast that has pairs, in the study's order. One without counts in the correction, with p = 1."""
    by_arm = trials_by_arm(chains)
    paired = {against(*arms): first_shot_pairs(by_arm, *arms, study) for arms in study.contrasts}
    counts = {name: discordance(pairs) for name, pairs in paired.items() if pairs}
    corrected = holm({name: counts[name].p_greater if name in counts else 1.0 for name in paired})
    return [
        Contrast(
            name=name, counts=found, difference=success_difference(found), p_holm=corrected[name],
            p_permuted=sign_flip(paired[name], seed=study.seed),
        )
        for name, found in counts.items()
    ]  # fmt: skip


def against(one: str, other: str) -> str:
    """What a contrast is called."""
    return f"{one} against {other}"


def trials_by_arm(chains: Iterable[Chain]) -> dict[str, dict[Trial, Chain]]:
    """Chains that have a first shot, by arm and trial. Raises ValueError for a trial that an arm has twice."""
    found: dict[str, dict[Trial, Chain]] = {}
    for chain in chains:
        own = found.setdefault(chain.arm, {})
        if chain.trial in own:
            raise ValueError(f"the arm {chain.arm} has the trial {chain.target} {chain.repeat} twice")
        if chain.first is not None:
            own[chain.trial] = chain
    return found


def both(by_arm: Mapping[str, Mapping[Trial, Chain]], one: str, other: str) -> Iterator[tuple[Chain, Chain]]:
    """The chains of both arms, for the trials that both have."""
    first, second = by_arm.get(one, {}), by_arm.get(other, {})
    for trial in sorted(first.keys() & second.keys()):
        yield first[trial], second[trial]


def first_shot_pairs(by_arm: Mapping[str, Mapping[Trial, Chain]], one: str, other: str, study: Study) -> list[Pair]:
    """Whether the first shots of both arms succeeded."""
    return [
        Pair(first.target, float(succeeds_at_once(first, study)), float(succeeds_at_once(second, study)))
        for first, second in both(by_arm, one, other)
    ]


def succeeds_at_once(chain: Chain, study: Study) -> bool:
    """Whether a chain's first shot is a success."""
    return chain.first is not None and chain.first.succeeds(study.least(chain))


def speed_ratio(
    chains: Iterable[Chain], one: str, other: str, speed: Callable[[Chain], float | None], *, seed: int = 0
) -> SpeedRatio | None:
    """Both arms' kernels, for the trials in which `speed` has a speedup of both. None without one."""
    pairs = []
    for first, second in both(trials_by_arm(chains), one, other):
        speeds = speed(first), speed(second)
        if speeds[0] is not None and speeds[1] is not None:
            pairs.append(Pair(first.target, math.log(speeds[0]), math.log(speeds[1])))
    if not pairs:
        return None
    return SpeedRatio(pairs=len(pairs), ratio=geomean_ratio(pairs, seed=seed), p=sign_flip(pairs, seed=seed))


def at_once(chain: Chain, study: Study) -> float | None:
    """The speedup of a first shot that is a success."""
    return chain.first.speedup if chain.first is not None and succeeds_at_once(chain, study) else None


def or_root(chain: Chain, roots: Mapping[str, float]) -> float | None:
    """The speedup of a chain's best kernel, or of its root where that is faster; None where neither is known."""
    known = [speed for speed in (chain.best(), roots.get(chain.case)) if speed is not None]
    return max(known, default=None)


def report(study: Study, chains: Sequence[Chain], roots: Mapping[str, float] | None = None) -> str:
    """The page in Markdown: the primary endpoint first, then everything else, null results like the others.

    `roots` has the speedups of the kernels that chains begin with, by case.
    """
    contrasts = compare(study, chains)
    if not contrasts:
        return "Nothing is measured yet.\n"
    models = ", ".join(sorted({chain.model for chain in chains}))
    shots = [len(chain.shots) for chain in chains]
    parts = [
        _primary(contrasts[0]),
        f"{sum(map(bool, shots))} chains; shots judged of each, at most: {max(shots)}; model: {models}.",
        _table(_contrast_rows(contrasts), CONTRAST_HEADERS),
        "First shots that succeed, by target:", _table(*_target_rows(study, chains)),
        "Geometric means of speeds, the first arm's over the second's:",
        _table(_speed_rows(study, chains, roots or {}), SPEED_HEADERS),
        "What it took to the first success, and what became of first shots:", _table(*_cost_rows(study, chains)),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


CONTRAST_HEADERS = (
    "contrast", "pairs", "first", "second", "only first", "only second", "difference, 95 %", "p, one-sided", "p, Holm",
    "p, permuted",
)  # fmt: skip
SPEED_HEADERS = ("contrast", "of", "pairs", "ratio, 95 %", "p, permuted")
MOST_POINTS = 99.5
"""What is printed as 100 points: no effect can be above that, and to exclude one says nothing."""


def _primary(found: Contrast) -> str:
    """The primary endpoint in two sentences."""
    points = Interval(
        *(100 * share for share in (found.difference.estimate, found.difference.low, found.difference.high))
    )
    says_something = points.low <= 0 and points.high < MOST_POINTS
    excluded = f" An effect above {points.high:.0f} points is excluded." if says_something else ""
    return (
        f"**{found.name}: {_interval(points, '+.0f')} points of first-shot success, {found.counts.pairs} pairs; "
        f"exact McNemar, one-sided, after Holm: p = {found.p_holm:.3f}.**{excluded}"
    )


def _contrast_rows(contrasts: Iterable[Contrast]) -> Iterator[tuple[object, ...]]:
    for one in contrasts:
        counts = one.counts
        yield (
            one.name, counts.pairs, counts.both + counts.only_first, counts.both + counts.only_second,
            counts.only_first, counts.only_second, _interval(one.difference, "+.2f"), f"{counts.p_greater:.3f}",
            f"{one.p_holm:.3f}", f"{one.p_permuted:.3f}",
        )  # fmt: skip


def _target_rows(study: Study, chains: Iterable[Chain]) -> tuple[list[tuple[object, ...]], tuple[str, ...]]:
    by_arm = trials_by_arm(chains)
    targets = sorted({target for own in by_arm.values() for target, _ in own})
    rows: list[tuple[object, ...]] = []
    for target in targets:
        mine = {arm: [one for one in by_arm.get(arm, {}).values() if one.target == target] for arm in study.arms}
        shares = [f"{sum(succeeds_at_once(one, study) for one in own)} of {len(own)}" for own in mine.values()]
        rows.append((target, *shares))
    return rows, ("target", *study.arms)


def _speed_rows(study: Study, chains: Sequence[Chain], roots: Mapping[str, float]) -> list[tuple[object, ...]]:
    kinds: dict[str, Callable[[Chain], float | None]] = {
        "first shots, both a success": lambda chain: at_once(chain, study),
        "best of all shots, both right": Chain.best,
    }
    if roots:
        kinds["best of all shots, or the root"] = lambda chain: or_root(chain, roots)
    found = [
        (against(one, other), name, speed_ratio(chains, one, other, speed, seed=study.seed))
        for one, other in study.contrasts
        for name, speed in kinds.items()
    ]
    return [
        (name, kind, one.pairs, _interval(one.ratio, ".2f"), f"{one.p:.3f}")
        for name, kind, one in found if one is not None
    ]  # fmt: skip


def _cost_rows(study: Study, chains: Iterable[Chain]) -> tuple[list[tuple[object, ...]], tuple[str, ...]]:
    by_arm = trials_by_arm(chains)
    rows: list[tuple[object, ...]] = []
    for arm in study.arms:
        own = list(by_arm.get(arm, {}).values())
        reached = [shot for chain in own if (shot := chain.first_success(study.least(chain))) is not None]
        became = Counter(chain.first.failure(study.least(chain)) for chain in own if chain.first is not None)
        rows.append((
            arm, len(own), len(reached), _median([shot.tokens for shot in reached], ".0f"),
            _median([shot.usd for shot in reached], ".2f"), *(became[kind] for kind in ShotFailure),
        ))  # fmt: skip
    headers = ("arm", "chains", "with a success", "median tokens", "median USD")
    return rows, (*headers, *(f"first: {kind.value}" for kind in ShotFailure))


def _table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(list(rows), headers, tablefmt="pipe", disable_numparse=True)


def _interval(found: Interval, form: str) -> str:
    if math.isinf(found.high):
        return f"{found.estimate:{form}}"
    return f"{found.estimate:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _median(numbers: Sequence[float], form: str) -> str:
    return f"{statistics.median(numbers):{form}}" if numbers else "-"
