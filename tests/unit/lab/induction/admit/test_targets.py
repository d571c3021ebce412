"""Targets of a card: which cases it is tried at, and what is expected there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from admission_trials import (
    SHAPES,
    card_of,
    lineage_of,
)

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget, expected_speedup, targets_for
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.operators import OPERATORS, operator, paper_case
from pytest_klineage.operators.base import named_shape
from pytest_klineage.records import (
    Category,
    Context,
    Effect,
    Interval,
    SkillCard,
    Surface,
)


def test_what_is_expected_is_half_of_the_effect_in_logarithms(card: SkillCard, stored: StoredLineage) -> None:
    assert expected_speedup(card) == 1.5
    assert expected_speedup(card, 1.0) == 2.25
    with pytest.raises(UsageError, match="no measured speedup above 1"):
        expected_speedup(card_of(stored, effect=Effect(summary="fast")))
    with pytest.raises(UsageError, match="no measured speedup above 1"):
        expected_speedup(card_of(stored, effect=Effect(summary="fast", speedup=Interval(1.0, 0.9, 1.1))))


def test_other_shapes_first_then_other_operators(card: SkillCard, stored: StoredLineage) -> None:
    other = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    unlike = lineage_of("topk", (4, 256, 32), Category.SIMD)
    found = targets_for(card, [other, unlike, stored], SHAPES)
    # The card's own shape is no target, and neither is an operator without a step of the card's category.
    assert [target.case.id for target in found] == [
        "gemm-96x48x64-fp32", "gemm-48x96x64-fp32", "conv2d-1x8x12x12x16x3x1x1-fp32",
    ]  # fmt: skip
    assert {target.case.at_least for target in found} == {1.5}
    assert found[0].state.digest == stored.sources[0].digest
    assert found[0].why == "gemm/cpu-cpp step 1: the state before its own step, at another shape"
    assert found == targets_for(card, [stored, unlike, other], SHAPES)


def test_a_platform_that_the_card_is_not_from_is_no_target(card: SkillCard) -> None:
    stored = lineage_of("conv2d", (1, 8, 12, 12, 16, 3, 1, 1))
    gpu = msgspec.structs.replace(stored, lineage=msgspec.structs.replace(stored.lineage, platform="sm90"))
    assert targets_for(card, [gpu], SHAPES) == []


def test_what_was_done_before_is_part_of_the_place(target: AdmissionTarget) -> None:
    assert target.context == Context(
        operator="gemm", shape={"M": 96, "N": 48, "K": 64}, dtype="fp32", surface=Surface.CPP, platform="cpu"
    )
    assert target.name == f"gemm-96x48x64-fp32-{target.state.digest[:8]}"


def test_the_suites_shapes_are_cases_outside_the_paper() -> None:
    path = Path(__file__).parents[5] / "suites" / "admission" / "targets.toml"
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
