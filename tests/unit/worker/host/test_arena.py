"""The shared memory: where tensors lie, that guard bands see a single byte, and what poison leaves behind."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.records import DTYPES, Placement, Signature, TensorSpec
from pytest_klineage.records.signature import dense, permuted
from pytest_klineage.worker.host.arena import (
    ALIGNMENT,
    GUARD_BYTES,
    KINDS,
    SLOTS,
    Kinds,
    SharedArena,
    as_integers,
    is_poison,
    plan,
    poison,
    same_bits,
)

SIGNATURE = Signature(
    inputs=(dense("a", "fp32", 5, 7), permuted("b", "bf16", (3, 4, 5), (2, 0, 1))),
    outputs=(dense("c", "fp16", 3), dense("indices", "int64", 4, 4)),
    scalars={"scale": 0.5},
)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    def spec(name: str) -> TensorSpec:
        shape = draw(SHAPES)
        return permuted(
            name, draw(st.sampled_from(sorted(DTYPES))), shape, tuple(draw(st.permutations(range(len(shape)))))
        )

    inputs = tuple(spec(f"i{index}") for index in range(draw(st.integers(1, 4))))
    outputs = tuple(spec(f"o{index}") for index in range(draw(st.integers(1, 3))))
    return Signature(inputs=inputs, outputs=outputs)


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    shared = SharedArena(SIGNATURE)
    yield shared
    shared.close()


def placements(signature: Signature, shift: int = 0) -> list[Placement]:
    return [item for slot in plan(signature, shift).slots for item in (*slot.inputs, *slot.outputs)]


@settings(max_examples=50)
@given(signatures(), st.integers(0, 3000))
def test_no_tensor_and_no_guard_band_overlaps_another(signature: Signature, shift: int) -> None:
    arena = plan(signature, shift)
    ranges = []
    for item in placements(signature, shift):
        end = item.offset + item.num_bytes
        ranges += [(item.offset - GUARD_BYTES, item.offset), (item.offset, end), (end, end + GUARD_BYTES)]
    ranges.sort()
    assert ranges[0][0] >= 0
    assert ranges[-1][1] <= arena.num_bytes
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))


@settings(max_examples=50)
@given(signatures(), st.integers(0, 3000))
def test_every_tensor_is_aligned_and_has_room_for_its_elements(signature: Signature, shift: int) -> None:
    for item in placements(signature, shift):
        assert item.offset % ALIGNMENT == 0
        last = sum((size - 1) * step for size, step in zip(item.spec.shape, item.spec.strides, strict=True))
        assert item.num_bytes == (last + 1) * DTYPES[item.spec.dtype]


@settings(max_examples=20)
@given(signatures())
def test_every_slot_holds_the_whole_signature_in_order(signature: Signature) -> None:
    arena = plan(signature)
    assert len(arena.slots) == SLOTS >= 2
    for slot in arena.slots:
        assert tuple(item.spec for item in slot.inputs) == signature.inputs
        assert tuple(item.spec for item in slot.outputs) == signature.outputs
    assert arena.guard_bytes == GUARD_BYTES


def test_the_slots_lie_at_different_offsets_within_a_page() -> None:
    first, second = (slot.inputs[0].offset for slot in plan(SIGNATURE).slots)
    assert first % 4096 != second % 4096


def test_scalars_travel_with_the_arena() -> None:
    assert plan(SIGNATURE).scalars == {"scale": 0.5}


def test_untouched_guard_bands_are_intact(arena: SharedArena) -> None:
    for slot in range(SLOTS):
        assert arena.broken_guards(slot) == []


def test_writing_every_element_touches_no_guard_band(arena: SharedArena) -> None:
    for slot in range(SLOTS):
        for tensor in (*arena.inputs(slot).values(), *arena.outputs(slot).values()):
            tensor.fill_(1)
        assert arena.broken_guards(slot) == []


POSITIONS: dict[str, Callable[[Placement], int]] = {
    "just before": lambda item: item.offset - 1,
    "just behind": lambda item: item.offset + item.num_bytes,
    "far before": lambda item: item.offset - GUARD_BYTES,
    "far behind": lambda item: item.offset + item.num_bytes + GUARD_BYTES - 1,
}


@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize("where", POSITIONS)
def test_one_byte_beside_a_tensor_is_seen_and_named(where: str, slot: int, arena: SharedArena) -> None:
    for item in (*arena.arena.slots[slot].inputs, *arena.arena.slots[slot].outputs):
        position = POSITIONS[where](item)
        arena.buffer[position] ^= 1
        assert arena.broken_guards(slot) == [item.spec.name]
        arena.buffer[position] ^= 1
    assert arena.broken_guards(slot) == []


def test_painting_mends_the_guard_bands(arena: SharedArena) -> None:
    arena.buffer[arena.guards[0]] ^= 1
    arena.paint_guards()
    assert arena.broken_guards(0) == []


def test_the_pattern_of_the_guard_bands_cannot_be_foreseen(arena: SharedArena) -> None:
    other = SharedArena(SIGNATURE)
    assert arena.pattern != other.pattern
    assert len(set(arena.pattern)) > 100
    other.close()


def test_the_memory_cannot_be_resized(arena: SharedArena) -> None:
    for size in (0, arena.arena.num_bytes - 1, arena.arena.num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_views_have_the_shape_and_strides_of_their_spec(arena: SharedArena) -> None:
    for slot in range(SLOTS):
        views = arena.inputs(slot) | arena.outputs(slot)
        for spec in (*SIGNATURE.inputs, *SIGNATURE.outputs):
            assert (tuple(views[spec.name].shape), views[spec.name].stride()) == (spec.shape, spec.strides)


def test_slots_share_no_memory(arena: SharedArena) -> None:
    for tensor in (*arena.inputs(0).values(), *arena.outputs(0).values()):
        tensor.fill_(1)
    for tensor in (*arena.inputs(1).values(), *arena.outputs(1).values()):
        tensor.fill_(2)
    assert all(bool((tensor == 1).all()) for tensor in (*arena.inputs(0).values(), *arena.outputs(0).values()))


def test_inputs_and_outputs_are_distinguished(arena: SharedArena) -> None:
    assert list(arena.inputs(0)) == ["a", "b"]
    assert list(arena.outputs(1)) == ["c", "indices"]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_kinds_of_poison_share_no_value(dtype: str) -> None:
    spec, filled = dense("x", dtype, 4), [torch.zeros(4, dtype=torch_type(dtype)) for _ in range(KINDS)]
    for kind, tensor in enumerate(filled):
        poison(spec, tensor, kind)
    assert len({int(as_integers(tensor)[0]) for tensor in filled}) == KINDS
    for kind, other in itertools.product(range(KINDS), repeat=2):
        assert bool(is_poison(spec, filled[kind], other).all()) == (kind == other)
        assert bool(is_poison(spec, filled[kind], other).any()) == (kind == other)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_combined_with_some_poison_is_wrong(dtype: str) -> None:
    """However a number of usual size is put into what was never set."""
    spec, found = dense("x", dtype, 1), []
    for kind in range(KINDS):
        tensor = torch.zeros(1, dtype=torch_type(dtype))
        poison(spec, tensor, kind)
        bits = as_integers(tensor) & 1
        found.append((float(tensor), int(bits)))
    numbers = [number for number, _bits in found if not math.isnan(number)]
    if dtype not in ("bool", "uint8"):
        assert max(numbers) > 30
        assert min(numbers) < -30
    if not spec.dtype.startswith(("fp", "bf")):
        assert {bits for _number, bits in found} == {0, 1}


def test_every_kind_comes_as_often_as_any_other() -> None:
    kinds = Kinds()
    drawn = [[kinds.draw() for _ in range(KINDS)] for _ in range(200)]
    assert all(sorted(some) == list(range(KINDS)) for some in drawn)
    assert len({tuple(some) for some in drawn}) == math.factorial(KINDS)


@pytest.mark.parametrize("kind", range(KINDS))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_only_what_was_not_written_is_still_poison(dtype: str, kind: int) -> None:
    spec = dense("x", dtype, 6)
    tensor = torch.zeros(6, dtype=torch_type(dtype))
    poison(spec, tensor, kind)
    as_integers(tensor)[1:4] = as_integers(torch.tensor([0, 1, 5]).to(tensor.dtype))
    assert is_poison(spec, tensor, kind).tolist() == [True, False, False, False, True, True]


def torch_type(dtype: str) -> torch.dtype:
    return torch_dtype(dtype)


def test_an_inout_tensor_is_one_piece_of_memory() -> None:
    both = dense("x", "fp32", 3)
    slot = plan(Signature(inputs=(both, dense("w", "bool", 5)), outputs=(both, dense("y", "fp8_e4m3", 7)))).slots[0]
    assert slot.inputs[0] == slot.outputs[0]
    assert [item.spec.name for item in slot.inout] == ["x"]
    assert [item.spec.name for item in slot.separate] == ["y"]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_bit_is_seen_in_every_type_at_every_place(dtype: str) -> None:
    memory = torch.arange(16).to(torch_dtype(dtype))
    for start, count in itertools.product((0, 1, 4), (1, 7, 8)):
        left = memory[start : start + count]
        right = left.clone()
        assert same_bits(left, right)
        as_integers(right)[-1] ^= 1
        assert not same_bits(left, right)


def test_bits_are_compared_and_not_numbers_whatever_the_strides() -> None:
    numbers = torch.tensor([[0.0, math.nan], [math.inf, 1.0]])
    assert same_bits(numbers, numbers.clone())
    assert same_bits(numbers.T, numbers.T.contiguous())
    assert not same_bits(numbers, numbers.T)
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
