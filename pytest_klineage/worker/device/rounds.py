"""One block of calls of one worker on a GPU as the oracle sees it: prepare memory, run, take two clocks, compare."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from pytest_klineage.records import Check, Code, KernelTime, Reason
from pytest_klineage.records.messages import (
    BlockReturned,
    EventsMade,
    Finished,
    MakeEvents,
    OutputsReady,
    ReturnedTensor,
    RunBlock,
    TimedCall,
)
from pytest_klineage.worker.comparison import compare, prepare
from pytest_klineage.worker.device.arena import DeviceArena
from pytest_klineage.worker.device.calls import (
    CYCLES_PER_NS,
    GRAPH_REPLAYS,
    HEAD_START_CALLS,
    HEAD_START_CYCLES,
    halves,
)
from pytest_klineage.worker.host.arena import flat_bits
from pytest_klineage.worker.rounds import (
    EARLY_SAMPLES,
    WorkerHandle,
    WorkerProblem,
)

PROFILE_SLACK_S = 30.0
"""Starting the profiler for the first time takes seconds."""
UNEVEN = 1.5
"""How many times the median the mean of a block's calls may be before the mean counts."""
LATE_SHARE, LATE_NS = 0.25, 5000
"""Work after a call's own stream has finished counts as late beyond this share of the call, and beyond this long."""
LATE_BLOCKS = 20
"""One late block of a process, or one in so many, only adds to its calls' times: a host that stalls looks like one."""
FLUSH_SHARE = 0.75
"""Of the time that the oracle has measured for a flush, and of the head start's, what a block must have."""
SETTLE_NOISE_NS = 1000
"""What the device may take beyond twice the usual to find that nothing is left to do."""


EarlySamples: TypeAlias = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By output, which elements were looked at, and what they were."""


class CallBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: the contents of the slots, one each, and how often and how."""

    views: list[Any]
    """Views; slot i gets view i."""
    calls: int
    """Calls in all; they go round the slots."""
    arena: int = 0
    first_slot: int = 0
    graph: bool = False
    profile: bool = False
    alone: bool = True
    """Whether no other process uses the GPU meanwhile; where others do, the device is late for reasons of theirs."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of every call."""
        return tuple(self.first_slot + index % len(self.views) for index in range(self.calls))


class BlockOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one block gave: a sample for every call, and one for all of them."""

    whole: TimedCall
    calls: tuple[TimedCall, ...]
    checks: tuple[Check, ...] = ()
    reasons: tuple[Reason, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    busy_ns: int = 0
    claimed_ns: int = 0


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """What is written before a call, and how long that takes on this device by the oracle's own measurement."""

    bytes: int = 0
    ns: int = 0


def unflushed(
    block: CallBlock, returned: BlockReturned, done: OutputsReady, flush: Flush, num_slots: int
) -> Reason | None:
    """A reason when a block, or its trace, has no room for the flushes that belong to it.

    What a block spans, less its head start, its calls and their settling, is flushes and what lies between: never less
    than the flushes alone. The head start is bounded from below by the device's clock, so that neither can be called
    the other.
    """
    if block.graph or not flush.ns:
        return None
    least_ns = int(FLUSH_SHARE * block.calls * flush.ns)
    between_ns = returned.span_ns - returned.head_ns - sum(returned.elapsed_ns) - sum(returned.settled_ns)
    head_ns = least_head_start_ns(block.calls) if block.calls <= num_slots else 0
    evidence = {"between_ns": between_ns, "least_ns": least_ns, "head_ns": returned.head_ns, "least_head_ns": head_ns}
    if between_ns < least_ns or returned.head_ns < head_ns:
        detail = f"{between_ns / 1e3:.0f} us for flushes, which take {least_ns / 1e3:.0f} us or more"
        message = f"{block.calls} calls and a head start of {returned.head_ns / 1e3:.0f} us left {detail}"
    elif block.profile and done.flush_ns < least_ns:
        message = (
            f"the device wrote {done.flush_ns / 1e3:.0f} us of flushes while traced, which take {least_ns / 1e3:.0f}"
        )
    else:
        return None
    return Reason(code=Code.CLOCK, message=message, evidence=dict(evidence))


def least_head_start_ns(calls: int) -> int:
    """The shortest head start of a block that there can be."""
    return int(FLUSH_SHARE * HEAD_START_CYCLES * min(calls, HEAD_START_CALLS) / CYCLES_PER_NS)


