"""What the oracle keeps of a candidate's last results, and for how many calls a worker keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_klineage.records import Signature
from pytest_klineage.records.messages import ReturnedTensor
from pytest_klineage.records.signature import dense
from pytest_klineage.worker.earlier import EarlierResults
from pytest_klineage.worker.host.arena import MOST_REMEMBERED, REMEMBERED_CALLS, SharedArena, plan, remembered_calls

RETURNED = (ReturnedTensor(address=0, num_bytes=16, strides=(1,)),)


def signature(size: int) -> Signature:
    return Signature(inputs=(dense("x", "fp32", 4),), outputs=(dense("y", "fp32", size),))


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    shared = SharedArena(signature(4))
    yield shared
    shared.close()


def test_small_results_are_remembered_longer_than_large_ones() -> None:
    assert remembered_calls(plan(signature(4))) == MOST_REMEMBERED
    assert remembered_calls(plan(signature(1 << 18))) == 4
    assert remembered_calls(plan(signature(1 << 24))) == REMEMBERED_CALLS


def test_a_result_that_has_changed_since_is_named(arena: SharedArena) -> None:
    earlier, output = EarlierResults(), arena.outputs(0)
    output["y"].fill_(1)
    earlier.add(0, arena, 0, RETURNED)
    output["y"].fill_(2)
    earlier.add(0, arena, 0, RETURNED)
    assert earlier.differing(0, output) == []
    assert earlier.differing(1, output) == ["y"]


def test_only_results_of_the_same_arena_are_asked_for(arena: SharedArena) -> None:
    earlier = EarlierResults()
    earlier.add(1, arena, 0, RETURNED)
    earlier.add(0, arena, 0, ())
    assert earlier.any_of(0) is None
    assert earlier.any_of(1) == 1


def test_what_is_forgotten_is_forgotten_by_both_sides(arena: SharedArena) -> None:
    earlier, worker = EarlierResults(), list[int]()
    for call in range(5 * MOST_REMEMBERED):
        for place in earlier.forget(arena):
            del worker[place]
        earlier.add(0, arena, 0, (ReturnedTensor(address=call, num_bytes=16, strides=(1,)),))
        worker.append(call)
        assert [tensor.address for tensor in earlier.tensors()] == worker
        assert worker[-1] == call
        assert len(worker) <= MOST_REMEMBERED
    assert min(worker) < 4 * MOST_REMEMBERED, "not the last ones alone"


def test_results_of_a_reference_are_not_copied(arena: SharedArena) -> None:
    earlier = EarlierResults()
    earlier.add(0, arena, 0, RETURNED, copied=False)
    assert earlier.any_of(0) is None
