"""What a trace of a block says that the device executed, without what the gate itself put there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pytest_klineage.records import KernelTime

HEAD_START_KERNEL = "spin_kernel"
"""How a profile names it."""
MASK_KERNEL = "BitwiseXor"
"""A part of the names of torch's kernels by which inputs are unmasked."""
COPY_KERNEL = "copy_kernel_cuda"
"""A part of the names of torch's kernels by which tensors in another order of memory are copied."""
FILL = "Memset ("
"""How a profile names fills: with a blank that no function's name can have before its bracket."""
MAX_KERNELS = 100
MAX_NAME = 240
"""Characters of a kernel's name that a record keeps."""


class Executed(NamedTuple):
    """What the device did during a profiled block."""

    kernels: tuple[KernelTime, ...]
    busy_ns: int
    flush_ns: int


def summary(executed: list[tuple[int, int, str]], *, fills: int, masks: int, copies: int = 0) -> Executed:
    """Kernels by name, and for how long the device was busy with them, without what is ours.

    Ours are the flushes (so many of the longest fills, by a name that no function can have), the unmasking (so many of
    the shortest of its name: never more time than was ours), and the head start (the first of its name). Copies from
    other orders of memory are ours by name and the call's by time.
    """
    flushes = longest(executed, FILL, fills)
    ours = list(flushes)
    ours += sorted((item for item in executed if MASK_KERNEL in item[2]), key=lambda item: item[1])[:masks]
    ours += sorted(item for item in executed if HEAD_START_KERNEL in item[2])[:1]
    left = list((Counter(executed) - Counter(ours)).elements())
    copied = sorted((item for item in left if COPY_KERNEL in item[2]), key=lambda item: item[1])[:copies]
    busy_ns = covered_ns([(start, start + length) for start, length, _name in left])
    kernels = by_name(list((Counter(left) - Counter(copied)).elements()))
    return Executed(kernels, busy_ns, sum(length for _start, length, _name in flushes))


def longest(executed: list[tuple[int, int, str]], word: str, count: int) -> list[tuple[int, int, str]]:
    """The longest `count` of those that have a word in their name."""
    return sorted((item for item in executed if word in item[2]), key=lambda item: -item[1])[:count]


def by_name(executed: Iterable[tuple[int, int, str]]) -> tuple[KernelTime, ...]:
    """Calls and time by name, longest first, bounded."""
    total: dict[str, list[int]] = {}
    for _start, length, name in executed:
        entry = total.setdefault(name[:MAX_NAME], [0, 0])
        entry[0] += 1
        entry[1] += length
    kernels = [KernelTime(name=name, calls=calls, total_ns=spent) for name, (calls, spent) in total.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_ns)[:MAX_KERNELS])


def covered_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of time spans."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
