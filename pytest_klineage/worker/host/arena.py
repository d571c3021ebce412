"""Shared memory between the oracle and one worker: layout with guard bands, and tensors over it.

The oracle owns the memory (a memfd); the worker maps the same pages. Nothing secret is ever written into it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pytest_klineage.records import DTYPES, Arena, Placement, Signature, Slot, TensorSpec
from pytest_klineage.surfaces.base import MappedMemory, Memory
from pytest_klineage.surfaces.python import tensor_view
from pytest_klineage.worker.host.digest import output_digest
from pytest_klineage.worker.host.read_only import input_pages, pages_behind, sealed_file

if TYPE_CHECKING:
    import torch

GUARD_BYTES = 4096
ALIGNMENT = 64
SLOTS = 2
"""Two complete argument sets, so that the same content comes at different addresses and the other way round."""
NAN_BITS = {1: 0x7F, 2: 0x7FDB, 4: 0x7FDBDBDB, 8: 0x7FFBDBDBDBDBDBDB}
"""By size in bytes, a NaN that no arithmetic produces; the two-byte one is a NaN in fp16 and in bf16, the only one of
one byte in both kinds of fp8."""
BYTES = (0xDB, 0xB7, 0x24)
"""What fills a tensor of one-byte integers or booleans, by kind; of the last one the lowest bit is clear."""
HIGHEST = {"fp16": 60000.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""A huge number; of other types it is 3e38."""
KINDS = len(BYTES)
SKEW_BYTES = 1344
"""Added between slots: the second slot's tensors start at another offset within a page."""


REMEMBERED_CALLS, REMEMBERED_BYTES, MOST_REMEMBERED = 2, 4 << 20, 64
"""Of how many calls a worker keeps the results alive: as many as fit into so many bytes, two at least. When one more
comes, one of them is forgotten, drawn at random."""


