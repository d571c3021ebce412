"""What a candidate returned in earlier calls, as the oracle saw it: a caller may still use all of it."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch

from pytest_klineage.records.messages import ReturnedTensor
from pytest_klineage.worker.host.arena import OracleArena, remembered_calls, same_bits


class KeptResult(NamedTuple):
    """One call's result."""

    arena_index: int
    outputs: dict[str, torch.Tensor]
    tensors: tuple[ReturnedTensor, ...]
    """Where they lie, by the worker's word."""


class EarlierResults:
    """Copies of the results that the worker keeps alive as well, the oldest first.

    Which of them are forgotten is drawn after they were returned: a ring of buffers that is longer than what is kept
    meets one of its own all the same.
    """

    def __init__(self) -> None:
        self._kept: list[KeptResult] = []

    def forget(self, arena: OracleArena) -> tuple[int, ...]:
        """Make room for one more result. Returns the places of those to forget, one after another."""
        places = []
        while len(self._kept) >= remembered_calls(arena.arena):
            places.append(secrets.randbelow(len(self._kept)))
            del self._kept[places[-1]]
        return tuple(places)

    def add(
        self,
        arena_index: int,
        arena: OracleArena,
        slot: int,
        tensors: tuple[ReturnedTensor, ...],
        *,
        copied: bool = True,
    ) -> None:
        """Take the outputs that a call has left in its slot; nothing of them where it returned no tensors."""
        outputs, placed = arena.outputs(slot), arena.arena.slots[slot].separate if tensors and copied else ()
        copies = {item.spec.name: outputs[item.spec.name].clone() for item in placed}
        self._kept.append(KeptResult(arena_index, copies, tensors))

    def tensors(self) -> list[ReturnedTensor]:
        """Where the kept results lie."""
        return [tensor for kept in self._kept for tensor in kept.tensors]

    def any_of(self, arena_index: int) -> int | None:
        """How many results ago one of an arena's was returned, drawn at random; None where that has none."""
        own = [
            back for back, kept in enumerate(reversed(self._kept)) if kept.arena_index == arena_index and kept.outputs
        ]
        return secrets.choice(own) if own else None

    def differing(self, back: int, outputs: dict[str, torch.Tensor]) -> list[str]:
        """Names of the outputs that are no longer what they were so many results ago."""
        return [name for name, before in self._kept[-1 - back].outputs.items() if not same_bits(before, outputs[name])]
