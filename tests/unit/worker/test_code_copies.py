"""Copies of code stay changed, whatever a process asks of the system; each tries it in a process of its own."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys

import pytest

from pytest_klineage.worker.code_copies import PAGE, Place, copied, page_ranges

SCRIPT = """
import ctypes, sys
from pytest_klineage.worker import code_copies
from pytest_klineage.worker.sandbox import kept_ranges
MARK = b"\\x90\\x90\\x90\\x90"
libm, libc = ctypes.CDLL("libm.so.6"), ctypes.CDLL(None, use_errno=True)
libm.cos.restype = ctypes.c_double
address = ctypes.cast(libm.erf, ctypes.c_void_p).value
before = ctypes.string_at(address, 4)
place = code_copies.Place(address, 4)
(copy,) = code_copies.copied(code_copies.page_ranges([place]), [place], MARK)
assert ctypes.string_at(copy.waiting + address - copy.start, 4) == MARK
assert ctypes.string_at(address, 4) == before
assert code_copies.put_in_place(copy)
assert libm.cos(ctypes.c_double(0)) == 1
page, size = ctypes.c_void_p(copy.start), ctypes.c_size_t(copy.end - copy.start)
elsewhere = ctypes.c_void_p(copy.start - (1 << 32))
if sys.argv[2] == "filter":
    kept_ranges.seal = lambda start, end: False
if sys.argv[2] != "open":
    active = kept_ranges.keep([(copy.start, copy.end)], may_filter=True)
    assert active == (["sealed-code"] if sys.argv[2] == "seal" else ["kept-code"]), active
def by_proc():
    with open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(address)
        file.write(before)
def write():
    if libc.mprotect(page, size, 7) == 0:
        ctypes.memmove(address, before, 4)
def over():
    with open(sys.argv[3], "rb") as file:
        libc.mmap(page, size, 5, 0x12, file.fileno(), ctypes.c_long(0))
attempts = {
    "drop": lambda: libc.madvise(page, size, 4), "remove": lambda: libc.madvise(page, size, 9), "write": write,
    "proc": by_proc, "unmap": lambda: libc.munmap(page, size), "over": over,
    "move": lambda: libc.mremap(page, size, size, 3, elsewhere),
}
try:
    attempts[sys.argv[1]]()
except OSError:
    pass
print(ctypes.string_at(address, 4) == MARK)
"""
CONTENTS, PLACES = ("drop", "remove", "write", "proc"), ("unmap", "over", "move")


def outcome(attempt: str, kept: str) -> str:
    """What stands at the changed place afterwards; a signal's number where nothing does."""
    command = [sys.executable, "-c", SCRIPT, attempt, kept, sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode <= 0, run.stderr
    return run.stdout.strip() or str(run.returncode)


@pytest.mark.parametrize("attempt", CONTENTS)
def test_a_copy_stays_changed_by_itself(attempt: str) -> None:
    assert outcome(attempt, "open") == "True"


@pytest.mark.parametrize("kept", ["seal", "filter"])
@pytest.mark.parametrize("attempt", PLACES)
def test_a_kept_copy_stays_where_it_is(attempt: str, kept: str) -> None:
    if kept == "seal" and tuple(map(int, platform.release().split(".")[:2])) < (6, 10):
        pytest.skip("Linux seals mappings from 6.10 on")
    assert outcome(attempt, kept) == "True"


@pytest.mark.parametrize("attempt", PLACES)
def test_without_being_kept_it_is_gone(attempt: str) -> None:
    """What the tests above would show if nothing kept it."""
    assert outcome(attempt, "open") in ("False", "-11")


def test_near_places_lie_in_one_range() -> None:
    base = 1000 * PAGE
    starts = [base, base + PAGE - 1, base + 5 * PAGE, base + 100 * PAGE]
    places = [Place(start, 2) for start in starts]
    assert page_ranges(places, gap=3 * PAGE) == [
        (base, base + 2 * PAGE), (base + 5 * PAGE, base + 6 * PAGE), (base + 100 * PAGE, base + 101 * PAGE),
    ]  # fmt: skip
    assert page_ranges(places, gap=4 * PAGE)[0] == (base, base + 6 * PAGE)
    assert page_ranges([Place(base + 1, 2 * PAGE)]) == [(base, base + 3 * PAGE)]
    assert page_ranges([]) == []


def test_places_are_filled_to_their_end() -> None:
    own = mmap.mmap(-1, 4 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(own))
    places = [Place(start + PAGE - 3, 7), Place(start + 2 * PAGE - 2, 100)]
    (copy,) = copied([(start + PAGE, start + 2 * PAGE)], places, b"ab")
    # The first one's marks are at odd distances from the range, the second one's end is in another range.
    assert ctypes.string_at(copy.waiting, 5) == b"bab\0\0"
    assert ctypes.string_at(copy.waiting + PAGE - 4, 4) == b"\0\0ab"
