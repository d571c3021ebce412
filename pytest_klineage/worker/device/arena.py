"""Device memory between the oracle and one worker: slots, guard bands, tensors. What host/arena.py is on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from pytest_klineage.records import Placement, Signature
from pytest_klineage.worker.device import memory
from pytest_klineage.worker.host.arena import GUARD_BYTES, OracleArena, plan, views_of

if TYPE_CHECKING:
    import torch

ALIGNMENT = 512
"""As torch's own allocator gives it: no library may be slower here than where its users call it."""
SLOTS = 20
"""Calls of one block: each has memory of its own, so that no call meets another's outputs or a cached input."""
LEAST_SLOTS = 3
ARENA_BYTES = 1 << 30
"""Large problems get fewer slots than that, so that all of them fit in this: each costs a comparison per block."""


class DeviceArena(OracleArena):
    """The oracle's side of one arena."""

    def __init__(self, signature: Signature, most: int = SLOTS) -> None:
        import torch

        one = plan(signature, num_slots=1, alignment=ALIGNMENT).num_bytes
        slots = max(LEAST_SLOTS, min(most, ARENA_BYTES // one))
        planned = plan(signature, num_slots=slots, alignment=ALIGNMENT)
        self.memory, self.fd = memory.allocate(planned.num_bytes)
        self.fds = [self.fd]
        self.arena = msgspec.structs.replace(planned, num_bytes=self.memory.num_bytes)
        self.pattern = torch.randint(256, (GUARD_BYTES,), dtype=torch.uint8, device="cuda")
        self.views = views_of(self.memory, self.arena)
        self.paint_guards()

    @property
    def num_slots(self) -> int:
        """How many calls a block may have."""
        return len(self.arena.slots)

    def _items(self, slot: int) -> tuple[Placement, ...]:
        return (*self.arena.slots[slot].inputs, *self.arena.slots[slot].separate)

    def _bands(self, item: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = item.offset, item.offset + item.num_bytes
        return self.memory.bytes[start - GUARD_BYTES : start], self.memory.bytes[end : end + GUARD_BYTES]

    def paint_guards(self) -> None:
        """Write the secret pattern into every guard band."""
        for slot in range(self.num_slots):
            for item in self._items(slot):
                for band in self._bands(item):
                    band.copy_(self.pattern)

    def broken_guards(self, slot: int) -> list[str]:
        """Names of the tensors of a slot beside which something was written."""
        import torch

        items = self._items(slot)
        bands = torch.stack([band for item in items for band in self._bands(item)])
        intact = (bands == self.pattern).all(dim=1).view(len(items), 2).all(dim=1).tolist()
        return [item.spec.name for item, whole in zip(items, intact, strict=True) if not whole]

    def output_digest(self, slot: int, nonce: int) -> str:
        """Nothing: a worker on a GPU answers for a whole block, of which every output is looked at again."""
        return ""

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.fd)
        self.views.clear()
        self.memory.close()
