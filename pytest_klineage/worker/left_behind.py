"""What earlier calls have left in the slots that the current one was not given: its caller may still use all of it."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch

from pytest_klineage.records import Code, Reason
from pytest_klineage.worker.host.arena import OracleArena, same_bits


class LeftBehind(NamedTuple):
    """One slot as its last call has left it."""

    arena: OracleArena
    slot: int
    inputs: dict[str, torch.Tensor]
    """What was written into it."""
    nonce: int
    digest: str
    """Of the outputs after the call, by a nonce that no kernel knows: of large ones, of some pieces."""

    def changed_inputs(self) -> list[str]:
        """Names of the inputs that are no longer what was written, but for those that a call may overwrite."""
        overwritten = {item.spec.name for item in self.arena.arena.slots[self.slot].inout}
        now = self.arena.inputs(self.slot)
        return [name for name in now if name not in overwritten and not same_bits(now[name], self.inputs[name])]

    def has_other_outputs(self) -> bool:
        """Whether the outputs are no longer what the call has left."""
        return self.arena.output_digest(self.slot, self.nonce) != self.digest


class OtherSlots:
    """The slots of a worker's arenas, each as its last call has left it."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], LeftBehind] = {}

    def leave(self, arena_index: int, arena: OracleArena, slot: int, inputs: dict[str, torch.Tensor]) -> None:
        """Note what a call has left, once nothing more is copied into its slot."""
        nonce = secrets.randbits(64)
        digest = arena.output_digest(slot, nonce)
        self._left[arena_index, slot] = LeftBehind(arena, slot, inputs, nonce, digest)

    def changes(self, arena_index: int, slot: int, defences: frozenset[str]) -> list[Reason]:
        """What the call on this slot has changed in all others."""
        reasons = []
        others = [left for place, left in self._left.items() if place != (arena_index, slot)]
        if "input_integrity" in defences and (names := {name for one in others for name in one.changed_inputs()}):
            message = f"the kernel changed the input {', '.join(sorted(names))} of an earlier call"
            reasons.append(Reason(code=Code.INPUT_MUTATED, message=message))
        if "alias_rules" in defences and any(one.has_other_outputs() for one in others):
            message = "the outputs of an earlier call, which the caller may still use, have changed since"
            reasons.append(Reason(code=Code.ALIASED_OUTPUT, message=message))
        return reasons
