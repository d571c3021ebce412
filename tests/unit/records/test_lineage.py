"""Digests of lineages: what they cover, what they leave alone, and how they are chained."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import (
    Category,
    Code,
    Edit,
    EditKind,
    Interval,
    KernelCase,
    Lineage,
    LineageState,
    Reason,
    Rederivation,
    Rejection,
    StateFile,
    Surface,
    Termination,
    Transition,
    Verdict,
    content_digest,
    from_json,
    json_schema,
    to_json,
)
from pytest_klineage.records.codec import LARGEST_DOUBLE, finite

CASE = KernelCase(operator="gemm", shape={"M": 2, "N": 3, "K": 4}, dtype="fp32", reference="torch")
NOTHING = Edit(kind=EditKind.UNIFIED_DIFF)


def verdict(code: Code = Code.ACCEPTED_SAME) -> Verdict:
    return Verdict(case=CASE, status=code.status, reasons=(Reason(code=code, message=""),))


def state(name: str) -> LineageState:
    files = (StateFile("kernel.cpp", f"{name}.cpp"),)
    return LineageState(name=name, files=files, entry="run", source_digest=name, verdict=verdict())


def step(before: str, after: str, **fields: Any) -> Transition:
    given: dict[str, Any] = {
        "category": Category.SIMD, "locus": "loop", "intent": "", "before": before, "after": after,
        "backward": NOTHING, "forward": NOTHING, "forward_verdict": verdict(),
    }  # fmt: skip
    return Transition(**(given | fields))


def lineage(*names: str, **fields: Any) -> Lineage:
    given: dict[str, Any] = {
        "operator": "gemm", "platform": "cpu", "surface": Surface.CPP, "case": CASE,
        "states": tuple(map(state, names)),
        "transitions": tuple(step(*pair) for pair in pairwise(names)),
        "termination": Termination.STEP_LIMIT, "termination_reason": "two steps",
    }  # fmt: skip
    return Lineage(**(given | fields))


def chain(record: Lineage) -> list[str]:
    return [transition.digest for transition in record.sealed().transitions]


def test_every_digest_differs() -> None:
    sealed = lineage("a", "b", "c").sealed()
    digests = [sealed.digest, *(transition.digest for transition in sealed.transitions)]
    assert len(set(digests)) == 3
    assert all(len(digest) == 64 for digest in digests)


def test_sealing_again_changes_nothing() -> None:
    sealed = lineage("a", "b", "c").sealed()
    assert sealed.sealed() == sealed
    assert from_json(to_json(sealed), Lineage).sealed() == sealed


def test_digests_stay_when_the_walk_goes_on_towards_naive() -> None:
    assert chain(lineage("a", "b", "c", "d"))[1:] == chain(lineage("b", "c", "d"))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_changed_step_invalidates_itself_and_later_ones(index: int) -> None:
    whole = lineage("a", "b", "c", "d")
    steps = list(whole.transitions)
    steps[index] = msgspec.structs.replace(steps[index], locus="elsewhere")
    changed = chain(msgspec.structs.replace(whole, transitions=tuple(steps)))
    same = [one == other for one, other in zip(chain(whole), changed, strict=True)]
    assert same == [position > index for position in range(3)]


@pytest.mark.parametrize(
    "fields",
    [
        {"category": Category.MMA},
        {"intent": "other"},
        {"before": "x"},
        {"after": "x"},
        {"backward": Edit(kind=EditKind.SEARCH_REPLACE)},
        {"forward": Edit(kind=EditKind.UNIFIED_DIFF, diff="x")},
        {"rederived": Rederivation(edit=NOTHING, source_digest="x")},
        {"forward_verdict": verdict(Code.SLOWER_THAN_REQUIRED)},
        {"rejected": (Rejection(forward=True, category=Category.MMA, locus="", intent="", reason=""),)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_chain_covers_every_field(fields: dict[str, Any]) -> None:
    whole = lineage("a", "b")
    changed = msgspec.structs.replace(whole.transitions[0], **fields)
    assert changed != whole.transitions[0]
    assert chain(msgspec.structs.replace(whole, transitions=(changed,))) != chain(whole)


def test_a_judged_step_of_an_author_leaves_others_alone() -> None:
    """Steps of a hand-made lineage are judged one by one; cards that cite the others must still find them."""
    whole = lineage("a", "b", "c", "d", termination=Termination.HAND_MADE)
    judged = {"effect": Interval(2.0, 1.9, 2.1), "forward_verdict": verdict(), "backward": NOTHING}
    for index, same in ((0, [False, True, True]), (2, [True, True, False])):
        steps = list(whole.transitions)
        steps[index] = msgspec.structs.replace(steps[index], **judged)
        changed = chain(msgspec.structs.replace(whole, transitions=tuple(steps)))
        assert [one == other for one, other in zip(chain(whole), changed, strict=True)] == same
    steps = [*whole.transitions[:2], msgspec.structs.replace(whole.transitions[2], locus="elsewhere")]
    changed = chain(msgspec.structs.replace(whole, transitions=tuple(steps)))
    assert not set(changed) & set(chain(whole))


@pytest.mark.parametrize(
    "fields",
    [
        {"termination": Termination.BUDGET},
        {"termination_reason": "no dollars"},
        {"provenance": {"model": "x"}},
        {"rejected": (Rejection(forward=False, category=Category.MMA, locus="", intent="", reason=""),)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_how_the_walk_ended_changes_the_lineage_but_no_step(fields: dict[str, Any]) -> None:
    one, other = lineage("a", "b"), lineage("a", "b", **fields)
    assert one.sealed().digest != other.sealed().digest
    assert chain(one) == chain(other)


def test_the_expert_and_the_place_are_in_every_digest() -> None:
    other = msgspec.structs.replace(lineage("a", "b"), platform="sm90")
    assert chain(other) != chain(lineage("a", "b"))


def test_a_new_field_with_a_default_keeps_digests() -> None:
    class Old(msgspec.Struct, frozen=True):
        name: str
        sizes: dict[str, int] = {}

    class New(msgspec.Struct, frozen=True):
        name: str
        sizes: dict[str, int] = {}
        more: tuple[str, ...] = ()
        limit: int | None = None

    assert content_digest(Old("x", {"M": 1})) == content_digest(New("x", {"M": 1}))
    assert content_digest(New("x")) != content_digest(New("x", limit=3))


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    one, other = lineage("a", provenance={"x": "1", "y": "2"}), lineage("a", provenance={"y": "2", "x": "1"})
    assert content_digest(one) == content_digest(other)


@given(st.recursive(st.floats() | st.text(max_size=3) | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_plain_data_becomes_finite_and_stays_so(value: Any) -> None:
    once = finite(value)
    assert msgspec.json.decode(msgspec.json.encode(once)) == once == finite(once)


def test_infinities_become_the_largest_doubles() -> None:
    given = {"a": float("inf"), "b": [-float("inf"), 1.0, True]}
    assert finite(given) == {"a": LARGEST_DOUBLE, "b": [-LARGEST_DOUBLE, 1.0, True]}


def test_what_was_done_before_a_step_are_the_steps_before_it() -> None:
    whole = lineage("a", "b", "c")
    steps = (whole.transitions[0], msgspec.structs.replace(whole.transitions[1], category=Category.MMA))
    whole = msgspec.structs.replace(whole, transitions=steps)
    assert [whole.done_before(index) for index in range(3)] == [
        frozenset(), {Category.SIMD}, {Category.SIMD, Category.MMA},
    ]  # fmt: skip


def test_only_naive_reached_is_complete() -> None:
    ends = [lineage("a", termination=end).complete for end in Termination]
    assert sum(ends) == 1
    assert lineage("a", termination=Termination.NAIVE_REACHED).complete


def test_the_name_is_the_folder_below_experts() -> None:
    assert lineage("a").name == lineage("a").folder == "gemm/cpu-cpp"
    other = msgspec.structs.replace(lineage("a"), provenance={"source": "https://forge.example/somebody/fast.cu/"})
    assert (other.name, other.folder) == ("gemm/cpu-cpp@fast.cu", "gemm/cpu-cpp")


def test_a_steps_verdict_is_about_the_rederived_kernel() -> None:
    assert step("a", "b").forward_digest == "b"
    assert step("a", "b", rederived=Rederivation(edit=NOTHING, source_digest="c")).forward_digest == "c"


def test_the_schema_demands_its_version() -> None:
    definition = json_schema(Lineage)["$defs"]["Lineage"]
    assert definition["properties"]["schema_version"] == {"enum": [1]}
    assert "schema_version" in definition["required"]


def test_categories_and_ends_are_written_in_one_form() -> None:
    assert all(word == word.lower() and " " not in word for word in (*Category, *Termination, *EditKind))
