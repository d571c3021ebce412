"""Paired tests and intervals of experiments: against SciPy, and for what must hold of any data."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.lab.studies.paired import (
    Pair,
    discordance,
    geomean_ratio,
    holm,
    mean_difference,
    power,
    sign_flip,
    success_difference,
)

stats = pytest.importorskip("scipy.stats")


def successes(both: int, first: int, second: int, neither: int) -> list[Pair]:
    made = [(1.0, 1.0)] * both + [(1.0, 0.0)] * first + [(0.0, 1.0)] * second + [(0.0, 0.0)] * neither
    return [Pair("gemm", *one) for one in made]


@given(st.integers(0, 9), st.integers(0, 15), st.integers(0, 15), st.integers(0, 9))
def test_mcnemar_is_the_binomial_test(both: int, first: int, second: int, neither: int) -> None:
    found = discordance(successes(both, first, second, neither))
    assert (found.both, found.only_first, found.only_second, found.neither) == (both, first, second, neither)
    assert found.pairs == both + first + second + neither
    if first + second:
        test = stats.binomtest(first, first + second, alternative="greater")
        assert found.p_greater == pytest.approx(test.pvalue)
    else:
        assert found.p_greater == 1.0


def pairs_of(differences: list[float], targets: int = 1) -> list[Pair]:
    return [Pair(str(index % targets), one, 0.0) for index, one in enumerate(differences)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 3).map(lambda one: round(one, 3)), min_size=3, max_size=9))
def test_all_sign_flips_are_scipys_permutation_test(differences: list[float]) -> None:
    test = stats.permutation_test(
        (differences,), statistics.fmean, permutation_type="samples", n_resamples=10_000, alternative="two-sided"
    )
    two_sided = sign_flip(pairs_of(differences))
    assert two_sided == pytest.approx(test.pvalue, abs=1e-9)


def test_sampled_sign_flips_agree_with_counted_ones() -> None:
    generator = random.Random(1)
    differences = [generator.gauss(0.5, 1) for _ in range(14)]
    exact = sign_flip(pairs_of(differences))
    sampled = sign_flip([*pairs_of(differences), Pair("0", 1.0, 1.0)])  # a pair of no difference changes nothing
    assert sampled == pytest.approx(exact, abs=0.02)


def test_a_sampled_p_value_is_never_zero() -> None:
    assert 0 < sign_flip(pairs_of([1.0] * 40)) < 0.001


def test_intervals_of_no_effect_hold_zero_as_often_as_they_say() -> None:
    generator = random.Random(7)
    held = 0
    for trial in range(100):
        offsets = {target: generator.gauss(0, 2) for target in range(8)}
        pairs = [
            Pair(str(target), offset + generator.gauss(0, 0.5), offset + generator.gauss(0, 0.5))
            for target, offset in offsets.items()
            for _ in range(5)
        ]
        interval = mean_difference(pairs, seed=trial)
        held += interval.low <= 0 <= interval.high
    # 95 of 100 are expected; a binomial of 0.95 is below 88 with probability 0.001
    assert held >= 88


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "held" in request.node.name or "hold" in request.node.name:
        monkeypatch.setattr("pytest_klineage.lab.studies.paired.RESAMPLES", 500)


def test_differences_between_targets_do_not_widen_an_interval() -> None:
    near = [Pair("a", 1.0 + 0.01 * index, 0.0) for index in range(5)]
    far = [Pair("b", 9.0 + 0.01 * index, 0.0) for index in range(5)]
    interval = mean_difference([*near, *far])
    assert interval.estimate == pytest.approx(5.02)
    assert interval.high - interval.low < 0.05


def test_intervals_hold_zero_as_often_for_targets_of_one_pair() -> None:
    generator = random.Random(11)
    held = 0
    for trial in range(100):
        often = [Pair("often", generator.gauss(0, 0.5), 0.0) for _ in range(5)]
        pairs = [Pair(str(target), generator.gauss(0, 0.5), 0.0) for target in range(12)]
        interval = mean_difference([*pairs, *often], seed=trial)
        held += interval.low <= 0 <= interval.high
    assert 88 <= held < 100


def test_the_only_pair_of_a_target_widens_an_interval() -> None:
    pairs = [*pairs_of([1.0, 1.1, 1.2, 1.3]), Pair("smaller", 1.0, 0.0), Pair("smaller", 1.1, 0.0)]
    without, beside = mean_difference(pairs), mean_difference([*pairs, Pair("alone", 3.0, 0.0)])
    assert beside.high - beside.low > 2 * (without.high - without.low)
    assert beside.low <= beside.estimate <= beside.high


def test_one_pair_in_all_bounds_nothing() -> None:
    interval = geomean_ratio([Pair("gemm", math.log(3), 0.0)])
    assert (interval.estimate, interval.low, interval.high) == (pytest.approx(3.0), 0.0, math.inf)


def test_a_geometric_mean_ratio_is_of_logarithms() -> None:
    pairs = [Pair("gemm", math.log(4), math.log(2)), Pair("topk", math.log(1), math.log(2))]
    assert geomean_ratio(pairs).estimate == pytest.approx(1.0)


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_what_the_step_down_rule_rejects(p_values: dict[str, float]) -> None:
    adjusted = holm(p_values)
    assert list(adjusted) == list(p_values)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
            if p * (len(p_values) - rank) > alpha:
                break
            rejected.add(name)
        assert {name for name, p in adjusted.items() if p <= alpha} == rejected


@pytest.mark.parametrize("use", [sign_flip, mean_difference, lambda pairs: success_difference(discordance(pairs))])
def test_nothing_is_said_about_no_pairs(use) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least one pair"):
        use([])


counts = st.tuples(*[st.integers(0, 12)] * 4).filter(any)


@given(counts)
def test_an_interval_of_shares_mirrors_and_holds_its_estimate(given_counts: tuple[int, int, int, int]) -> None:
    both, first, second, neither = given_counts
    here = success_difference(discordance(successes(both, first, second, neither)))
    there = success_difference(discordance(successes(both, second, first, neither)))
    assert -1 <= here.low <= here.estimate <= here.high <= 1
    assert here.high > here.low
    assert (here.low, here.high) == (pytest.approx(-there.high), pytest.approx(-there.low))


@given(counts)
def test_more_pairs_of_the_same_kind_narrow_an_interval(given_counts: tuple[int, int, int, int]) -> None:
    few = success_difference(discordance(successes(*given_counts)))
    many = success_difference(discordance(successes(*(16 * count for count in given_counts))))
    assert many.high - many.low < few.high - few.low


def test_an_interval_of_shares_covers_as_often_as_it_says() -> None:
    generator = random.Random(3)
    held = 0
    for _ in range(200):
        pairs = [Pair("a", float(generator.random() < 0.6), float(generator.random() < 0.3)) for _ in range(40)]
        interval = success_difference(discordance(pairs))
        held += interval.low <= 0.3 <= interval.high
    # 190 of 200 are expected; a binomial of 0.95 is below 179 with probability 0.001
    assert held >= 179


def test_power_is_how_often_the_test_rejects() -> None:
    generator = random.Random(5)
    rejected = 0
    for _ in range(2000):
        pairs = [Pair("a", float(generator.random() < 0.7), float(generator.random() < 0.4)) for _ in range(40)]
        rejected += discordance(pairs).p_greater <= 0.05
    # the standard error of 2000 experiments is 0.009
    assert power(40, 0.7, 0.4) == pytest.approx(rejected / 2000, abs=0.04)
    assert 0.8 < power(40, 0.7, 0.4) < 0.82
    assert power(40, 0.5, 0.5) <= 0.05


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 40), st.floats(0.1, 0.9), st.floats(0.1, 0.9))
def test_a_larger_effect_is_found_more_often(pairs: int, first: float, second: float) -> None:
    assert 0 <= power(pairs, min(first, second), second) <= power(pairs, max(first, second), second) + 1e-12
    assert power(pairs, first, second) <= 1 + 1e-12