def remembered_calls(arena: Arena) -> int:
    """How many earlier results are kept."""
    num_bytes = sum(item.num_bytes for item in arena.slots[0].separate)
    return max(REMEMBERED_CALLS, min(MOST_REMEMBERED, REMEMBERED_BYTES // max(1, num_bytes)))


def plan(
    signature: Signature, shift: int = 0, *, num_slots: int = SLOTS, alignment: int = ALIGNMENT, page: int = 1
) -> Arena:  # fmt: skip
    """Lay out the slots one after another, every tensor between two guard bands. With a size of pages, the first slot's
    inputs end with one, but for less than an alignment."""
    cursor, slots = GUARD_BYTES, []
    for index in range(num_slots):
        cursor += shift + index * SKEW_BYTES
        placed: list[tuple[Placement, ...]] = []
        known: dict[str, Placement] = {}
        for specs, unit in ((signature.inputs, page if index == 0 else 1), (signature.outputs, 1)):
            group = []
            for spec in specs:
                if spec.name in known:
                    group.append(known[spec.name])
                    continue
                num_bytes = spec.num_elements * DTYPES[spec.dtype]
                room = up(num_bytes, alignment)
                cursor = up(up(cursor, alignment) + room, unit) - room
                known[spec.name] = Placement(spec=spec, offset=cursor, num_bytes=num_bytes)
                group.append(known[spec.name])
                cursor += num_bytes + 2 * GUARD_BYTES
            placed.append(tuple(group))
        slots.append(Slot(inputs=placed[0], outputs=placed[1]))
    return Arena(num_bytes=cursor + GUARD_BYTES, guard_bytes=GUARD_BYTES, slots=tuple(slots), scalars=signature.scalars)


def up(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


def views_of(memory: MappedMemory, arena: Arena) -> list[dict[str, torch.Tensor]]:
    """By slot, tensors over a mapped arena by name."""
    return [
        {item.spec.name: tensor_view(memory, item) for item in (*slot.inputs, *slot.outputs)} for slot in arena.slots
    ]


class OracleArena(ABC):
    """The oracle's side of one arena, in host or device memory."""

    arena: Arena
    views: list[dict[str, torch.Tensor]]
    """By slot, the tensors by name."""
    fds: list[int]
    """What a worker maps: all of it, then the inputs, where those are for reading alone."""
    read_only: tuple[tuple[int, int], ...] = ()
    """The pages of those, see `read_only`."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """Pages that a worker is not to read, see `read_only`."""
    worker_address = 0
    copy_ns = 0
    """Time to copy all outputs once into fresh memory."""

    def inputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Input tensors of a slot by name, in the operator's order."""
        return {item.spec.name: self.views[slot][item.spec.name] for item in self.arena.slots[slot].inputs}

    def outputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Output tensors of a slot by name."""
        return {item.spec.name: self.views[slot][item.spec.name] for item in self.arena.slots[slot].outputs}

    @abstractmethod
    def paint_guards(self) -> None:
        """Write the secret pattern into every guard band."""

    @abstractmethod
    def broken_guards(self, slot: int) -> list[str]:
        """Names of the tensors of a slot beside which something was written."""

    @abstractmethod
    def output_digest(self, slot: int, nonce: int) -> str:
        """What an answer to a call must have said about the outputs that lie here now; see `digest`."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


class SharedArena(OracleArena):
    """The oracle's side of one arena in host memory."""

    def __init__(self, signature: Signature, *, read_only: bool = False, unreadable: bool = False) -> None:
        """With `read_only`, a worker can map inputs for reading alone; with `unreadable`, it cannot read on after those
        of the first slot."""
        self.arena = plan(signature, page=mmap.PAGESIZE if mmap.PAGESIZE <= GUARD_BYTES else 1)
        self.unreadable = tuple(pages_behind(self.arena)) if unreadable else ()
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.arena.num_bytes)
        # A process that made it smaller would end this one at its next access.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.buffer = mmap.mmap(self.fd, self.arena.num_bytes)
        self.memory = Memory(self.buffer)
        pages = tuple(input_pages(self.arena)) if read_only else ()
        sealed = sealed_file(self.memory.address, self.arena.num_bytes, pages, self.fd) if pages else None
        self.fds = [self.fd] if sealed is None else [self.fd, sealed]
        self.read_only = () if sealed is None else pages
        self.pattern = secrets.token_bytes(GUARD_BYTES)
        self.guards = [
            position
            for slot in self.arena.slots
            for item in (*slot.inputs, *slot.outputs)
            for position in (item.offset - GUARD_BYTES, item.offset + item.num_bytes)
        ]
        self.views = views_of(self.memory, self.arena)
        started = time.perf_counter_ns()
        for tensor in self.outputs(0).values():
            tensor.clone()
        self.copy_ns = time.perf_counter_ns() - started
        self.paint_guards()

    def paint_guards(self) -> None:
        """Write the secret pattern into every guard band."""
        for position in self.guards:
            self.buffer[position : position + GUARD_BYTES] = self.pattern

    def broken_guards(self, slot: int) -> list[str]:
        """Names of the tensors of a slot beside which something was written."""
        items = (*self.arena.slots[slot].inputs, *self.arena.slots[slot].separate)
        return [item.spec.name for item in items if not self._intact(item)]

    def _intact(self, item: Placement) -> bool:
        before, after = item.offset - GUARD_BYTES, item.offset + item.num_bytes
        return (
            self.buffer[before : before + GUARD_BYTES] == self.pattern
            and self.buffer[after : after + GUARD_BYTES] == self.pattern
        )

    def output_digest(self, slot: int, nonce: int) -> str:
        """What an answer to a call must have said about the outputs that lie here now."""
        return output_digest(memoryview(self.buffer), self.arena.slots[slot], nonce)

    def close(self) -> None:
        """Give the descriptors back; the mapping goes with the last tensor over it."""
        for fd in self.fds:
            os.close(fd)


class Kinds:
    """Which kind of poison comes next, in an order that is drawn: a few checks meet every kind."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def draw(self) -> int:
        """The next one."""
        self._left = self._left or secrets.SystemRandom().sample(range(KINDS), KINDS)
        return self._left.pop()


def poison(spec: TensorSpec, tensor: torch.Tensor, kind: int) -> None:
    """Fill an output with values no correct kernel leaves behind: a rare NaN, a huge number of either sign, an
    impossible index. No maximum, minimum, sum or logical operation with what was there is right beside all kinds."""
    if spec.dtype in ("bool", "int8", "uint8"):
        as_integers(tensor).fill_(BYTES[kind])
    elif spec.dtype.startswith("int"):
        huge = 1 << (30 if tensor.element_size() > 2 else 14)
        tensor.fill_((-7, huge, -huge)[kind])
    elif kind == 0:
        as_integers(tensor).fill_(NAN_BITS[tensor.element_size()])
    else:
        huge_number = HIGHEST.get(spec.dtype, 3.0e38)
        tensor.fill_(-huge_number if kind == 1 else huge_number)


def is_poison(spec: TensorSpec, tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Boolean mask of the elements that still hold the poison, bit for bit: a NaN of the kernel's own is not it."""
    import torch

    reference = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
    poison(spec, reference, kind)
    return as_integers(tensor) == as_integers(reference)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def storage_extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to past its last; arena tensors are dense, so this is their number."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory in order, as integers: few operations know 8-bit floats."""
    return as_integers(tensor.as_strided((storage_extent(tensor),), (1,)))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality, NaN included; in words of 64 bits where both fill such, which takes half the time or less."""
    import torch

    both = [as_integers(tensor.contiguous()).view(-1) for tensor in (left, right)]
    if all(each.element_size() * place % 8 == 0 for each in both for place in (each.numel(), each.storage_offset())):
        both = [each.view(torch.int64) for each in both]
    return left.shape == right.shape and torch.equal(*both)
