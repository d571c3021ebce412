"""Inputs that a worker can only read: which pages they are, and that nothing makes them writable."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.records import Signature
from pytest_klineage.records.signature import dense
from pytest_klineage.worker.host import read_only
from pytest_klineage.worker.host.arena import GUARD_BYTES, SharedArena, plan
from pytest_klineage.worker.host.read_only import (
    LINE_BYTES,
    forbid_reading,
    input_pages,
    keep_for_reading,
    pages_behind,
)

SIGNATURE = Signature(
    inputs=(dense("x", "fp32", 33, 3), dense("y", "fp32", 5000)), outputs=(dense("z", "fp32", 7),)
)  # fmt: skip


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.lists(st.integers(1, 5000), min_size=1, max_size=2))
@settings(deadline=None, max_examples=60)
def test_all_inputs_lie_there_and_no_output_nor_its_guards(inputs: list[int], outputs: list[int]) -> None:
    arena = plan(Signature(
        inputs=tuple(dense(f"x{i}", "fp32", size) for i, size in enumerate(inputs)),
        outputs=tuple(dense(f"z{i}", "fp32", size) for i, size in enumerate(outputs)),
    ))  # fmt: skip
    pages = input_pages(arena)
    assert all(start % mmap.PAGESIZE == end % mmap.PAGESIZE == 0 for start, end in pages)
    for (start, end), slot in zip(pages, arena.slots, strict=True):
        assert all(start <= item.offset and item.offset + item.num_bytes <= end for item in slot.inputs)
    for item in (item for slot in arena.slots for item in slot.outputs):
        low, high = item.offset - GUARD_BYTES, item.offset + item.num_bytes
        assert all(end <= low or high <= start for start, end in pages)


def test_there_are_none_where_a_call_overwrites_an_input() -> None:
    both = dense("x", "fp32", 40)
    assert input_pages(plan(Signature(inputs=(both,), outputs=(both,)))) == []
    found = SharedArena(Signature(inputs=(both,), outputs=(both,)), read_only=True)
    assert found.read_only == ()
    found.close()


@pytest.fixture
def shared() -> Iterator[SharedArena]:
    found = SharedArena(SIGNATURE, read_only=True)
    if not found.read_only:
        found.close()
        pytest.skip("Linux before 5.1 has no such seal")
    yield found
    found.close()


def written_is_seen(found: SharedArena) -> bool:
    """Whether the arena's own file has what the oracle writes to all inputs."""
    for slot, placed in enumerate(found.arena.slots):
        for item in placed.inputs:
            found.inputs(slot)[item.spec.name].fill_(slot + 3.0)
            expected = torch.full((item.num_bytes // 4,), slot + 3.0).numpy().tobytes()
            if os.pread(found.fds[0], item.num_bytes, item.offset) != expected:
                return False
    return True


@pytest.fixture
def open_files() -> Iterator[None]:
    """No file is left open by a test."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.usefixtures("open_files")
def test_without_the_seal_the_arena_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "F_SEAL_FUTURE_WRITE", 1 << 20)
    monkeypatch.setattr(read_only, "put_in_place", None)
    found = SharedArena(SIGNATURE, read_only=True)
    assert (found.read_only, len(found.fds)) == ((), 1)
    assert written_is_seen(found)
    found.close()


@pytest.mark.usefixtures("open_files")
@pytest.mark.parametrize("fails", ["ftruncate", "put_in_place", "add_seals"])
def test_nor_where_something_fails_in_the_middle(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = os if fails == "ftruncate" else read_only
    does, calls = getattr(module, fails), 0
    # Before, the arena's file gets its size, and a file that is thrown away its seals.
    at = 1 if fails == "put_in_place" else 2

    def fail_once(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != at:
            does(*given)
            return
        if fails == "put_in_place":
            address, fd, pages, protection = given
            does(address, fd, pages[:1], protection)
        raise OSError(22, "refused")

    monkeypatch.setattr(module, fails, fail_once)
    found = SharedArena(SIGNATURE, read_only=True)
    assert (found.read_only, len(found.fds)) == ((), 1)
    assert written_is_seen(found)
    found.close()


def test_what_the_oracle_writes_is_read_by_the_worker(shared: SharedArena) -> None:
    mapped = mmap.mmap(shared.fds[0], shared.arena.num_bytes)
    keep_for_reading(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), shared.fds[1], shared.read_only)
    for slot, placed in enumerate(shared.arena.slots):
        shared.inputs(slot)["x"].copy_(torch.arange(99.0).view(33, 3) + slot)
        shared.outputs(slot)["z"].fill_(slot + 1.0)
        x, z = placed.inputs[0], placed.outputs[0]
        assert mapped[x.offset : x.offset + 8] == torch.tensor([slot, slot + 1.0]).numpy().tobytes()
        assert mapped[z.offset : z.offset + 4] == torch.tensor([slot + 1.0]).numpy().tobytes()


def test_the_file_of_inputs_cannot_be_written_to(shared: SharedArena) -> None:
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(shared.fds[1], shared.arena.num_bytes)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(shared.fds[1], b"x", shared.read_only[0][0])


def test_a_mapping_for_reading_stays_one(shared: SharedArena) -> None:
    mapped = mmap.mmap(shared.fds[0], shared.arena.num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    keep_for_reading(address, shared.fds[1], shared.read_only)
    start, end = shared.read_only[0]
    protect = ctypes.CDLL(None)["mprotect"]
    assert (
        protect(ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    )
    child = os.fork()
    if child == 0:
        ctypes.memset(address + start + 64, 1, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11


def test_without_being_asked_inputs_can_be_written_to() -> None:
    found = SharedArena(SIGNATURE)
    assert found.read_only == ()
    assert len(found.fds) == 1
    found.close()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.lists(st.integers(1, 5000), min_size=1, max_size=2))
@settings(deadline=None, max_examples=60)
def test_a_page_lies_behind_every_input(inputs: list[int], outputs: list[int]) -> None:
    arena = plan(Signature(
        inputs=tuple(dense(f"x{i}", "fp32", size) for i, size in enumerate(inputs)),
        outputs=tuple(dense(f"z{i}", "fp32", size) for i, size in enumerate(outputs)),
    ), page=mmap.PAGESIZE)  # fmt: skip
    pages, placed = pages_behind(arena), arena.slots[0].inputs
    assert len(pages) == len(inputs)
    for (start, end), item in zip(pages, placed, strict=True):
        assert start % mmap.PAGESIZE == end % mmap.PAGESIZE == 0
        assert 0 <= start - item.offset - item.num_bytes < LINE_BYTES
    items = [item for slot in arena.slots for item in (*slot.inputs, *slot.outputs)]
    for item in items:
        assert item.offset % LINE_BYTES == 0
        assert all(end <= item.offset or item.offset + item.num_bytes <= start for start, end in pages)


def test_there_is_none_where_guard_bands_are_under_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 2 * GUARD_BYTES)
    found = SharedArena(SIGNATURE, unreadable=True)
    assert found.unreadable == ()
    found.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_nothing_is_read_behind_an_input(read_only: bool) -> None:
    found = SharedArena(SIGNATURE, read_only=read_only, unreadable=True)
    mapped = mmap.mmap(found.fds[0], found.arena.num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if found.read_only:
        keep_for_reading(address, found.fds[1], found.read_only, found.unreadable)
    else:
        forbid_reading(address, found.unreadable)
    placed = found.arena.slots[0].inputs
    assert len(found.unreadable) == len(placed)
    for (start, _end), item in zip(found.unreadable, placed, strict=True):
        assert len(mapped[item.offset : start]) >= item.num_bytes
        assert status_of_reading(address + start - 1) == 0
        assert status_of_reading(address + start) == -11
    found.close()


def status_of_reading(address: int) -> int:
    """How a process ends that reads a byte there."""
    child = os.fork()
    if child == 0:
        ctypes.string_at(address, 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
