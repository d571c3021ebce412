"""One repetition of one worker as the oracle sees it: prepare memory, run, take two clocks, compare."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from pytest_klineage.channel import BadFrame, Channel, ChannelClosed
from pytest_klineage.records import Check, Code, Reason
from pytest_klineage.records.messages import (
    CALLERS_SETTINGS,
    Again,
    Attached,
    FromWorker,
    KernelFailed,
    KernelLoaded,
    LoadFailed,
    MakeEvents,
    Map,
    Mapped,
    OutputsReady,
    Returned,
    ReturnedTensor,
    RunBlock,
    RunKernel,
    StopWorker,
    TimedCall,
)
from pytest_klineage.worker.comparison import View, compare, prepare
from pytest_klineage.worker.earlier import EarlierResults
from pytest_klineage.worker.host.arena import Kinds, OracleArena, flat_bits, same_bits
from pytest_klineage.worker.host.scheduling import waited_ns
from pytest_klineage.worker.left_behind import OtherSlots
from pytest_klineage.worker.stopping import Stopper, thread_states

EARLY_SAMPLES = 256
"""Elements of every output that are read the moment the call returns."""
COPIES_ALLOWED = 4
"""How many copies of a reference's outputs may pass, in time, between its return and its result: cold pages, two hops.
A candidate's are copied before it has returned."""
ASKED_AGAIN = 8
"""One timed call in so many, and every check, is followed by a look at what earlier ones have left: returned results,
and the tensors of the other slots. They must be what they were."""
SETTLE_S, SETTLE_MOST_S = 0.05, 1.0
"""How long a wrong output is given to change, and at most while the process is at work: if it does, work went on after
the call had returned."""

WORKER_CODES = frozenset({
    Code.ENTRY_MISSING, Code.EXCEPTION, Code.RETURNED_ERROR, Code.OUT_OF_MEMORY, Code.OUTPUT_COUNT, Code.OUTPUT_SHAPE,
    Code.OUTPUT_DTYPE, Code.OUTPUT_STRIDES, Code.FAKE_TENSOR, Code.CUDA_ERROR, Code.NOT_CAPTURABLE,
})  # fmt: skip
"""What a worker may say about itself. It shares a process with the candidate, which could claim to be accepted."""


class WorkerProblem(Exception):
    """A worker failed; the reasons say how. Caught by the oracle and sent to the judge."""

    def __init__(self, *reasons: Reason, gone: bool = False, role: str = "") -> None:
        super().__init__(reasons[0].message if reasons else "the worker is gone")
        self.reasons, self.gone = reasons, gone
        self.role = role
        """Whose problem it is, where that is not who was at work."""


class RepetitionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one repetition gave."""

    sample: TimedCall
    checks: tuple[Check, ...] = ()
    reasons: tuple[Reason, ...] = ()
    refused: tuple[str, ...] = ()


class CallOutcome(NamedTuple):
    """What a call gave, and what the worker said of it."""

    sample: TimedCall
    early: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """By output, places of some elements and what they held when the answer came."""
    tensors: tuple[ReturnedTensor, ...]
    as_promised: bool
    """Whether the outputs are those that the answer was about."""
    settings: int
    """What the call has changed of CALLERS_SETTINGS, so a candidate's worker says."""


NO_SENDER = "the process that says that the kernel is loaded cannot be held, so it could not be stopped"
NOT_AS_PROMISED = (
    "the outputs are not what they were when the worker answered: work went on after the call had returned"
)


