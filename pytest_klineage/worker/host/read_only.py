"""Inputs of an arena that a worker can map for reading alone: pages of a second file, in the place of the first one's;
and pages after inputs that it cannot read.

The oracle maps them for writing before the file is sealed; after that no process can, nor make its mapping writable.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

from pytest_klineage.records import Arena, Slot
from pytest_klineage.worker.sandbox import kept_ranges
from pytest_klineage.worker.sandbox.containment import LIBC

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1."""
MAP_FAILED = ctypes.c_void_p(-1).value
map_at = LIBC["mmap"]
map_at.restype = ctypes.c_void_p
LINE_BYTES = 64
"""Of a cache line, and of the longest vectors."""
Pages = Sequence[tuple[int, int]]
"""Where ranges of whole pages begin and end, in bytes from the start of an arena."""


def input_pages(arena: Arena) -> list[tuple[int, int]]:
    """The pages of all inputs, slot by slot; none where a call may overwrite inputs, or guard bands are under a page.

    A guard band ends before every input and one begins after it, and there are two between it and any output: so no
    output shares a page with an input.
    """
    size = mmap.PAGESIZE
    if size > arena.guard_bytes or any(slot.inout for slot in arena.slots):
        return []
    return [(first(slot) // size * size, -(-last(slot) // size) * size) for slot in arena.slots if slot.inputs]


def pages_behind(arena: Arena) -> list[tuple[int, int]]:
    """The pages that begin where inputs of the first slot end, or up to 63 bytes later: the vector with an input's last
    bytes may be loaded whole. None where guard bands, within which they lie, are under a page."""
    size = mmap.PAGESIZE
    if size > arena.guard_bytes:
        return []
    ends = [-(-(item.offset + item.num_bytes) // LINE_BYTES) * LINE_BYTES for item in arena.slots[0].inputs]
    return [(end, end + size) for end in ends if end % size == 0]


def first(slot: Slot) -> int:
    """Where the first input begins."""
    return min(item.offset for item in slot.inputs)


def last(slot: Slot) -> int:
    """Where the last input ends."""
    return max(item.offset + item.num_bytes for item in slot.inputs)


def sealed_file(address: int, num_bytes: int, pages: Pages, arena_fd: int) -> int | None:
    """A file whose pages lie in place of those of an arena that is mapped at `address`, and can be mapped for writing
    nowhere else. None where Linux has no such seal: the pages are those of the arena's own file then."""
    if not seals_are_known():
        return None
    fd, writable = new_file(), mmap.PROT_READ | mmap.PROT_WRITE
    try:
        os.ftruncate(fd, num_bytes)
        put_in_place(address, fd, pages, writable)
        add_seals(fd)
    except OSError:
        os.close(fd)
        put_in_place(address, arena_fd, pages, writable)
        return None
    return fd


def seals_are_known() -> bool:
    """Whether Linux, or the sandbox that stands for it, seals a file that is thrown away."""
    fd = new_file()
    try:
        add_seals(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def new_file() -> int:
    """An empty file in memory that can be sealed."""
    return os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def add_seals(fd: int) -> None:
    """Allow no other size and no new mapping for writing. Raises OSError."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def put_in_place(address: int, fd: int, pages: Pages, protection: int) -> None:
    """Map pages of a file where those of an arena lie. Raises OSError."""
    for start, end in pages:
        at, size = ctypes.c_void_p(address + start), ctypes.c_size_t(end - start)
        flags = mmap.MAP_SHARED | kept_ranges.MAP_FIXED
        if map_at(at, size, protection, flags, fd, ctypes.c_long(start)) in (None, MAP_FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def forbid_reading(address: int, pages: Pages) -> None:
    """In a worker: make pages of an arena that is mapped at `address` unreadable. Raises OSError."""
    for start, end in pages:
        if LIBC.mprotect(ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def keep_for_reading(address: int, fd: int, pages: Pages, unreadable: Pages = ()) -> None:
    """In a worker: the same for reading alone, sealed where Linux can, so that nothing is mapped over it."""
    put_in_place(address, fd, pages, mmap.PROT_READ)
    forbid_reading(address, unreadable)
    for start, end in pages:
        kept_ranges.seal(address + start, address + end)
