"""The comparisons of arms, and the page: on chains that are made up, for what must hold of any."""

from __future__ import annotations

import math
import random
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import chain

from pytest_klineage.lab.studies.chains import Chain, ShotFailure
from pytest_klineage.lab.studies.effect import (
    Study,
    _primary,
    at_once,
    compare,
    first_shot_pairs,
    or_root,
    report,
    speed_ratio,
    trials_by_arm,
)
from pytest_klineage.records import Code

ARMS = ("none", "labels", "cards", "placebo")
STUDY = Study(contrasts=(("cards", "none"), ("cards", "labels"), ("cards", "placebo")))


def made_up(rates: dict[str, float], *, seed: int = 0, targets: int = 8, repeats: int = 5) -> list[Chain]:
    """An experiment in which an arm's shots succeed at such a rate."""
    generator = random.Random(seed)
    return [
        chain(arm, f"target{target}", repeat, *(0.8 if generator.random() < rate else Code.MISMATCH for _ in range(3)))
        for arm, rate in rates.items() for target in range(targets) for repeat in range(1, repeats + 1)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.lab.studies.paired.RESAMPLES", 200)


outcomes = st.lists(
    st.tuples(st.sampled_from(ARMS[:3]), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=40
)


def from_outcomes(drawn: list[tuple[str, int, int, bool]]) -> list[Chain]:
    unique = {(arm, target, repeat): won for arm, target, repeat, won in drawn}
    return [chain(arm, f"t{target}", repeat, 0.9 if won else None) for (arm, target, repeat), won in unique.items()]


@settings(max_examples=50, deadline=None)
@given(outcomes)
def test_pairs_are_the_trials_that_both_arms_have(drawn: list[tuple[str, int, int, bool]]) -> None:
    chains = from_outcomes(drawn)
    own = {arm: {one.trial for one in chains if one.arm == arm} for arm in ARMS}
    assert len(first_shot_pairs(trials_by_arm(chains), "cards", "none", STUDY)) == len(own["cards"] & own["none"])


@settings(max_examples=40, deadline=None)
@given(outcomes)
def test_exchanging_the_arms_mirrors_the_comparison(drawn: list[tuple[str, int, int, bool]]) -> None:
    chains = from_outcomes(drawn)
    one, other = (compare(Study(contrasts=(arms,)), chains) for arms in (("cards", "none"), ("none", "cards")))
    for here, there in zip(one, other, strict=True):
        assert here.counts.only_first == there.counts.only_second
        assert here.difference.estimate == pytest.approx(-there.difference.estimate)
        assert here.difference.low == pytest.approx(-there.difference.high)
        assert here.p_permuted == pytest.approx(there.p_permuted, abs=0.1)


@settings(max_examples=25, deadline=None)
@given(outcomes, st.randoms(use_true_random=False))
def test_the_page_does_not_depend_on_the_order_of_files(
    drawn: list[tuple[str, int, int, bool]], generator: random.Random
) -> None:
    chains = from_outcomes(drawn)
    before = report(STUDY, chains)
    generator.shuffle(chains)
    assert report(STUDY, chains) == before


def test_an_effect_is_found_and_no_effect_is_not() -> None:
    """40 pairs find 0.3 against 0.8; equal rates differ by chance in one of twenty experiments at most."""
    (found, *_) = compare(STUDY, made_up({"none": 0.3, "cards": 0.8, "labels": 0.3, "placebo": 0.3}))
    assert found.name == "cards against none"
    assert found.counts.pairs == 40
    assert found.p_holm < 0.01
    assert found.difference.low > 0.2
    equal = [compare(STUDY, made_up(dict.fromkeys(ARMS, 0.5), seed=seed))[0].counts.p_greater for seed in range(60)]
    # 3 of 60 are expected at 0.05, fewer since the test is exact; a binomial of 0.05 is above 8 with probability 0.003
    assert sum(p <= 0.05 for p in equal) <= 8


def test_contrasts_without_pairs_yet_count_in_the_correction() -> None:
    (found,) = compare(STUDY, made_up({"none": 0.3, "cards": 0.8}))
    assert found.p_holm == pytest.approx(3 * found.counts.p_greater)


def test_holm_corrects_for_every_contrast() -> None:
    found = compare(STUDY, made_up({"none": 0.3, "cards": 0.7, "labels": 0.5, "placebo": 0.4}))
    assert [one.name.rpartition(" ")[2] for one in found] == ["none", "labels", "placebo"]
    for one in found:
        assert one.counts.p_greater <= one.p_holm <= min(1.0, 3 * max(each.counts.p_greater for each in found))
    assert min(found, key=lambda one: one.counts.p_greater).p_holm == pytest.approx(
        min(1.0, 3 * min(one.counts.p_greater for one in found))
    )


def test_a_trial_that_an_arm_has_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        trials_by_arm([chain("cards", "a", 1, 0.7), chain("cards", "a", 1, 0.2)])


def test_a_targets_own_threshold_decides() -> None:
    chains = from_outcomes([("cards", "a", 1, True), ("none", "a", 1, False)])
    strict = msgspec.structs.replace(STUDY, of_target={"ta": 1e6})
    (found,), (none,) = compare(STUDY, chains), compare(strict, chains)
    assert (found.counts.only_first, none.counts.only_first) == (1, 0)
    assert strict.least(chains[0]) == 1e6


def test_speeds_are_compared_where_both_have_one() -> None:
    chains = [
        chain("cards", "a", 1, 0.6, 2.0), chain("none", "a", 1, 1.0), chain("cards", "b", 1, None),
        chain("none", "b", 1, 4.0), chain("cards", "c", 1, 0.4), chain("none", "c", 1, 0.8),
    ]  # fmt: skip
    best = speed_ratio(chains, "cards", "none", Chain.best)
    assert best is not None
    assert (best.pairs, best.ratio.estimate) == (2, pytest.approx(math.sqrt(2.0 * 0.5)))
    first = speed_ratio(chains, "cards", "none", lambda chain: at_once(chain, STUDY))
    assert first is not None
    assert (first.pairs, first.ratio.estimate) == (1, pytest.approx(0.6))
    rooted = speed_ratio(chains, "cards", "none", lambda one: or_root(one, {"b": 0.04, "c": 0.5}))
    assert rooted is not None
    assert (rooted.pairs, rooted.ratio.estimate) == (3, pytest.approx((2.0 * 0.01 * (0.5 / 0.8)) ** (1 / 3)))
    assert speed_ratio(chains, "cards", "labels", Chain.best) is None


def test_the_page_has_every_number_of_a_small_experiment() -> None:
    chains = [
        chain("cards", "a", 1, 0.6), chain("cards", "a", 2, 0.7, 0.9), chain("cards", "b", 1, Code.MISMATCH, 0.8),
        chain("none", "a", 1, Code.TIMEOUT_RUN, 0.7), chain("none", "a", 2, 0.2), chain("none", "b", 1, None),
    ]  # fmt: skip
    page = report(Study(contrasts=(("cards", "none"),)), chains, {"a": 0.01, "b": 0.01})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert page.startswith("**cards against none: +67 [")
    assert rows[2][1:6] == ["3", "2", "0", "2", "0"]
    assert ["a", "2 of 2", "0 of 2"] in rows
    assert ["b", "0 of 1", "0 of 1"] in rows
    kinds = [kind.value for kind in ShotFailure]
    none = next(row for row in rows if row[:2] == ["none", "3"])
    assert none[2:5] == ["1", "200", "0.20"]
    assert dict(zip(kinds, none[5:], strict=True)) == dict.fromkeys(kinds, "0") | {
        "no kernel": "1", "hang": "1", "slow": "1",
    }  # fmt: skip


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    page = report(Study(contrasts=(("cards", "none"),)), [chain("cards", "a", 1, 0.6), chain("none", "a", 1, 0.6)])
    assert re.search(r"both a success +\| 1 +\| 1\.00 +\|", page)
    assert "inf" not in page


def test_a_null_result_says_what_it_excludes() -> None:
    page = report(STUDY, made_up(dict.fromkeys(ARMS, 0.5)))
    assert "is excluded" in page.partition("\n")[0]
    assert "is excluded" not in report(STUDY, made_up({"none": 0.1, "cards": 0.9})).partition("\n")[0]


@pytest.mark.parametrize("high", [1.0, math.inf])
def test_what_cannot_be_is_not_excluded(high: float) -> None:
    """One pair may leave an interval that ends at 100 points, or has no end."""
    (found,) = compare(STUDY, [chain("cards", "a", 1, 0.7), chain("none", "a", 1, 0.1)])
    assert found.difference.high == 1.0
    wide = msgspec.structs.replace(found.difference, high=high)
    assert "is excluded" not in _primary(msgspec.structs.replace(found, difference=wide))


def test_nothing_is_compared_before_it_is_measured() -> None:
    assert "|" not in report(STUDY, [])
    assert "|" not in report(STUDY, [chain("cards", "a", 1, 0.7)])


def test_a_whole_experiment_is_a_page_with_all_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "|" in report(STUDY, made_up({"none": 0.3, "labels": 0.35, "cards": 0.6, "placebo": 0.3}))