class WorkerHandle:
    """A worker and the arenas it shares with the oracle."""

    def __init__(self, role: str, channel: Channel) -> None:
        self.role, self.channel = role, channel
        self.arenas: Sequence[OracleArena] = ()
        self.previous: list[ReturnedTensor] = []
        """Where earlier results lie that must not be touched."""
        self.earlier = EarlierResults()
        self.others = OtherSlots()
        self.kinds = Kinds()
        self.changed = 0
        """What the worker's calls have changed of CALLERS_SETTINGS: said once."""
        self.refused: tuple[str, ...] = ()
        """Operators of the framework that the worker was refused, so it says."""
        self.ended_s = time.monotonic()
        self.pauses: deque[float] = deque(maxlen=32)
        """How long before a timed call the last one had ended, in seconds."""
        self.pid: int | None = None
        self.stopper: Stopper | None = None

    def attach(self, arenas: Sequence[OracleArena], deadline_s: float) -> Attached:
        """Wait until the worker has loaded its kernel, then share the arenas with it."""
        self.arenas = arenas
        started = time.monotonic()
        self._recognise(deadline_s)
        remaining_s = max(0.01, deadline_s - (time.monotonic() - started))
        answer = self._receive(KernelLoaded, remaining_s, Code.TIMEOUT_LOAD)
        if self.stopper is None:
            raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=NO_SENDER), role=self.role)
        for arena in arenas:
            request = Map(arena=arena.arena, read_only=arena.read_only, unreadable=arena.unreadable)
            self._send(request, arena.fds)
            arena.worker_address = self._receive(Mapped, deadline_s, Code.TIMEOUT_LOAD).address
        read_only = bool(arenas) and all(arena.read_only for arena in arenas)
        return Attached(containment=answer.containment, settings=answer.settings, read_only=read_only)

    def _recognise(self, deadline_s: float) -> None:
        """Take hold of the process that sends the first message: the system itself writes its id beside it."""
        self.channel.sock.settimeout(deadline_s)
        size = struct.calcsize("3i")
        with contextlib.suppress(OSError):
            _data, beside, _flags, _address = self.channel.sock.recvmsg(1, socket.CMSG_SPACE(size), socket.MSG_PEEK)
            for level, kind, credentials in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self.pid = struct.unpack("3i", credentials[:size])[0]
                    self.stopper = Stopper(self.pid)

    def freeze(self, frozen: bool) -> int:
        """Stop the worker's process with all its threads, or let it go on. Returns for how long it still worked, in ns.

        Threads that work, or spin, while the other side is at work would make that slower.
        """
        if self.stopper is None or frozen == self.stopper.stopped:
            return 0
        if frozen:
            return self.stopper.stop()
        self.hold_still()
        self.stopper.go_on()
        return 0

    def hold_still(self) -> None:
        """Raise WorkerProblem when a process that was stopped has gone on by itself."""
        if self.stopper is None or not (how := self.stopper.broke_out()):
            return
        message = f"the kernel's process undid its stop, with which the other side has the machine to itself: {how}"
        raise WorkerProblem(Reason(code=Code.TAMPERING, message=message), role=self.role)

    def close(self) -> None:
        """Ask the worker to stop and let go of it."""
        if self.stopper is not None:
            self.stopper.close()
            self.stopper = None
        with contextlib.suppress(ChannelClosed):
            self.channel.send(StopWorker())
        self.channel.close()
        for arena in self.arenas:
            arena.close()

    def run(
        self, view: View, arena_index: int, slot: int, deadline_s: float, defences: frozenset[str],
        flush: Callable[[], None] | None = None, *, checking: bool = False,
    ) -> RepetitionResult:  # fmt: skip
        """Run once on prepared memory, compare everything, and note what the call has left behind."""
        result = self._run(view, arena_index, slot, deadline_s, defences, flush, checking=checking)
        self.others.leave(arena_index, self.arenas[arena_index], slot, view.inputs)
        return result

    def _run(
        self, view: View, arena_index: int, slot: int, deadline_s: float, defences: frozenset[str],
        flush: Callable[[], None] | None, *, checking: bool,
    ) -> RepetitionResult:  # fmt: skip
        """Run once on prepared memory and compare everything.

        The worker stands still from before the inputs are written until it is asked to run: flushing the caches takes
        longer than many kernels, and comes last, since it would not remove what is written after it.
        """
        arena = self.arenas[arena_index]
        kind = self.kinds.draw()
        self.freeze(True)
        prepare(arena, slot, view, kind, defences)
        if flush is not None:
            flush()
        self._pause(checking, timed=flush is not None)
        sample, early, tensors, as_promised, control = self._call(arena, arena_index, slot, deadline_s)
        self.ended_s = time.monotonic()
        looks_back = checking or not secrets.randbelow(ASKED_AGAIN)
        reasons = [*self._integrity(arena, slot, view, tensors, defences), *control_reasons(control, defences)]
        if looks_back:
            reasons += self.others.changes(arena_index, slot, defences)
        self.earlier.add(arena_index, arena, slot, tensors, copied=self.role != "reference")
        self.previous = self.earlier.tensors()
        if "verify" not in defences:
            return RepetitionResult(sample=sample, reasons=tuple(reasons))
        found, more = compare(arena, slot, view, kind, early)
        if not as_promised:
            more.insert(0, Reason(code=Code.LATE_WORK, message=NOT_AS_PROMISED))
        if more:
            self.freeze(False)
            more = [*self._late_work(arena_index, slot, bool(tensors), deadline_s), *more]
        elif tensors and "alias_rules" in defences and looks_back:
            reasons += self._overwritten(arena_index, slot, deadline_s)
        return RepetitionResult(sample=sample, checks=tuple(found), reasons=(*reasons, *more), refused=self.refused)

    def _pause(self, checking: bool, timed: bool) -> None:
        """Have a check come as long after the last call as a timed call did, which one is drawn for each check.

        A kernel could else be right where calls follow one another, and careless after the pauses of a timing, in which
        the other side was at work; or the other way round.
        """
        since_s = time.monotonic() - self.ended_s
        if checking and self.pauses:
            time.sleep(max(0.0, secrets.choice(self.pauses) - since_s))
        elif timed and not checking:
            self.pauses.append(since_s)

    def _call(self, arena: OracleArena, arena_index: int, slot: int, deadline_s: float) -> CallOutcome:
        nonce = secrets.randbits(48)
        request = RunKernel(arena=arena_index, slot=slot, nonce=nonce, forget=self.earlier.forget(arena))
        self.previous = self.earlier.tensors()
        flat = {name: flat_bits(tensor) for name, tensor in arena.outputs(slot).items()}
        positions = {name: torch.randint(flat[name].numel(), (EARLY_SAMPLES,)) for name in flat}
        waited = self._waited_ns()
        started = time.perf_counter_ns()
        self._send(request)
        self.freeze(False)
        returned = self._receive(Returned, deadline_s, Code.TIMEOUT_RUN, nonce)
        wall_ns = time.perf_counter_ns() - started
        early = {name: (where, flat[name][where]) for name, where in positions.items()}
        tensors, self.refused = returned.tensors, returned.refused
        if tensors is None:
            tensors, after_ns = self._copied_afterwards(deadline_s, nonce)
            early = {}
            wall_ns += max(0, after_ns - COPIES_ALLOWED * arena.copy_ns)
        # Nothing is said to the oracle after a candidate's answer, so nothing may be done after it either: what every
        # element of the outputs is compared with is what lay there when the last thread stopped.
        wall_ns += self.freeze(True)
        waited = self._waited_ns() - waited
        if not 0 < returned.elapsed_ns <= wall_ns:
            raise WorkerProblem(
                Reason(
                    code=Code.CLOCK,
                    message="the worker reports no time, or more than passed between request and answer",
                    evidence={"elapsed_ns": returned.elapsed_ns, "wall_ns": wall_ns},
                )
            )
        sample = TimedCall(role=self.role, elapsed_ns=returned.elapsed_ns, wall_ns=wall_ns, waited_ns=max(0, waited))
        # A reference is copied after its answer, which so promises nothing.
        as_promised = self.role == "reference" or returned.digest == arena.output_digest(slot, nonce)
        control = returned.changed_settings & ~self.changed
        self.changed |= control
        return CallOutcome(sample, early, tensors, as_promised, 0 if self.role == "reference" else control)

    def _copied_afterwards(self, deadline_s: float, nonce: int) -> tuple[tuple[ReturnedTensor, ...], int]:
        """What a reference returned, which is copied after its call, and for how long that was waited, in ns."""
        if self.role != "reference":
            message = "the worker says that it has yet to copy the outputs, which is a part of its call"
            raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=message))
        looked = time.perf_counter_ns()
        done: OutputsReady = self._receive(OutputsReady, deadline_s, Code.TIMEOUT_RUN, nonce)
        return done.tensors, time.perf_counter_ns() - looked

    def _overwritten(self, arena_index: int, slot: int, deadline_s: float) -> list[Reason]:
        """Have an earlier result copied once more: where it has changed, its buffer was used again.

        Where a result lay is the worker's word; what it holds is seen.
        """
        arena, back = self.arenas[arena_index], self.earlier.any_of(arena_index)
        if back is None or arena.arena.slots[slot].inout:
            return []
        nonce = secrets.randbits(48)
        self.freeze(False)
        self._send(Again(arena=arena_index, slot=slot, nonce=nonce, back=back))
        self._receive(OutputsReady, deadline_s, Code.TIMEOUT_RUN, nonce)
        changed = self.earlier.differing(back, arena.outputs(slot))
        if not changed:
            return []
        message = f"output {', '.join(changed)} of an earlier call, which the caller may still use, has changed since"
        return [Reason(code=Code.ALIASED_OUTPUT, message=message)]

    def _waited_ns(self) -> int:
        """For how long this process and the worker's have been ready to run so far, and had no processor."""
        return waited_ns(os.getpid()) + (waited_ns(self.pid) if self.pid is not None else 0)

    def _late_work(self, arena_index: int, slot: int, returned: bool, deadline_s: float) -> list[Reason]:
        """Give a wrong output time to change: if it does, somebody is still writing."""
        outputs = self.arenas[arena_index].outputs(slot)
        before = {name: tensor.clone() for name, tensor in outputs.items()}
        ends = time.monotonic() + SETTLE_MOST_S
        time.sleep(SETTLE_S)
        while self.pid is not None and "R" in thread_states(self.pid) and time.monotonic() < ends:
            time.sleep(SETTLE_S)
        if returned:
            nonce = secrets.randbits(48)
            self._send(Again(arena=arena_index, slot=slot, nonce=nonce))
            self._receive(OutputsReady, deadline_s, Code.TIMEOUT_RUN, nonce)
        changed = [name for name, tensor in outputs.items() if not same_bits(before[name], tensor)]
        if not changed:
            return []
        message = f"output {', '.join(changed)} still changed after the call had returned"
        return [Reason(code=Code.LATE_WORK, message=message)]

    def _send(self, message: Map | RunKernel | MakeEvents | RunBlock | Again, fds: list[int] | None = None) -> None:
        try:
            self.channel.send(message, fds)
        except ChannelClosed as error:
            raise WorkerProblem(gone=True) from error

    def _receive(self, kind: type, deadline_s: float, timeout_code: Code, nonce: int | None = None):  # type: ignore[no-untyped-def]  # returns `kind`
        """The next message, which must be of `kind` and carry `nonce`."""
        try:
            message: FromWorker = self.channel.receive(FromWorker, timeout_s=deadline_s)
        except TimeoutError as error:
            what = "load" if timeout_code is Code.TIMEOUT_LOAD else "finish one call"
            raise WorkerProblem(
                Reason(code=timeout_code, message=f"the kernel did not {what} within {deadline_s:g} s")
            ) from error
        except (ChannelClosed, ConnectionError) as error:
            raise WorkerProblem(gone=True) from error
        except BadFrame as error:
            raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=f"not an answer of ours: {error}")) from error
        if isinstance(message, LoadFailed | KernelFailed):
            if message.code not in WORKER_CODES:
                forged = f"the worker claims {message.code}, which is not for it to say"
                raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=forged))
            raise WorkerProblem(Reason(code=message.code, message=message.message))
        if not isinstance(message, kind) or (nonce is not None and getattr(message, "nonce", None) != nonce):
            raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=f"an unexpected {type(message).__name__} came"))
        return message

    def _integrity(
        self, arena: OracleArena, slot: int, view: View, tensors: tuple[ReturnedTensor, ...], defences: frozenset[str]
    ) -> list[Reason]:
        reasons = []
        if "guard_bands" in defences and (names := arena.broken_guards(slot)):
            arena.paint_guards()
            reasons.append(Reason(code=Code.OUT_OF_BOUNDS, message=f"memory beside {', '.join(names)} was overwritten"))
        if "input_integrity" in defences:
            overwritten = {item.spec.name for item in arena.arena.slots[slot].inout}
            changed = [
                name
                for name, tensor in arena.inputs(slot).items()
                if name not in overwritten and not same_bits(tensor, view.inputs[name])
            ]
            if changed:
                reasons.append(
                    Reason(code=Code.INPUT_MUTATED, message=f"the kernel changed its input {', '.join(changed)}")
                )
        if tensors and "alias_rules" in defences and (reason := self._aliases(arena, tensors)):
            reasons.append(reason)
        return reasons

    def _aliases(self, arena: OracleArena, tensors: tuple[ReturnedTensor, ...]) -> Reason | None:
        """Whether returned tensors overlap the arena, one another, or what the last calls returned."""
        whole = ReturnedTensor(address=arena.worker_address, num_bytes=arena.arena.num_bytes, strides=())
        for index, tensor in enumerate(tensors):
            for other, what in (
                (whole, "an input"),
                *((item, "another output") for item in tensors[:index]),
                *((item, "the output of an earlier call, which the caller may still use") for item in self.previous),
            ):
                if (
                    tensor.address < other.address + other.num_bytes
                    and other.address < tensor.address + tensor.num_bytes
                ):
                    return Reason(code=Code.ALIASED_OUTPUT, message=f"a returned output shares memory with {what}")
        return None


def control_reasons(changed: int, defences: frozenset[str]) -> list[Reason]:
    """A reason where calls have left their thread, which is their caller's, to compute in another way."""
    names = [name for i, name in enumerate(CALLERS_SETTINGS) if changed >> i & 1]
    if not names or "input_integrity" not in defences:
        return []
    how = "loaded or called, the kernel left its caller with another setting for"
    message = f"when {how} {', '.join(names)}; restore it"
    return [Reason(code=Code.TAMPERING, message=message)]