class EarlyLook:
    """Random elements of all outputs of a block, to be read the moment the block has ended."""

    def __init__(self, arena: DeviceArena, slots: Sequence[int]) -> None:
        # The last call's first: it left the least time to be filled in afterwards.
        self._flat = {
            slot: {name: flat_bits(tensor) for name, tensor in arena.outputs(slot).items()}
            for slot in dict.fromkeys(reversed(slots))
        }
        self._where = {
            name: torch.randint(len(flat), (EARLY_SAMPLES,), device=flat.device)
            for name, flat in self._flat[slots[-1]].items()
        }

    def samples(self) -> dict[int, EarlySamples]:
        """By slot and output, which elements, and what they are now."""
        return {
            slot: {name: (self._where[name], tensor[self._where[name]]) for name, tensor in flat.items()}
            for slot, flat in self._flat.items()
        }


class DeviceWorkerHandle(WorkerHandle):
    """A worker on a GPU and the arenas it shares with the oracle."""

    arenas: Sequence[DeviceArena]

    def __init__(self, role: str, channel: Any, settle_ns: int, host_bound_ns: int) -> None:
        super().__init__(role, channel)
        self.settle_ns = settle_ns
        """How long an idle device takes to find itself idle, by the oracle's own measurement."""
        self.host_bound_ns = host_bound_ns
        """The same where the device waits for the host."""
        self.flush = Flush()
        """What is to be written before every call."""
        self.is_new = True
        """Whether nothing of it was timed yet: what it replaces may still be ending on the device."""
        self._blocks = self._late_blocks = self._events = 0

    def run_block(self, block: CallBlock, deadline_s: float, defences: frozenset[str]) -> BlockOutcome:
        """Run a block on prepared memory and compare every slot."""
        arena: DeviceArena = self.arenas[block.arena]
        kind = self.kinds.draw()
        # Before there are inputs: nothing can be computed while events are made.
        self._make_events(block.calls, deadline_s)
        # Masked, inputs say nothing before their own call; stopped, a thread of the candidate sees nothing come.
        mask = secrets.randbelow(1 << 16) - (1 << 15) or 1
        self.freeze(True)
        for index, view in enumerate(block.views):
            prepare(arena, block.first_slot + index, view, kind, defences)
            for tensor in arena.inputs(block.first_slot + index).values():
                halves(tensor).bitwise_xor_(mask)
        torch.cuda.synchronize()
        returned, done, wall_ns, early = self._exchange(arena, block, mask, deadline_s)
        whole, calls = self._samples(block, returned, wall_ns)
        checks: list[Check] = []
        reasons = self._late_once_too_often(returned) if block.alone and "two_clocks" in defences else []
        if "two_clocks" in defences and (reason := unflushed(block, returned, done, self.flush, arena.num_slots)):
            reasons.append(reason)
        for index, view in enumerate(block.views):
            slot = block.first_slot + index
            reasons += self._integrity(arena, slot, view, (), defences)
            if "verify" in defences:
                found, more = compare(arena, slot, view, kind, early.get(slot, {}))
                if more:
                    more = [*self._late_work(block.arena, slot, bool(done.tensors), deadline_s), *more]
                checks += found
                reasons += more
        reasons += self._block_aliases(arena, done.tensors, defences)
        return BlockOutcome(
            whole=whole, calls=calls, checks=tuple(checks), reasons=tuple(reasons), kernels=done.kernels,
            busy_ns=done.busy_ns, claimed_ns=sum(returned.elapsed_ns),
        )  # fmt: skip

    def _exchange(
        self, arena: DeviceArena, block: CallBlock, mask: int, deadline_s: float
    ) -> tuple[BlockReturned, OutputsReady, int, dict[int, EarlySamples]]:
        """Send the request, take the trusted clock, look at the outputs at once, then wait for the rest."""
        nonce = secrets.randbits(48)
        look = EarlyLook(arena, block.slots)
        torch.cuda.synchronize()
        request = RunBlock(
            arena=block.arena, slots=block.slots, nonce=nonce, mask=mask, graph=block.graph, profile=block.profile,
            flush_bytes=self.flush.bytes,
        )  # fmt: skip
        limit_s = deadline_s * max(1, block.calls // 10) + (PROFILE_SLACK_S if block.profile else 0.0)
        self.freeze(False)
        ends, started = time.monotonic() + limit_s, time.perf_counter_ns()
        self._send(request)
        self._receive_until(ends, Finished, nonce)
        wall_ns = time.perf_counter_ns() - started
        # Stopped, a thread of the candidate launches nothing while its outputs are looked at.
        self.freeze(True)
        early = look.samples()
        torch.cuda.synchronize()
        self.freeze(False)
        returned: BlockReturned = self._receive_until(ends, BlockReturned, nonce)
        done: OutputsReady = self._receive_until(ends, OutputsReady, nonce)
        lengths = (GRAPH_REPLAYS, 0) if block.graph else (block.calls, block.calls)
        if (len(returned.elapsed_ns), len(returned.settled_ns)) != lengths:
            raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message="an answer with the times of other calls"))
        times = (*returned.elapsed_ns, returned.span_ns)
        if min(times) <= 0 or min(returned.settled_ns, default=0) < 0 or returned.span_ns > wall_ns:
            raise WorkerProblem(
                Reason(
                    code=Code.CLOCK,
                    message="the worker reports no time, or more than passed between request and answer",
                    evidence={"span_ns": returned.span_ns, "wall_ns": wall_ns, "times": len(returned.elapsed_ns)},
                )
            )
        # What a reference returned was copied after the block, and a graph is recorded before it.
        is_late = block.graph or (bool(done.tensors) and self.role == "reference")
        return returned, done, wall_ns, {} if is_late else early

    def _receive_until(self, ends: float, kind: type, nonce: int):  # type: ignore[no-untyped-def]  # returns `kind`
        """The next message of an exchange that has one deadline, however many messages it has."""
        return self._receive(kind, max(0.001, ends - time.monotonic()), Code.TIMEOUT_RUN, nonce)

    def _make_events(self, calls: int, deadline_s: float) -> None:
        """Have the worker make the events of its longest block so far before the trusted clock runs."""
        if calls > self._events:
            nonce = secrets.randbits(48)
            self._send(MakeEvents(calls=calls, nonce=nonce))
            self._receive(EventsMade, deadline_s, Code.TIMEOUT_RUN, nonce)
            self._events = calls

    def _samples(
        self, block: CallBlock, returned: BlockReturned, wall_ns: int
    ) -> tuple[TimedCall, tuple[TimedCall, ...]]:
        """What the device did after a call's own stream had finished is added to the call; the host's share is apart.

        The host's share is what the trusted clock saw beyond the block's span, spread over the calls.
        """
        allowed = 2 * self.settle_ns + SETTLE_NOISE_NS
        settled = returned.settled_ns or (0,) * len(returned.elapsed_ns)
        times = [
            own + (after - self.settle_ns if after > allowed else 0)
            for own, after in zip(returned.elapsed_ns, settled, strict=True)
        ]
        gap_ns = max(0, wall_ns - returned.span_ns) // block.calls
        if block.graph or block.profile:
            gap_ns = 0  # recording a graph and starting a profiler take the host long, with any kernel
        middle, mean = sorted(times)[len(times) // 2], sum(times) // len(times)
        if mean > UNEVEN * middle:
            # One call that does the work of all others would leave the median short.
            middle = mean
        whole = TimedCall(role=self.role, elapsed_ns=middle, wall_ns=middle + gap_ns)
        return whole, tuple(TimedCall(role=self.role, elapsed_ns=own, wall_ns=own + gap_ns) for own in times)

    def _late_once_too_often(self, returned: BlockReturned) -> list[Reason]:
        """The reason of a late block, unless it is one of few: their times include it, and outputs are compared."""
        late = self._unsettled(returned)
        if self.is_new or not returned.settled_ns:
            return late
        self._blocks += 1
        self._late_blocks += bool(late)
        return late if self._late_blocks > max(1, self._blocks // LATE_BLOCKS) else []

    def _unsettled(self, returned: BlockReturned) -> list[Reason]:
        """A reason when most calls leave work behind that their own stream does not wait for."""
        if not returned.settled_ns:
            return []
        middle = len(returned.elapsed_ns) // 2
        own, after = sorted(returned.elapsed_ns)[middle], sorted(returned.settled_ns)[middle]
        if after <= 2 * self.settle_ns + max(LATE_SHARE * own, LATE_NS, 2 * self.host_bound_ns):
            return []
        message = f"the device went on for {after / 1e3:.1f} us after the {own / 1e3:.1f} us of the call's own stream"
        return [Reason(code=Code.LATE_WORK, message=message, evidence={"own_ns": own, "after_ns": after})]

    def _block_aliases(
        self, arena: DeviceArena, tensors: tuple[ReturnedTensor, ...], defences: frozenset[str]
    ) -> list[Reason]:
        """Whether returned tensors overlap the arena, one another, or what the last block returned."""
        reason = self._aliases(arena, tensors) if tensors and "alias_rules" in defences else None
        self.previous = list(tensors)
        return [reason] if reason is not None else []
