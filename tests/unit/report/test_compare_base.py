"""What is said of a kernel and its base: the outcome of a pooled interval, its words, and what narrows it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pytest_klineage.records import Code, Interval, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.compare_base import (
    compare_base,
    contradicts,
    judge_again,
    pooled_outcome,
    precision_for,
    undisturbed,
)

Make = Callable[..., Verdict]
BELOW, ACROSS, WITHIN, ABOVE = (
    Interval(estimate, estimate - 0.01, estimate + 0.01, 0.995) for estimate in (0.9, 0.97, 1.0, 1.1)
)


def found(judged: list[Verdict], change: Interval | None, margin: float = 0.03) -> Comparison:
    return compare_base("a", judged[0], judged, change, margin=margin)


def stopped(verdict: Verdict, why: str) -> Verdict:
    assert verdict.timing is not None
    return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(verdict.timing, stopped=why))


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (BELOW, ["unclear", "unclear", "slower", "slower"]),
        (ACROSS, ["unclear"] * 4),
        (WITHIN, ["unclear", "same", "same", "same"]),
        (ABOVE, ["unclear", "unclear", "faster", "faster"]),
    ],
)
def test_an_outcome_needs_judgements_enough(change: Interval, counts: list[str]) -> None:
    assert [pooled_outcome(change, 0.03, count).value for count in range(4)] == counts


@pytest.mark.parametrize(("one", "vetoed"), [(BELOW, False), (ACROSS, False), (WITHIN, True), (ABOVE, True)])
def test_one_judgement_that_contradicts_has_a_veto(one: Interval, vetoed: bool) -> None:
    assert contradicts(one, ComparisonOutcome.SLOWER, 0.03) is vetoed
    assert not contradicts(one, ComparisonOutcome.SAME, 0.03)


def test_a_vetoed_change_is_unclear(make_verdict: Make) -> None:
    judged = [make_verdict(speedup=speedup) for speedup in (0.9, 1.0, 0.9)]
    assert found(judged, BELOW).outcome is ComparisonOutcome.UNCLEAR
    assert found([judged[0], judged[2]], BELOW).outcome is ComparisonOutcome.SLOWER


@pytest.mark.parametrize("code", [Code.MISMATCH, Code.REPLAY, Code.WRAPPER_LIBRARY, Code.EXCEPTION])
def test_a_head_that_fails_beside_the_base_is_broken(make_verdict: Make, code: Code) -> None:
    made = found([make_verdict(), make_verdict(code, None, message="bad\nlog")], WITHIN)
    assert made.outcome is ComparisonOutcome.BROKEN
    assert made.outcome.bad
    assert made.message == f"beside the base's kernel it is {code.value}: bad"


def test_sampling_goes_on_to_a_quarter_of_the_margin() -> None:
    assert precision_for(0.03) == pytest.approx(0.0075)


def test_it_is_judged_again_while_it_is_unclear(make_verdict: Make) -> None:
    judged = [make_verdict(speedup=0.95) for _ in range(3)]
    assert [judge_again(found(judged[:number], ACROSS)) for number in (1, 2, 3)] == [True, True, False]
    assert [judge_again(found(judged[:number], BELOW)) for number in (1, 2, 3)] == [True, False, False]
    assert not judge_again(found(judged[:1], WITHIN))


def test_judgements_and_figures_are_kept(make_verdict: Make) -> None:
    judged = [make_verdict(speedup=speedup) for speedup in (0.89, 0.9, 0.91)]
    one, three = found(judged[:1], BELOW), found(judged, BELOW)
    assert (one.ratio, one.ratios, one.verdict, one.more) == (BELOW, (), judged[0], ())
    assert len(found(judged[:2], BELOW).ratios) == 2
    assert (three.ratio, three.verdict, three.more) == (BELOW, judged[0], (judged[1], judged[2]))
    assert [ratio.estimate for ratio in three.ratios] == [0.89, 0.9, 0.91]
    assert (three.against, three.margin, three.old) == ("base", 0.03, None)
    assert three.new is not None
    assert three.new.estimate == 0.89


def test_the_message_says_from_what(make_verdict: Make) -> None:
    judged = [make_verdict(speedup=speedup) for speedup in (0.89, 0.91)]
    assert found(judged[:1], WITHIN).message == (
        "1.000x [0.990, 1.010] of the speed of the base, all of it within 0.97 to 1.03 (99.5 % interval, one judgement)"
    )
    assert found(judged, BELOW).message == (
        "0.900x [0.890, 0.910] of the speed of the base, all of it below 0.97 to 1.03 "
        "(99.5 % interval, 2 judgements: 0.890x, 0.910x)"
    )
    assert "reaching over 0.97 to 1.03" in found(judged, ACROSS).message
    assert "all of it above 0.97 to 1.03" in found(judged, ABOVE).message


@pytest.mark.parametrize("code", [Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE, Code.INCONCLUSIVE_FEW])
def test_a_disturbance_is_named(make_verdict: Make, code: Code) -> None:
    bad, good = make_verdict(code, 0.8, message="others\nwere there"), make_verdict(speedup=0.9)
    assert undisturbed([good, bad, good]) == [good, good]
    made = found([good, bad, make_verdict(code, 0.8, message="another")], BELOW)
    assert made.outcome is ComparisonOutcome.UNCLEAR
    assert made.message.endswith("3 judgements: 0.900x, 0.800x, 0.800x; 2 disturbed: others)")
    assert "quieten the machine" in made.advice


@pytest.mark.parametrize(
    ("ends", "said", "unsaid"),
    [
        (["time limit", "precise", "precise"], "raise --klineage-time-limit", "about the margin"),
        (["precise", "precise", "precise"], "the change is about the margin", "--klineage-time-limit"),
        (["start limit", "start limit", "pair limit"], "more time would not narrow", "--klineage-time-limit"),
    ],
)
def test_the_advice_is_what_narrows_the_interval(make_verdict: Make, ends: list[str], said: str, unsaid: str) -> None:
    made = found([stopped(make_verdict(), end) for end in ends], ACROSS)
    assert said in made.advice
    assert unsaid not in made.advice


def test_a_clear_outcome_has_its_own_advice(make_verdict: Make) -> None:
    slower, faster = ([make_verdict(speedup=speedup)] * 2 for speedup in (0.9, 1.1))
    assert "profile" in found(slower, BELOW).advice
    assert found(faster, ABOVE).advice == found(faster, WITHIN).advice == ""


def test_a_base_that_was_not_timed_says_why(make_verdict: Make) -> None:
    failed = make_verdict(Code.COMPILE, None, message="no\nlog")
    wrong = make_verdict(Code.COMPILE, 0.9, message="no\nlog")
    for judged in ([failed], [make_verdict(), failed], [wrong]):
        made = found(judged, None if len(judged) == 1 else WITHIN)
        assert made.outcome is ComparisonOutcome.BASE_FAILED
        assert not made.outcome.bad
        assert (made.against, made.margin) == ("base", 0.03)
        assert made.message == "the base's kernel could not be compared with: build_error.compile: no"
        assert "flags of the head" in made.advice
        assert (made.verdict, *made.more) == tuple(judged)
