"""Address ranges whose mappings stay as they are: sealed where Linux can (6.10), else by a filter of system calls."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection

from pytest_klineage.worker.sandbox.containment import (
    ALLOW,
    ARGUMENT_0,
    BIT_SET,
    EQUAL,
    GREATER_EQUAL,
    LIBC,
    LOAD,
    REFUSE,
    SYSCALLS,
    Instruction,
    install,
)

MSEAL = 462
"""The same number on every machine."""
MAP_FIXED, MREMAP_FIXED = 0x10, 2
UNMAPPING = {"x86_64": {"munmap": 11, "mremap": 25}, "aarch64": {"munmap": 215, "mremap": 216}}
GREATER, GREATER_EQUAL_X, JUMP, LOAD_CONSTANT, LOAD_KEPT, KEEP, TO_X, ADD_X = 0x25, 0x3D, 5, 0, 0x60, 2, 7, 0xC
"""More codes of the filter's machine, whose memory has 16 words."""

Range = tuple[int, int]


def keep(ranges: Collection[Range], *, may_filter: bool) -> list[str]:
    """Let nothing be mapped, unmapped or moved in these ranges any more. Returns what sees to that.

    Permissions and contents can still change by other calls without a seal, as far as the mappings allow it.
    """
    if not ranges:
        return []
    if all(seal(*one) for one in ranges):
        return ["sealed-code"]
    machine = platform.machine()
    if not may_filter or machine not in UNMAPPING:
        return []
    return ["kept-code"] if install(range_program(machine, ranges)) else []


def seal(start: int, end: int) -> bool:
    """Seal one range; False where Linux cannot."""
    return bool(LIBC.syscall(MSEAL, ctypes.c_void_p(start), ctypes.c_size_t(end - start), 0) == 0)


def range_program(machine: str, ranges: Collection[Range]) -> list[Instruction]:
    """A classic BPF program that refuses the calls that would map, unmap or move within the ranges."""
    place = overlapping(0, 1, ranges)
    program: list[Instruction] = [(LOAD, 0, 0, 0)]
    program += for_call(UNMAPPING[machine]["munmap"], place)
    program += for_call(SYSCALLS[machine]["mmap"], if_set(MAP_FIXED, place))
    program += for_call(UNMAPPING[machine]["mremap"], [*place, *if_set(MREMAP_FIXED, overlapping(4, 2, ranges))])
    return [*program, ALLOW]


def for_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Do something about one system call, and allow it if that has not refused it; the number stays loaded."""
    return [(EQUAL, 1, 0, number), (JUMP, 0, 0, len(body) + 1), *body, ALLOW]


def if_set(flag: int, body: list[Instruction]) -> list[Instruction]:
    """Do something where a flag is set in the fourth argument."""
    return [(LOAD, 0, 0, ARGUMENT_0 + 3 * 8), (BIT_SET, 1, 0, flag), (JUMP, 0, 0, len(body)), *body]


def overlapping(address: int, length: int, ranges: Collection[Range]) -> list[Instruction]:
    """Refuse a call about `length` bytes from an `address` on, both arguments of it, that has a part in a range.

    The machine has 32 bits: words 0 and 1 of its memory become the two halves of the end.
    """
    low, high, size = ARGUMENT_0 + 8 * address, ARGUMENT_0 + 8 * address + 4, ARGUMENT_0 + 8 * length
    end: list[Instruction] = [
        (LOAD, 0, 0, low), (TO_X, 0, 0, 0), (LOAD, 0, 0, size), (ADD_X, 0, 0, 0), (KEEP, 0, 0, 0),
        (GREATER_EQUAL_X, 2, 0, 0), (LOAD_CONSTANT, 0, 0, 1), (JUMP, 0, 0, 1), (LOAD_CONSTANT, 0, 0, 0),  # the carry
        (TO_X, 0, 0, 0), (LOAD, 0, 0, high), (ADD_X, 0, 0, 0), (TO_X, 0, 0, 0), (LOAD, 0, 0, size + 4),
        (ADD_X, 0, 0, 0), (KEEP, 0, 0, 1),
    ]  # fmt: skip
    return end + [instruction for one in ranges for instruction in before_or_behind(low, high, *one)]


def before_or_behind(low: int, high: int, first: int, last: int) -> list[Instruction]:
    """Refuse unless the address, of two halves, is at least `last` or the end that is kept at most `first`."""
    word = 0xFFFFFFFF
    return [
        (LOAD, 0, 0, high), (GREATER, 9, 0, last >> 32), (EQUAL, 0, 2, last >> 32),
        (LOAD, 0, 0, low), (GREATER_EQUAL, 6, 0, last & word),
        (LOAD_KEPT, 0, 0, 1), (GREATER, 3, 0, first >> 32), (EQUAL, 0, 3, first >> 32),
        (LOAD_KEPT, 0, 0, 0), (GREATER, 0, 1, first & word), REFUSE,
    ]  # fmt: skip
