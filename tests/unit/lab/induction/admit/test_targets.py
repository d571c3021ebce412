"""Targets of a card: which cases it is tried at, and what is expected there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from admission_trials import (
    AGAIN,
    SHAPES,
    card_of,
    lineage_of,
    source_of,
)

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget, required_speedup, targets_for
from pytest_klineage.lab.induction.derive import without_header
from pytest_klineage.lab.library.cards import find_cards, with_trials
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.normalise import held_out
from pytest_klineage.lab.making import read_shapes, verified_lineages
from pytest_klineage.operators import OPERATORS, operator, paper_case
from pytest_klineage.operators.base import named_shape
from pytest_klineage.records import (
    AdmissionRule,
    CardStatus,
    Category,
    Context,
    Effect,
    Interval,
    SkillCard,
    Surface,
    Trial,
    TrialOutcome,
)

ROOT = Path(__file__).parents[5]
STRICT, PREDECESSOR = AdmissionRule.STRICT, AdmissionRule.PREDECESSOR


def test_seventy_percent_of_the_gain() -> None:
    # Recorded effects of the wgmma, the tile and the digit-selection cards of sm90.
    assert [required_speedup(effect) for effect in (1.0892, 1.9925, 21.448)] == [1.062, 1.695, 15.314]


def test_a_card_without_an_effect_shows_nothing(stored: StoredLineage) -> None:
    for effect in (Effect(summary="fast"), Effect(summary="fast", speedup=Interval(1.0, 0.9, 1.1))):
        with pytest.raises(UsageError, match="no measured speedup above 1"):
            targets_for(card_of(stored, effect=effect), [stored], SHAPES)


def test_other_operators_then_shapes_then_its_predecessor(card: SkillCard, stored: StoredLineage) -> None:
    other = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    unlike = lineage_of("topk", (4, 256, 32), Category.SIMD)
    found = targets_for(card, [other, unlike, stored], SHAPES)
    # The card's own shape is no strict target, and neither is an operator without a step of the card's category.
    assert [target.rule for target in found] == [STRICT] * 3 + [PREDECESSOR]
    assert found[0].case.id == "conv2d-1x8x12x12x16x3x1x1-fp32"
    assert {target.case.id for target in found[1:3]} == {"gemm-96x48x64-fp32", "gemm-48x96x64-fp32"}
    assert found[3].case.id == stored.lineage.case.id
    assert {(target.expected, target.case.at_least) for target in found} == {(2.25, 1.875)}
    own = stored.sources[1].digest
    assert [target.state.digest == own for target in found] == [True, False, False, True]  # all are of one text here
    assert {target.state.digest for target in found[1:3]} == {source_of(AGAIN).digest}


def test_another_language_is_tried_and_admits_nothing(card: SkillCard, stored: StoredLineage) -> None:
    other = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    sources = tuple(msgspec.structs.replace(source, surface=Surface.PYTHON) for source in other.sources)
    lineage = msgspec.structs.replace(other.lineage, surface=Surface.PYTHON)
    elsewhere = msgspec.structs.replace(other, lineage=lineage, sources=sources)
    found = targets_for(card, [stored, elsewhere], {})
    assert [target.rule for target in found] == [PREDECESSOR, AdmissionRule.LANGUAGE]
    assert (found[1].surface, found[1].expected) == (Surface.PYTHON, 2.25)
    trial = Trial(
        context=found[1].context, outcome=TrialOutcome.SUCCESS, held_out=False, rule=AdmissionRule.LANGUAGE
    )  # fmt: skip
    tried = with_trials(card, [trial])
    assert tried.status is CardStatus.CANDIDATE
    assert [one.held_out for one in tried.log] == [False]


def test_a_trial_changes_no_choice(card: SkillCard, stored: StoredLineage) -> None:
    other = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    found = targets_for(card, [stored, other], SHAPES)
    trial = Trial(context=found[1].context, outcome=TrialOutcome.SUCCESS, held_out=True, rule=STRICT)
    admitted = with_trials(card, [trial])
    assert admitted.status is CardStatus.ADMITTED
    assert targets_for(admitted, [other, stored], SHAPES) == found


def test_a_step_that_does_not_pay_or_comes_again_is_no_target(card: SkillCard, stored: StoredLineage) -> None:
    place = ("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    idle = lineage_of(*place, effect=Interval(1.01, 0.99, 1.03))
    again = lineage_of(*place, after=Category.CACHE_BLOCK)
    assert [target.case.operator for target in targets_for(card, [stored, idle], {})] == ["gemm"]
    (first, _own) = targets_for(card, [stored, again], {})
    assert first.state.digest == again.sources[0].digest


def test_a_step_that_was_not_timed_is_timed_first(card: SkillCard, stored: StoredLineage) -> None:
    other = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1), effect=None)
    (found, _own) = targets_for(card, [stored, other], {})
    assert (found.expected, found.after) == (None, other.sources[2])
    naive, slow, fast = other.lineage.states
    as_slow = msgspec.structs.replace(fast, verdict=slow.verdict)
    lineage = msgspec.structs.replace(other.lineage, states=(naive, slow, as_slow))
    assert len(targets_for(card, [stored, msgspec.structs.replace(other, lineage=lineage)], {})) == 1


def test_the_librarys_gpu_cards_have_targets_that_are_held_out() -> None:
    lineages = verified_lineages(ROOT / "experts")
    shapes = read_shapes(ROOT / "suites" / "admission" / "targets.toml", "sm90")
    cards = [card for card in find_cards(ROOT / "skills") if card.name.startswith("sm90")]
    waiting = []
    steps = {step.digest: (stored, at) for stored in lineages for at, step in enumerate(stored.lineage.transitions)}
    for card in cards:
        cited = [steps[item.transition] for item in card.evidence]
        before = {without_header(stored.sources[at]).digest for stored, at in cited}
        targets = targets_for(card, lineages, shapes)
        strict = [target for target in targets if target.rule is STRICT]
        # Without a place that is held out a card stays a candidate, until the kernel before its step is re-derived.
        assert strict or card.status is CardStatus.CANDIDATE, card.name
        assert all(held_out(target.context, card.origins) for target in strict)
        assert before.isdisjoint(target.state.digest for target in strict)
        (own,) = [target for target in targets if target.rule is PREDECESSOR]
        assert own.state.digest in before
        waiting += [card.name] * (not strict)
    assert len(waiting) < len(cards) / 4, waiting


def test_a_platform_that_the_card_is_not_from_is_no_target(card: SkillCard) -> None:
    stored = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    gpu = msgspec.structs.replace(stored, lineage=msgspec.structs.replace(stored.lineage, platform="sm90"))
    assert targets_for(card, [gpu], SHAPES) == []


def test_what_was_done_before_is_part_of_the_place(target: AdmissionTarget) -> None:
    assert target.context == Context(
        operator="gemm", shape={"M": 96, "N": 48, "K": 64}, dtype="fp32", surface=Surface.CPP, platform="cpu",
        prior=(Category.BLOCK_PARALLEL,),
    )  # fmt: skip
    assert target.name == f"gemm-96x48x64-fp32-{target.state.digest[:8]}"


def test_the_suites_shapes_are_cases_outside_the_paper() -> None:
    path = ROOT / "suites" / "admission" / "targets.toml"
    for platform, table in tomllib.loads(path.read_text()).items():
        tier = "cpu" if platform == "cpu" else "gpu"
        assert set(table) <= set(OPERATORS)
        for name, shapes in table.items():
            paper = paper_case(name, tier, "torch")
            chosen = operator(name)
            for shape in shapes:
                case = paper.at_shape(named_shape(chosen, tuple(shape)))
                chosen.validate(case)
                assert case.id != paper.id
                assert 0.25 < chosen.flops(case) / chosen.flops(paper) < 4
