"""Two arms of an experiment, paired by target and repeat: exact tests, intervals, and corrections for several of them.

An arm's result is one number for each pair: 1 or 0 for a success, or the logarithm of a speedup. Differences are the
first arm's less the second's.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import mul
from statistics import NormalDist

import msgspec

from pytest_klineage.records import Interval

RESAMPLES = 10_000
EXACT_PAIRS = 14
"""Sign flips of so many pairs, 16,384, are all counted; of more, RESAMPLES random ones."""


class Pair(msgspec.Struct, frozen=True):
    """The results of both arms on one repeat of one target."""

    target: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.first - self.second


class Discordance(msgspec.Struct, frozen=True, kw_only=True):
    """How often both, one, or none of two arms succeeded, and the exact McNemar test of the pairs that differ."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_greater: float
    """That the first arm does not succeed more often."""

    @property
    def pairs(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def discordance(pairs: Sequence[Pair]) -> Discordance:
    """Count successes, results above 0, and test them.

    Of the pairs that differ each is as likely to favour either arm where there is no effect (McNemar 1947, exact
    binomial form).
    """
    counts = Counter((pair.first > 0, pair.second > 0) for pair in pairs)
    first, second = counts[True, False], counts[False, True]
    return Discordance(
        both=counts[True, True], only_first=first, only_second=second, neither=counts[False, False],
        p_greater=at_least_heads(first, first + second),
    )  # fmt: skip


def power(pairs: int, first: float, second: float, alpha: float = 0.05) -> float:
    """Probability that `p_greater` is at most alpha, where arms succeed at these rates, independently of each other."""
    one, other = first * (1 - second), (1 - first) * second
    return math.fsum(
        math.comb(pairs, wins) * math.comb(pairs - wins, losses) * one**wins * other**losses
        * (1 - one - other) ** (pairs - wins - losses)
        for wins in range(pairs + 1) for losses in range(pairs + 1 - wins)
        if at_least_heads(wins, wins + losses) <= alpha
    )  # fmt: skip


def at_least_heads(heads: int, throws: int) -> float:
    """Probability of that many heads or more of a fair coin."""
    favourable: int = sum(math.comb(throws, count) for count in range(heads, throws + 1))
    return favourable / 2.0**throws


def success_difference(found: Discordance, confidence: float = 0.95) -> Interval:
    """The first share of successes less the second, with Newcombe's interval for pairs (1998, method 10).

    Unlike a resampled one it has a width where all pairs agree. Raises ValueError without pairs.
    """
    if not found.pairs:
        raise ValueError("an interval needs at least one pair")
    counts = found.both, found.only_first, found.only_second, found.neither
    first, second = (found.both + found.only_first) / found.pairs, (found.both + found.only_second) / found.pairs
    (low1, high1), (low2, high2) = (_wilson(share, found.pairs, confidence) for share in (first, second))
    phi = _phi(*counts)
    below = _combined(first - low1, high2 - second, phi)
    above = _combined(high1 - first, second - low2, phi)
    return Interval(first - second, first - second - below, first - second + above, confidence)


def sign_flip(pairs: Sequence[Pair], *, seed: int = 0) -> float:
    """Two-sided p-value of the mean difference, by exchanging the arms within pairs.

    A pair lies within one target, so the permutation is stratified by target. A random sample of flips counts the
    observed one too (Phipson and Smyth 2010), so that p is never 0. Raises ValueError without pairs.
    """
    if not pairs:
        raise ValueError("a test needs at least one pair")
    differences = [pair.difference for pair in pairs]
    observed = abs(math.fsum(differences)) * (1 - 1e-12)  # equal sums may differ in their last bit
    if len(differences) <= EXACT_PAIRS:
        flips = list(product((1, -1), repeat=len(differences)))
        return sum(abs(math.fsum(map(mul, differences, signs))) >= observed for signs in flips) / len(flips)
    generator = random.Random(seed)
    extreme = sum(
        abs(math.fsum(one if generator.random() < 0.5 else -one for one in differences)) >= observed
        for _ in range(RESAMPLES)
    )
    return (extreme + 1) / (RESAMPLES + 1)


def mean_difference(pairs: Sequence[Pair], confidence: float = 0.95, *, seed: int = 0) -> Interval:
    """The mean difference with a bootstrap interval, resampled within strata: see `_strata`.

    The percentile interval of so few repeats is narrow by sqrt(n / (n - 1)) for n repeats of a target; it is widened by
    that about the estimate (Hesterberg 2015). One pair says nothing of how far others are: its interval is infinite.
    Raises ValueError without pairs.
    """
    if not pairs:
        raise ValueError("an interval needs at least one pair")
    strata = _strata(pairs)
    estimate = _mean_of(strata)
    if len(pairs) == 1:
        return Interval(estimate, -math.inf, math.inf, confidence)
    generator = random.Random(seed)
    means = sorted(_mean_of(_widened(one, generator) for one in strata) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    low, high = means[round(tail * (RESAMPLES - 1))], means[round((1 - tail) * (RESAMPLES - 1))]
    return Interval(estimate, min(low, estimate), max(high, estimate), confidence)


def geomean_ratio(pairs: Sequence[Pair], confidence: float = 0.95, *, seed: int = 0) -> Interval:
    """The first arm's geometric mean over the second's, of results that are logarithms."""
    difference = mean_difference(pairs, confidence, seed=seed)
    return Interval(math.exp(difference.estimate), math.exp(difference.low), math.exp(difference.high), confidence)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values of several tests, in their order (Holm 1979).

    Where those up to alpha are rejected, the chance of any false rejection is at most alpha.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def _wilson(share: float, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count`."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _phi(both: int, only_first: int, only_second: int, neither: int) -> float:
    """The correlation of two arms, corrected for continuity where it is positive."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    product_difference = both * neither - only_first * only_second
    if not margins:
        return 0.0
    half = (both + only_first + only_second + neither) / 2
    corrected = product_difference if product_difference < 0 else max(product_difference - half, 0.0)
    return corrected / math.sqrt(margins)


def _combined(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))


def _strata(pairs: Sequence[Pair]) -> list[list[float]]:
    """Differences by target, since the number of repeats is fixed by design; of two pairs or more where there are two.

    A target's only pair shows no spread. Such targets are one stratum, so that their distances from one another count;
    a single one of them is in the smallest of the others.
    """
    targets: dict[str, list[float]] = {}
    for pair in pairs:
        targets.setdefault(pair.target, []).append(pair.difference)
    single = [one[0] for one in targets.values() if len(one) == 1]
    strata = [one for one in targets.values() if len(one) > 1]
    if len(single) == 1 and strata:
        min(strata, key=len).extend(single)
        return strata
    return [*strata, single] if single else strata


def _mean_of(groups: Iterable[Iterable[float]]) -> float:
    """The mean of all numbers in some groups."""
    numbers = [number for group in groups for number in group]
    return math.fsum(numbers) / len(numbers)


def _widened(differences: Sequence[float], generator: random.Random) -> list[float]:
    """One resample of a target's differences, its distance from their mean widened for their small number."""
    count = len(differences)
    sample = generator.choices(differences, k=count)
    mean, stretch = math.fsum(differences) / count, math.sqrt(count / (count - 1))
    return [mean + stretch * (one - mean) for one in sample]
