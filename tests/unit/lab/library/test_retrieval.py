"""Retrieval: who is in, in which order, why, and that nothing else decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.retrieval import CardIndex, Dimension, Retrieval, RetrievalTarget
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Context,
    KernelCase,
    SkillCard,
    Surface,
    Trial,
    TrialOutcome,
)

MakeCard = Callable[..., SkillCard]
CASE = KernelCase(operator="gemm", shape={"M": 4096, "N": 4096, "K": 4096}, dtype="bf16", reference="cublas")
PLAIN = Carrier(kind=CarrierKind.ANNOTATION, language="text", text="as it is")


def context(**fields: Any) -> Context:
    given: dict[str, Any] = {
        "operator": "gemm", "shape": {"M": 2048, "N": 2048, "K": 2048}, "dtype": "bf16", "surface": Surface.CUDA,
        "platform": "sm90",
    }  # fmt: skip
    return Context(**(given | fields))


def target(**fields: Any) -> RetrievalTarget:
    given: dict[str, Any] = {"case": CASE, "surface": Surface.CUDA, "platform": "sm90"}
    return RetrievalTarget(**(given | fields))


@pytest.fixture(scope="session")
def simple(make_card: MakeCard) -> Callable[..., SkillCard]:
    """An admitted card that was verified at one place only."""

    def make(name: str, *, category: Category = Category.TEMPLATIZE, **fields: Any) -> SkillCard:
        position = {key: fields.pop(key) for key in list(fields) if key in Context.__struct_fields__}
        given: dict[str, Any] = {
            "name": name,
            "category": category,
            "carrier": PLAIN,
            "scope": CardScope(),
            "origins": (context(**position),),
            "log": (),
        }
        return make_card(**(given | fields))

    return make


def retrieve(cards: Iterable[SkillCard], target: RetrievalTarget, k: int = 4, **options: bool) -> Retrieval:
    return CardIndex(cards).retrieve(target, k, **options)


def names(found: Retrieval) -> list[str]:
    return [match.card.name for match in found.matches]


def reason(found: Retrieval, name: str) -> str:
    return next(item.reason for item in found.explanations if item.name == name)


def test_the_nearest_of_each_dimension_are_in(simple: MakeCard) -> None:
    cards = [
        simple("by-case", operator="gemm", surface=Surface.PYTHON, platform="cpu", prior=(Category.MMA,)),
        simple("by-language", operator="topk", dtype="fp32", platform="cpu", prior=(Category.MMA,)),
        simple("by-platform", operator="topk", dtype="fp32", surface=Surface.PYTHON, prior=(Category.MMA,)),
        simple("by-done", operator="topk", dtype="fp32", surface=Surface.PYTHON, platform="cpu"),
        simple(
            "by-nothing", operator="topk", dtype="fp32", surface=Surface.PYTHON, platform="cpu", prior=(Category.MMA,)
        ),
    ]
    found = retrieve(cards, target(), k=1, explain=True)
    assert {match.card.name: match.by for match in found.matches} == {
        f"by-{dimension.value}": (dimension,) for dimension in Dimension
    }
    assert reason(found, "by-nothing") == "not among the nearest 1 in any dimension"
    assert reason(found, "by-case") == "among the nearest 1 by case"


def test_the_nearest_comes_before_equals_further_away(simple: MakeCard) -> None:
    """Three cards are equally near behind one that is nearer: it is one of two."""
    cards = [simple(name) for name in "abc"] + [simple("nearest", shape=dict(CASE.shape))]
    by = {match.card.name: match.by for match in retrieve(cards, target(), k=2).matches}
    assert [name for name, dimensions in by.items() if Dimension.CASE in dimensions] == ["nearest", "a"]


def test_the_order_is_by_the_sum_and_then_by_name(simple: MakeCard) -> None:
    cards = [simple("b"), simple("a"), simple("near", shape=dict(CASE.shape)), simple("far", platform="sm120")]
    assert names(retrieve(cards, target())) == ["near", "a", "b", "far"]


def test_similarities_use_the_verified_scope(simple: MakeCard) -> None:
    anywhere = CardScope(operators=("*",), platforms=("*",), surfaces=("*",))
    found = retrieve([simple("a", operator="topk", platform="cpu", scope=anywhere)], target(), explain=True)
    near = found.explanations[0].similarities
    assert near.platform == 0.0
    assert near.case == pytest.approx(0.2)


def test_only_a_success_widens_the_verified_scope(simple: MakeCard) -> None:
    here = context(shape=dict(CASE.shape))
    for outcome, platform in ((TrialOutcome.SUCCESS, 1.0), (TrialOutcome.REJECTED, 0.0)):
        trial = Trial(context=here, outcome=outcome, held_out=True)
        found = retrieve([simple("a", platform="cpu", log=(trial,))], target(), explain=True)
        assert found.explanations[0].similarities.platform == platform


@pytest.mark.parametrize(
    ("fields", "dimension", "value"),
    [
        ({"shape": dict(CASE.shape)}, Dimension.CASE, 1.0),
        ({}, Dimension.CASE, 0.9),
        ({"shape": {"M": 4096, "N": 4096}}, Dimension.CASE, 0.8),
        ({"dtype": "fp16"}, Dimension.CASE, 0.8),
        ({"dtype": "fp32"}, Dimension.CASE, 0.7),
        ({"operator": "fmha"}, Dimension.CASE, 0.5),
        ({"operator": "unheard-of", "dtype": "x"}, Dimension.CASE, 0.0),
        ({"surface": Surface.CPP}, Dimension.LANGUAGE, 0.5),
        ({"surface": Surface.TRITON}, Dimension.LANGUAGE, 0.0),
        ({"platform": "sm90a"}, Dimension.PLATFORM, 1.0),
        ({"platform": "sm120"}, Dimension.PLATFORM, 0.5),
        ({"platform": "cpu"}, Dimension.PLATFORM, 0.0),
        ({"prior": (Category.SIMD,)}, Dimension.DONE, 0.0),
    ],
)
def test_similarities_are_what_the_documentation_says(
    simple: MakeCard, fields: dict[str, Any], dimension: Dimension, value: float
) -> None:
    found = retrieve([simple("a", **fields)], target(), explain=True)
    assert found.explanations[0].similarities[list(Dimension).index(dimension)] == pytest.approx(value)


def test_steps_done_are_compared_as_sets(simple: MakeCard) -> None:
    done = frozenset({Category.TILE_STAGE, Category.MMA})
    card = simple("a", prior=(Category.MMA, Category.PIPELINE))
    assert retrieve([card], target(done=done), explain=True).explanations[0].similarities.done == pytest.approx(1 / 3)


def test_a_step_that_is_done_is_no_nearest_next_step(simple: MakeCard) -> None:
    found = retrieve([simple("a", category=Category.FUSION)], target(done=frozenset({Category.FUSION})), explain=True)
    assert found.explanations[0].similarities.done == 0.0


def test_a_step_of_the_kernel_is_never_next_however_alike(simple: MakeCard) -> None:
    done = frozenset({Category.FUSION, Category.MMA})
    for category, value in ((Category.TEMPLATIZE, 0.5), (Category.FUSION, 0.0)):
        found = retrieve([simple("a", category=category, prior=(Category.MMA,))], target(done=done), explain=True)
        assert found.explanations[0].similarities.done == pytest.approx(value)


def test_a_card_verified_nowhere_is_near_nothing(simple: MakeCard) -> None:
    found = retrieve([simple("a", origins=())], target(), explain=True)
    assert found.explanations[0].similarities == (0.0, 0.0, 0.0, 0.0)
    assert names(found) == []


def test_among_equals_the_nearest_in_all_is_in(simple: MakeCard) -> None:
    assert names(retrieve([simple("a", platform="sm120"), simple("b")], target(), k=1)) == ["b"]


def test_every_dimension_of_a_card_is_named(simple: MakeCard) -> None:
    words = reason(retrieve([simple("a")], target(), explain=True), "a").replace(",", "").split()
    assert {dimension.value for dimension in Dimension} <= set(words)


# --- who is left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["sm120", "cpu"])
@pytest.mark.parametrize(
    "fields",
    [
        {"category": Category.WGMMA},
        {"category": Category.TMA_LOAD},
        {"category": Category.TMA_STORE},
        {"category": Category.MULTICAST},
        {"scope": CardScope(capabilities=("wgmma",))},
        {"scope": CardScope(capabilities=("TMA",))},
        {"scope": CardScope(capabilities=("clusters",))},
        {"carrier": Carrier(kind=CarrierKind.SNIPPET, language="cuda", text='asm("wgmma.fence.sync.aligned;")')},
        {"carrier": Carrier(kind=CarrierKind.SNIPPET, language="cuda", text="wgmma_64x128x16(sum, a, b);")},
        {"carrier": Carrier(kind=CarrierKind.DIFF, language="diff", text="+ CUtensorMap map;")},
        {"carrier": Carrier(kind=CarrierKind.SNIPPET, language="cuda", text="__cluster_dims__(2, 1, 1)")},
    ],
    ids=str,
)
def test_what_only_hopper_can_do_reaches_no_other_platform(
    simple: MakeCard, fields: dict[str, Any], platform: str
) -> None:
    trial = Trial(context=context(platform=platform), outcome=TrialOutcome.SUCCESS, held_out=True)
    card = simple("hopper", log=(trial,), **fields)
    found = retrieve([card], target(platform=platform), candidates=True, explain=True)
    assert names(found) == []
    assert f"which {platform} is not granted" in reason(found, "hopper")
    assert names(retrieve([card], target(platform="sm90a"))) == ["hopper"]


def test_everything_that_a_platform_lacks_is_named(simple: MakeCard) -> None:
    card = simple("hopper", scope=CardScope(capabilities=("wgmma", "clusters")))
    words = reason(retrieve([card], target(platform="cpu"), explain=True), "hopper").replace(",", "").split()
    assert {"wgmma", "cluster"} <= set(words)


def test_an_index_answers_as_the_function_by_default(simple: MakeCard) -> None:
    cards = [simple(status.value, status=status, shape=dict(CASE.shape)) for status in CardStatus]
    found = CardIndex(cards).retrieve(target())
    assert found == retrieve(cards, target())
    assert names(found) == ["admitted"]
    assert found.matches[0].contaminated
    assert found.explanations == ()


def test_a_machine_may_add_what_its_platform_lacks(simple: MakeCard) -> None:
    card = simple("wide", platform="cpu", scope=CardScope(capabilities=("avx512",)))
    assert names(retrieve([card], target(platform="cpu"))) == []
    assert names(retrieve([card], target(platform="cpu", capabilities=("avx512",)))) == ["wide"]


def test_candidates_on_request_and_retired_cards_never(simple: MakeCard) -> None:
    cards = [simple(status.value, status=status) for status in CardStatus]
    assert names(retrieve(cards, target())) == ["admitted"]
    found = retrieve(cards, target(), candidates=True, explain=True)
    assert names(found) == ["admitted", "candidate"]
    assert reason(found, "retired") == "retired"
    assert "only admitted" in reason(retrieve(cards, target(), explain=True), "candidate")


def test_a_card_of_the_same_operator_and_shape_is_labelled(simple: MakeCard) -> None:
    own = simple("own", shape=dict(CASE.shape), platform="sm120", surface=Surface.TRITON)
    unknown = simple("unknown", shape={})
    other = simple("other")
    found = retrieve([own, unknown, other], target(), explain=True)
    assert {match.card.name: match.contaminated for match in found.matches} == {
        "own": True, "unknown": True, "other": False,
    }  # fmt: skip
    assert {item.name for item in found.explanations if item.contaminated} == {"own", "unknown"}
    clean = retrieve([own, unknown, other], target(), contaminated=False, explain=True)
    assert names(clean) == ["other"]
    assert reason(clean, "own") == "lifted from this very operator and shape"


def test_a_card_without_an_origin_is_labelled_too(simple: MakeCard) -> None:
    trial = Trial(context=context(), outcome=TrialOutcome.SUCCESS, held_out=True)
    assert retrieve([simple("a", origins=(), log=(trial,))], target()).matches[0].contaminated


def test_excluded_cards_take_no_slot(simple: MakeCard) -> None:
    cards = [simple("a", status=CardStatus.RETIRED), simple("b", category=Category.SIMD), simple("c")]
    assert names(retrieve(cards, target(), k=1)) == ["c"]


def test_an_empty_library_has_no_similar_card() -> None:
    assert retrieve([], target(), explain=True) == Retrieval(matches=())


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_two_cards_of_one_name_are_refused(simple: MakeCard) -> None:
    with pytest.raises(UsageError, match="two cards are called 'a'"):
        CardIndex([simple("a"), simple("b"), simple("a", platform="cpu")])


def test_k_is_positive(simple: MakeCard) -> None:
    with pytest.raises(UsageError, match="k must be at least 1"):
        retrieve([simple("a")], target(), k=0)


def test_an_unknown_platform_is_refused(simple: MakeCard) -> None:
    with pytest.raises(UnknownName, match="sm75"):
        retrieve([simple("a")], target(platform="sm75"))


# --- properties -------------------------------------------------------------------------------------------------------

POSITIONS = st.fixed_dictionaries(
    {
        "operator": st.sampled_from(["gemm", "fmha", "topk"]),
        "dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
        "surface": st.sampled_from(Surface),
        "platform": st.sampled_from(["sm90", "sm90a", "sm120", "cpu"]),
        "prior": st.lists(st.sampled_from([Category.MMA, Category.SIMD, Category.FUSION]), max_size=2).map(tuple),
        "category": st.sampled_from([Category.MMA, Category.FUSION, Category.WGMMA]),
        "status": st.sampled_from(CardStatus),
    }
)


@settings(max_examples=60, deadline=None)
@given(positions=st.lists(POSITIONS, max_size=12), k=st.integers(1, 4), data=st.data())
def test_the_order_of_the_library_does_not_matter(
    simple: MakeCard, positions: list[dict[str, Any]], k: int, data: st.DataObject
) -> None:
    cards = [simple(f"card-{number}", **position) for number, position in enumerate(positions)]
    shuffled = data.draw(st.permutations(cards))
    wanted = target(done=frozenset({Category.MMA}))
    one, other = (retrieve(library, wanted, k, explain=True) for library in (cards, shuffled))
    assert one == other
    assert retrieve(cards, wanted, k).matches == one.matches


@settings(max_examples=60, deadline=None)
@given(positions=st.lists(POSITIONS, max_size=12), k=st.integers(1, 4))
def test_what_is_retrieved_follows_from_the_explanations(
    simple: MakeCard, positions: list[dict[str, Any]], k: int
) -> None:
    cards = [simple(f"card-{number:02d}", **position) for number, position in enumerate(positions)]
    found = retrieve(cards, target(), k, explain=True)
    assert [item.name for item in found.explanations] == [card.name for card in cards]
    assert {item.name for item in found.explanations if item.chosen} == set(names(found))
    totals = [match.similarities.total for match in found.matches]
    assert totals == sorted(totals, reverse=True)
    assert len(found.matches) <= k * len(Dimension)
    near = {item.name: item.similarities for item in found.explanations}
    eligible = [item.name for item in found.explanations if item.chosen or item.reason.startswith("not among")]
    for position, dimension in enumerate(Dimension):
        inside = [match.card.name for match in found.matches if dimension in match.by]
        outside = [near[name][position] for name in eligible if name not in inside]
        assert len(inside) == min(k, sum(near[name][position] > 0 for name in eligible))
        assert all(near[name][position] >= max(outside, default=0.0) for name in inside)


@settings(max_examples=40, deadline=None)
@given(positions=st.lists(POSITIONS, min_size=1, max_size=8), k=st.integers(1, 3))
def test_a_larger_k_keeps_the_smaller_selection(simple: MakeCard, positions: list[dict[str, Any]], k: int) -> None:
    cards = [simple(f"card-{number}", **position) for number, position in enumerate(positions)]
    index = CardIndex(cards)
    assert set(names(index.retrieve(target(), k))) <= set(names(index.retrieve(target(), k + 1)))
    assert len(index) == len(cards)


def test_a_match_holds_the_card_as_it_is(simple: MakeCard) -> None:
    card = simple("a")
    assert retrieve([card], target()).matches[0].card is card
    assert msgspec.json.encode(retrieve([card], target(), explain=True))
