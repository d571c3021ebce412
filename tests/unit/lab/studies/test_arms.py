"""Which cards an arm shows: relevant ones by the library's retrieval, and a placebo of the same length."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.retrieval import RetrievalTarget
from pytest_klineage.lab.studies.arms import cards_for, placebo_for, tokens_of
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase, SkillCard, Surface

LIBRARY = tuple(find_cards(Path(__file__).parents[4] / "skills"))
OF_SM90 = tuple(card for card in LIBRARY if card.name.startswith("sm90"))
OWN = msgspec.structs.replace(make_case("gemm", (4096, 4096, 2048), "bf16", "torch"), requires=("wgmma",))


def chosen(own: KernelCase = OWN, near: KernelCase | None = None, k: int = 8) -> tuple[SkillCard, ...]:
    target = RetrievalTarget(case=near or own, surface=Surface.CUDA, platform="sm90")
    return cards_for(LIBRARY, target, own, k=k, at_most=4)


def test_cards_know_a_required_instruction() -> None:
    found = chosen()
    assert len(found) == 4
    assert all("wgmma" in card.scope.capabilities and "sm90" in card.scope.platforms for card in found)
    assert {"gemm"} <= {at.operator for card in found for at in card.origins}


def test_the_nearest_case_comes_first() -> None:
    near = [any(at.operator == "gemm" for at in card.verified) for card in chosen()]
    assert near == sorted(near, reverse=True)


def test_without_requirements_all_cards_of_the_platform_count() -> None:
    topk = make_case("topk", (32, 131072, 2048), "fp32", "torch")
    assert all("topk" in {at.operator for at in card.verified} for card in chosen(topk))
    assert not {"wgmma"} & {word for card in chosen(topk) for word in card.scope.capabilities}


def test_cards_of_the_targets_own_problem_are_left_out() -> None:
    lineage = msgspec.structs.replace(make_case("gemm", (4096, 4096, 4096), "bf16", "torch"), requires=("wgmma",))
    assert not any(at.operator == "gemm" for card in chosen(lineage) for at in card.origins)


def test_a_kin_operators_cards_are_no_contamination() -> None:
    """An 8-bit product has no lineage; a bf16 one of its shape is kin, not the same."""
    kin = make_case("gemm", (4096, 4096, 4096), "bf16", "torch")
    own = msgspec.structs.replace(kin, operator="fp8_gemm", requires=("wgmma",))
    cards = chosen(own, kin)
    assert any(at.operator == "gemm" for card in cards for at in card.origins)
    lifted = [msgspec.structs.replace(at, operator=own.operator, shape=own.shape) for at in cards[0].origins]
    mine = msgspec.structs.replace(cards[0], name="mine", origins=(*lifted, *cards[0].origins))
    target = RetrievalTarget(case=kin, surface=Surface.CUDA, platform="sm90")
    assert cards_for([mine, *LIBRARY], target, own, k=8, at_most=4) == cards


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(OF_SM90), min_size=1, max_size=4, unique_by=lambda card: card.name))
def test_a_placebo_is_as_long_and_comes_from_elsewhere(cards: list[SkillCard]) -> None:
    found = placebo_for(LIBRARY, "sm90", cards)
    assert 1 <= len(found) <= len(cards)
    assert not any("sm90" in card.scope.platforms for card in found)
    assert len({card.name for card in found}) == len(found)
    wanted = sum(map(tokens_of, cards))
    shortest = min(tokens_of(card) for card in LIBRARY if "sm90" not in card.scope.platforms)
    assert abs(sum(map(tokens_of, found)) - wanted) <= shortest


def test_four_cards_and_their_placebo_are_of_one_length() -> None:
    cards = chosen()
    placebo = placebo_for(LIBRARY, "sm90", cards)
    assert sum(map(tokens_of, placebo)) == pytest.approx(sum(map(tokens_of, cards)), rel=0.01)


def test_a_library_of_one_platform_has_no_placebo() -> None:
    with pytest.raises(ValueError, match="the library has none"):
        placebo_for(OF_SM90, "sm90", OF_SM90[:2])
