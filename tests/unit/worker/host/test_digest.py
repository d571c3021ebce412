"""What an answer says about its outputs: every byte of small ones, unforeseeable pieces of large ones."""

from __future__ import annotations

from pytest_klineage.records import Signature, Slot
from pytest_klineage.records.signature import dense
from pytest_klineage.worker.host.arena import plan
from pytest_klineage.worker.host.digest import WHOLE_BYTES, output_digest, pieces


def one_slot(*sizes: int) -> tuple[bytearray, Slot]:
    outputs = tuple(dense(f"y{place}", "fp32", size) for place, size in enumerate(sizes))
    arena = plan(Signature(inputs=(dense("x", "fp32", 4),), outputs=outputs))
    return bytearray(arena.num_bytes), arena.slots[0]


def test_every_byte_of_small_outputs_counts() -> None:
    memory, slot = one_slot(6, 3)
    seen = {output_digest(memoryview(memory), slot, 1)}
    for item in slot.outputs:
        for place in range(item.offset, item.offset + item.num_bytes):
            memory[place] ^= 1
            seen.add(output_digest(memoryview(memory), slot, 1))
            memory[place] ^= 1
    assert len(seen) == 1 + 4 * 9


def test_inputs_and_guards_do_not_count() -> None:
    memory, slot = one_slot(6)
    before = output_digest(memoryview(memory), slot, 1)
    memory[slot.inputs[0].offset] ^= 1
    memory[slot.outputs[0].offset - 1] ^= 1
    assert output_digest(memoryview(memory), slot, 1) == before


def test_pieces_of_large_outputs_reach_every_place() -> None:
    _memory, slot = one_slot(WHOLE_BYTES)
    (item,) = slot.outputs
    covered: set[int] = set()
    for nonce in range(200):
        for start, end in pieces(item, nonce << 20):
            assert item.offset <= start < end <= item.offset + item.num_bytes
            covered.update(range(start, end))
    assert len(covered) > 0.99 * item.num_bytes
    assert list(pieces(item, 1)) != list(pieces(item, 2))
