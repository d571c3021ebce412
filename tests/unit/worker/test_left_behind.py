"""What a call has changed in the slots that it was not given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pytest_klineage.gate.settings import DEFENCES
from pytest_klineage.records import Code, Signature
from pytest_klineage.records.signature import dense
from pytest_klineage.worker.host.arena import SharedArena
from pytest_klineage.worker.host.digest import WHOLE_BYTES
from pytest_klineage.worker.left_behind import OtherSlots

X = torch.arange(4, dtype=torch.float32)
SIGNATURE = Signature(inputs=(dense("x", "fp32", 4),), outputs=(dense("y", "fp32", 6),))
IN_PLACE = Signature(inputs=(dense("x", "fp32", 4),), outputs=(dense("x", "fp32", 4),))


def after_one_call(signature: Signature) -> tuple[SharedArena, OtherSlots]:
    """An arena whose first slot holds X and its result, 7."""
    arena, others = SharedArena(signature), OtherSlots()
    arena.inputs(0)["x"].copy_(X)
    for tensor in arena.outputs(0).values():
        tensor.fill_(7)
    others.leave(0, arena, 0, {"x": X})
    return arena, others


@pytest.fixture
def called() -> Iterator[tuple[SharedArena, OtherSlots]]:
    arena, others = after_one_call(SIGNATURE)
    yield arena, others
    arena.close()


Called = tuple[SharedArena, OtherSlots]


def codes(others: OtherSlots, slot: int = 1, defences: frozenset[str] = DEFENCES) -> list[Code]:
    return [reason.code for reason in others.changes(0, slot, defences)]


def test_what_was_left_alone_is_no_finding(called: Called) -> None:
    arena, others = called
    arena.outputs(1)["y"].fill_(3)
    assert codes(others) == []


def test_an_input_of_an_earlier_call_must_stay(called: Called) -> None:
    arena, others = called
    arena.inputs(0)["x"][2] = 0
    (reason,) = others.changes(0, 1, DEFENCES)
    assert reason.code is Code.INPUT_MUTATED
    assert "input x of an earlier call" in reason.message


def test_an_output_of_an_earlier_call_must_stay(called: Called) -> None:
    arena, others = called
    arena.outputs(0)["y"][5] = 0
    assert codes(others) == [Code.ALIASED_OUTPUT]


def test_the_slot_of_the_call_itself_is_judged_elsewhere(called: Called) -> None:
    arena, others = called
    arena.inputs(0)["x"].fill_(0)
    assert codes(others, slot=0) == []
    assert others.changes(1, 0, DEFENCES), "the same slot of another arena"


def test_another_call_on_a_slot_is_what_counts(called: Called) -> None:
    arena, others = called
    arena.inputs(0)["x"].fill_(1)
    arena.outputs(0)["y"].fill_(1)
    others.leave(0, arena, 0, {"x": torch.ones(4)})
    assert codes(others) == []


@pytest.mark.parametrize(
    ("absent", "expected"),
    [("input_integrity", [Code.ALIASED_OUTPUT]), ("alias_rules", [Code.INPUT_MUTATED])],
)
def test_each_finding_has_its_defence(called: Called, absent: str, expected: list[Code]) -> None:
    arena, others = called
    arena.inputs(0)["x"].fill_(0)
    arena.outputs(0)["y"].fill_(0)
    assert codes(others, defences=DEFENCES - {absent}) == expected


def test_an_input_that_is_overwritten_counts_as_output() -> None:
    arena, others = after_one_call(IN_PLACE)
    assert codes(others) == []
    arena.outputs(0)["x"].fill_(0)
    assert codes(others) == [Code.ALIASED_OUTPUT]
    arena.close()


def test_a_large_output_that_is_cleared_is_seen() -> None:
    size = 8 * WHOLE_BYTES
    arena, others = after_one_call(Signature(inputs=(dense("x", "fp32", 4),), outputs=(dense("y", "fp32", size),)))
    arena.outputs(0)["y"].zero_()
    assert codes(others) == [Code.ALIASED_OUTPUT]
    arena.close()
