"""Beam and experiences are the released ones: who is selected, which steps teach, what is kept."""

from __future__ import annotations

import random

import contest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.optimizers.accelopt.policy import (
    AccelOptSettings,
    Candidate,
    Experience,
    ExperiencePair,
    PlanSample,
    kept,
    rendered,
    selected,
    telling_pairs,
)
from pytest_klineage.records import KernelSource, SourceFile, Surface

SETTINGS = AccelOptSettings()


def kernel(name: str) -> KernelSource:
    return KernelSource(surface=Surface.CPP, files=(SourceFile("k.cpp", name),), entry="run")


def candidate(name: str = "parent", latency: float = 2.0) -> Candidate:
    return Candidate(kernel(name), latency)


def sample(plan: int, latency: float | None, name: str = "", row: int = 0) -> PlanSample:
    return PlanSample(row=row, plan=plan, kernel=kernel(name or f"{row}.{plan}.{latency}"), latency=latency)


def lost(plan: int) -> PlanSample:
    return PlanSample(row=0, plan=plan, kernel=None)


def names(beam: tuple[Candidate, ...]) -> list[str]:
    return [item.kernel.files[0].text for item in beam]


class TestBeam:
    def test_the_fastest_of_each_plan_fastest_first(self) -> None:
        samples = [sample(0, 2.0, "a"), sample(0, None), sample(1, None), sample(1, None), sample(2, 1.9, "c")]
        assert names(selected(samples, [candidate()], 2)) == ["c", "a"]

    def test_a_parent_stands_in_for_a_plan_that_failed(self) -> None:
        samples = [sample(0, 2.0, "a"), sample(0, None), sample(1, None), sample(1, None), sample(2, None)]
        assert names(selected(samples, [candidate()], 2)) == ["a", "parent"]
        assert names(selected(samples[2:], [candidate()], 2)) == ["parent", "parent"]

    def test_a_parent_does_not_compete_with_slower_children(self) -> None:
        assert names(selected([sample(0, 9.0, "slow")], [candidate(latency=1.0)], 2)) == ["slow"]

    def test_one_child_for_each_plan(self) -> None:
        samples = [sample(0, 1.0, "a"), sample(0, 1.1, "b"), sample(1, 1.2, "c")]
        assert names(selected(samples, [candidate()], 2)) == ["a", "c"]

    def test_replies_without_code_do_not_count(self) -> None:
        assert names(selected([lost(0), sample(1, 3.0, "a")], [candidate()], 2)) == ["a"]
        assert names(selected([lost(0), lost(1)], [candidate()], 2)) == ["parent"]

    def test_plans_of_two_candidates_are_apart(self) -> None:
        samples = [sample(0, 2.0, "a", row=0), sample(0, 1.0, "b", row=1), sample(1, None, row=1)]
        beam = [candidate("x"), candidate("y")]
        assert names(selected(samples, beam, 3)) == ["b", "a", "y"]


def by_speedups(speedups: dict[int, list[float]], row: int = 0) -> list[PlanSample]:
    """Samples whose speedups over a parent of latency 2 are given."""
    return [
        sample(plan, 2.0 / speedup, f"{row}.{plan}.{position}", row)
        for plan, several in speedups.items()
        for position, speedup in enumerate(several)
    ]


class TestPairs:
    def test_thresholds_and_representatives(self) -> None:
        samples = by_speedups({0: [1.18, 0.9], 1: [0.85, 0.95], 2: [1.0], 3: [1.03], 4: [0.87]})
        pairs = telling_pairs(samples, [candidate()], SETTINGS)
        assert [(pair.id, pytest.approx(pair.speedup)) for pair in pairs] == [("plan_0_0", 1.18), ("plan_0_1", 0.85)]
        success, failure = pairs
        assert (success.slow.files[0].text, success.fast.files[0].text) == ("parent", "0.0.0")
        assert (failure.slow.files[0].text, failure.fast.files[0].text) == ("0.1.0", "parent")

    def test_a_sample_as_fast_as_its_parent_represents_its_plan(self) -> None:
        assert telling_pairs(by_speedups({0: [1.0, 0.5]}), [candidate()], SETTINGS) == ()

    def test_half_are_successes_and_failures_fill_the_rest(self) -> None:
        fast = {plan: [1.1 + plan / 10] for plan in range(6)}
        slow = {plan: [0.8 - plan / 100] for plan in range(6, 16)}
        pairs = telling_pairs(by_speedups(fast | slow), [candidate()], SETTINGS)
        assert [pair.id for pair in pairs] == [f"plan_0_{plan}" for plan in (5, 4, 3, 2, 15, 14, 13, 12)]
        only_slow = telling_pairs(by_speedups(slow), [candidate()], SETTINGS)
        assert len(only_slow) == 8
        assert len(telling_pairs(by_speedups(fast), [candidate()], SETTINGS)) == 4

    def test_they_stand_by_candidate(self) -> None:
        samples = by_speedups({0: [1.1], 1: [0.5]}, 0) + by_speedups({0: [2.0], 1: [0.4]}, 1)
        pairs = telling_pairs(samples, [candidate("x"), candidate("y")], SETTINGS)
        assert [pair.id for pair in pairs] == ["plan_0_0", "plan_0_1", "plan_1_0", "plan_1_1"]

    def test_failed_and_missing_samples_teach_nothing(self) -> None:
        assert telling_pairs([sample(0, None), lost(1)], [candidate()], SETTINGS) == ()


