"""The filter of calls that would map, unmap or move code, read instruction by instruction as the kernel reads it."""

from __future__ import annotations

import struct

import pytest

from pytest_klineage.worker.sandbox.containment import EPERM, RET_ALLOW, RET_ERRNO, SYSCALLS
from pytest_klineage.worker.sandbox.kept_ranges import MAP_FIXED, MREMAP_FIXED, UNMAPPING, range_program

RANGES = [(0x7F00_F000_0000, 0x7F01_1000_0000), (0x5000_0000, 0x5000_3000)]
"""One that goes over a border of 32 bits, one below it."""
PAGE, WORD = 4096, 0xFFFFFFFF


def run(number: int, *arguments: int, machine: str) -> bool:
    """Whether the filter refuses a call: `struct seccomp_data` in, action out."""
    program = range_program(machine, RANGES)
    padded = (value & (2**64 - 1) for value in (*arguments, *[0] * (6 - len(arguments))))
    data = struct.pack("<IIQ6Q", number, 0, 0, *padded)
    accumulator, index, memory, position = 0, 0, [0] * 16, 0
    while True:
        code, jump_true, jump_false, value = program[position]
        position += 1
        if code == 0x06:
            assert value in (RET_ALLOW, RET_ERRNO | EPERM)
            return value != RET_ALLOW
        if code in JUMPS:
            position += jump_true if JUMPS[code](accumulator, value, index) else jump_false
        elif code == 0x02:
            memory[value] = accumulator
        elif code == 0x07:
            index = accumulator
        elif code == 0x05:
            position += value
        else:
            accumulator = LOADS[code](accumulator, value, index, memory, data)


JUMPS = {
    0x15: lambda a, k, x: a == k, 0x25: lambda a, k, x: a > k, 0x35: lambda a, k, x: a >= k,
    0x3D: lambda a, k, x: a >= x, 0x45: lambda a, k, x: bool(a & k),
}  # fmt: skip
LOADS = {
    0x20: lambda a, k, x, memory, data: struct.unpack_from("<I", data, k)[0],
    0x00: lambda a, k, x, memory, data: k,
    0x60: lambda a, k, x, memory, data: memory[k],
    0x0C: lambda a, k, x, memory, data: (a + x) & WORD,
}


@pytest.fixture(params=sorted(UNMAPPING))
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(("start", "end"), RANGES)
@pytest.mark.parametrize(
    ("offset", "length", "refused"),
    [
        (0, PAGE, True), (-PAGE, PAGE, False), (-PAGE, PAGE + 1, True), (-PAGE, 2 * PAGE, True), (-PAGE, 1 << 40, True),
        (-(1 << 28), 1 << 28, False), (PAGE, 1, True), (0, 0, False),
    ],
)  # fmt: skip
def test_unmapping_near_the_start(start: int, end: int, offset: int, length: int, refused: bool, machine: str) -> None:
    assert run(UNMAPPING[machine]["munmap"], start + offset, length, machine=machine) is refused


@pytest.mark.parametrize(("start", "end"), RANGES)
def test_unmapping_near_the_end(start: int, end: int, machine: str) -> None:
    number = UNMAPPING[machine]["munmap"]
    assert run(number, end - PAGE, PAGE, machine=machine)
    assert not run(number, end, PAGE, machine=machine)
    assert not run(number, end + (1 << 33), 1 << 33, machine=machine)


def test_mapping_counts_only_at_a_fixed_place(machine: str) -> None:
    start = RANGES[0][0]
    number = SYSCALLS[machine]["mmap"]
    assert run(number, start, PAGE, 5, 0x2 | MAP_FIXED, machine=machine)
    assert not run(number, start, PAGE, 5, 0x2, machine=machine)
    assert not run(number, start - PAGE, PAGE, 5, 0x2 | MAP_FIXED, machine=machine)


def test_moving_counts_from_there_and_to_there(machine: str) -> None:
    start, other = RANGES[0][0], 0x1000_0000
    number = UNMAPPING[machine]["mremap"]
    assert run(number, start, PAGE, PAGE, 1, machine=machine)
    assert run(number, other, PAGE, PAGE, 1 | MREMAP_FIXED, start, machine=machine)
    assert run(number, other, PAGE, 2 * PAGE, 1 | MREMAP_FIXED, start - PAGE, machine=machine)
    assert not run(number, other, PAGE, PAGE, 1, start, machine=machine)
    assert not run(number, other, PAGE, PAGE, 1 | MREMAP_FIXED, start - PAGE, machine=machine)


def test_other_calls_pass(machine: str) -> None:
    start = RANGES[0][0]
    taken = {*UNMAPPING[machine].values(), SYSCALLS[machine]["mmap"]}
    for number in {*range(470)} - taken:
        assert not run(number, start, PAGE, PAGE, MAP_FIXED, start, machine=machine)
