"""Changed copies of loaded code, in files in memory that no process can write to, mapped where the code itself lies.

A private page of a library that was written to comes from its file again once the system is asked to drop it, and what
was written can be written back. For a copy here there is no way to either, by mprotect or /proc/self/mem: its file is
sealed, and was opened for reading only.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable
from typing import NamedTuple

PAGE = mmap.PAGESIZE
GAP = 64 * PAGE
"""Ranges nearer to one another become one: 54 instead of 4100 for PyTorch and NumPy, twice the memory (108 MiB)."""
F_ADD_SEALS, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1033, 2, 4, 8
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
NOWHERE = ctypes.c_void_p(-1).value

LIBC = ctypes.CDLL(None, use_errno=True)
ADDRESS, SIZE = ctypes.c_void_p, ctypes.c_size_t
LIBC.mmap.argtypes = (ADDRESS, SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
LIBC.mremap.argtypes = (ADDRESS, SIZE, SIZE, ctypes.c_int, ADDRESS)
LIBC.mmap.restype = LIBC.mremap.restype = ADDRESS


class Place(NamedTuple):
    """Where a function lies in memory, and how many bytes it has."""

    start: int
    size: int


class Copy(NamedTuple):
    """One range of code: where it lies, and where its changed copy waits."""

    start: int
    end: int
    waiting: int


def page_ranges(places: Iterable[Place], gap: int = GAP) -> list[tuple[int, int]]:
    """Whole pages that hold these places; ranges less than `gap` apart become one."""
    found: list[tuple[int, int]] = []
    for place in sorted(places):
        start, end = place.start & -PAGE, (place.start + place.size + PAGE - 1) & -PAGE
        if found and start - found[-1][1] < gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def filling(mark: bytes, size: int) -> bytes:
    """As many marks as there is room for."""
    return mark * (size // len(mark))


def copied(ranges: Iterable[tuple[int, int]], places: Collection[Place], mark: bytes) -> list[Copy]:
    """Copy ranges of this process's code with some places filled with a mark. Raises OSError."""
    marked, copies, length = sorted(places), list[Copy](), 0
    file = os.memfd_create("klineage-code", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        for start, end in ranges:
            content = bytearray(ctypes.string_at(start, end - start))
            # The one before may reach into the range.
            for place in marked[max(0, bisect_left(marked, (start, 0)) - 1) : bisect_left(marked, (end, 0))]:
                marks = filling(mark, place.size)[max(0, start - place.start) : max(0, end - place.start)]
                first = max(0, place.start - start)
                content[first : first + len(marks)] = marks
            write_all(file, content)
            copies.append(Copy(start, end, length))
            length += end - start
        fcntl.fcntl(file, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_WRITE)
        base = mapped_to_read(file, length)
    finally:
        os.close(file)
    return [copy._replace(waiting=base + copy.waiting) for copy in copies]


def write_all(file: int, content: bytearray) -> None:
    """Write everything, which one call may not."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def mapped_to_read(file: int, size: int) -> int:
    """Map a file as code. Shared and opened for reading, no page of it can become writable, nor a private one."""
    reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        place = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_SHARED, reading, 0)
    finally:
        os.close(reading)
    if place is None or place == NOWHERE:
        raise OSError(ctypes.get_errno(), "a file in memory cannot be mapped as code")
    return int(place)


def put_in_place(copy: Copy) -> bool:
    """Move a copy over the code that it was made of. Returns whether it lies there now."""
    size = copy.end - copy.start
    return bool(LIBC.mremap(copy.waiting, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, copy.start) == copy.start)