def experience(number: int, summary: str = "text") -> Experience:
    pair = ExperiencePair(id=f"plan_0_{number}", speedup=1.2, slow=kernel("a"), fast=kernel("b"))
    return Experience.of(pair, f"**Title {number}** {summary}")


class TestExperiences:
    @settings(deadline=None)
    @given(new=st.integers(0, 20), old=st.integers(0, 30), capacity=st.integers(0, 20), seed=st.integers(0, 99))
    def test_new_ones_first_then_a_sample_of_the_old(self, new: int, old: int, capacity: int, seed: int) -> None:
        fresh = [experience(number) for number in range(new)]
        known = [experience(100 + number) for number in range(old)]
        result = kept(fresh, known, capacity, random.Random(seed))
        assert list(result[:new]) == fresh
        assert len(result) == max(new, min(capacity, new + old))
        rest = [item.pair.id for item in result[new:]]
        assert len(set(rest)) == len(rest)
        assert set(rest) <= {item.pair.id for item in known}
        assert result == kept(fresh, known, capacity, random.Random(seed))

    def test_it_is_no_queue(self) -> None:
        known = [experience(number) for number in range(16)]
        survivors = [kept([experience(99)] * 8, known, 16, random.Random(seed))[8:] for seed in range(40)]
        assert {item.pair.id for some in survivors for item in some} == {item.pair.id for item in known}

    def test_a_reply_becomes_an_experience(self) -> None:
        pair = experience(0).pair
        assert Experience.of(pair, "plain * words ****").title == ""
        found = Experience.of(pair, " **Tile K** by 8\n")
        assert (found.title, found.summary) == ("**Tile K**", "**Tile K** by 8")
        nothing = Experience.of(pair, "Hm: no optimization FOUND here")
        assert (nothing.title, nothing.summary) == ("**No optimization found**", "")

    def test_only_summaries_are_shown(self) -> None:
        shown = rendered([experience(1, "one"), experience(2, "No optimization found"), experience(3, "three")])
        assert shown == "# Experiences\n\n**Title 1** one\n\n**Title 3** three"
        assert rendered([experience(2, "No optimization found")]) == ""


ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.one_of(st.none(), st.floats(0.1, 10)), st.booleans()),
    max_size=40,
)


@settings(deadline=None)
@given(rows=ROWS, width=st.integers(1, 6))
def test_whatever_was_measured_the_rules_hold(rows: list[tuple[int, int, float | None, bool]], width: int) -> None:
    samples = [
        PlanSample(
            row=row, plan=plan, kernel=kernel(str(number)) if has_code else None, latency=latency if has_code else None
        )
        for number, (row, plan, latency, has_code) in enumerate(rows)
    ]
    beam = [candidate("x", 1.0), candidate("y", 2.0)]
    chosen = selected(samples, beam, width)
    assert chosen
    assert len(chosen) <= max(width, 2)
    latencies = [item.latency for item in chosen if item not in beam]
    assert latencies == sorted(latencies)
    if latencies:
        assert latencies[0] == min(item.latency for item in samples if item.latency is not None)
    pairs = telling_pairs(samples, beam, SETTINGS)
    assert len(pairs) <= 8
    assert sum(pair.speedup > 1 for pair in pairs) <= 4
    assert all(pair.speedup > 1.04 or pair.speedup < 1 / 1.15 for pair in pairs)
    assert len({pair.id for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"beam": 0}, {"capacity": -1}, {"success_over": 0.9}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        AccelOptSettings(**wrong)  # type: ignore[arg-type]


def test_the_released_recipe_is_the_default() -> None:
    assert (SETTINGS.iterations, SETTINGS.beam, SETTINGS.plans, SETTINGS.samples) == (16, 2, 4, 2)
    assert (SETTINGS.new_experiences, SETTINGS.capacity, SETTINGS.success_over) == (8, 16, 1.04)
    assert (SETTINGS.failure_over, SETTINGS.max_output_tokens) == (1.15, 20000)


def test_kernels_of_iterations_are_those_of_the_recipe() -> None:
    """8 in the first iteration, 16 in every later one; no default limit of the comparison ends its search."""
    assert [SETTINGS.kernels(iterations) for iterations in (1, 2, 16)] == [8, 24, 248]
    assert AccelOptSettings(beam=3, plans=2, samples=1).kernels(3) == 2 + 6 + 6
    assert SETTINGS.kernels(SETTINGS.iterations) < contest.STEPS
