"""One repetition of one worker as the oracle sees it: prepare memory, run, take two clocks, compare."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from pytest_klineage.channel import BadFrame, Channel, ChannelClosed
from pytest_klineage.records import Check, Code, Reason
from pytest_klineage.records.messages import (
    Again,
    Attached,
    Done,
    Failed,
    FromWorker,
    Loaded,
    LoadFailed,
    MakeEvents,
    Map,
    Mapped,
    Returned,
    ReturnedTensor,
    Run,
    RunBlock,
    Sample,
    Stop,
)
from pytest_klineage.worker.host.arena import OracleArena, as_integers, is_poison, poison
from pytest_klineage.worker.host.scheduling import waited_ns
from pytest_klineage.worker.problems import Disguised, Plain
from pytest_klineage.worker.stopping import Stopper

if TYPE_CHECKING:
    from pytest_klineage.operators.base import Tensors

EARLY_SAMPLES = 256
"""Elements of every output that are read the moment the call returns."""
COPIES_ALLOWED = 4
"""How many copies of a reference's outputs may pass, in time, between its return and its result: cold pages, two hops.
A candidate's are copied before it has returned."""
SETTLE_S = 0.05
"""How long a wrong output is given to change: if it does, work went on after the call had returned."""

LARGEST = sys.float_info.max
"""Stands for an infinite error in records: JSON has no infinity."""
WORKER_CODES = frozenset({
    Code.ENTRY_MISSING, Code.EXCEPTION, Code.RETURNED_ERROR, Code.OUT_OF_MEMORY, Code.OUTPUT_COUNT, Code.OUTPUT_SHAPE,
    Code.OUTPUT_DTYPE, Code.OUTPUT_STRIDES, Code.FAKE_TENSOR, Code.CUDA_ERROR, Code.NOT_CAPTURABLE,
})  # fmt: skip
"""What a worker may say about itself. It shares a process with the candidate, which could claim to be accepted."""

View: TypeAlias = Disguised | Plain


class WorkerProblem(Exception):
    """A worker failed; the reasons say how. Caught by the oracle and sent to the judge."""

    def __init__(self, *reasons: Reason, gone: bool = False, role: str = "") -> None:
        super().__init__(reasons[0].message if reasons else "the worker is gone")
        self.reasons, self.gone = reasons, gone
        self.role = role
        """Whose problem it is, where that is not who was at work."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one repetition gave."""

    sample: Sample
    checks: tuple[Check, ...] = ()
    reasons: tuple[Reason, ...] = ()


class Player:
    """A worker and the arenas it shares with the oracle."""

    def __init__(self, role: str, channel: Channel) -> None:
        self.role, self.channel = role, channel
        self.arenas: Sequence[OracleArena] = ()
        self.previous: list[ReturnedTensor] = []
        self.pid: int | None = None
        self.stopper: Stopper | None = None

    def attach(self, arenas: Sequence[OracleArena], deadline_s: float) -> Attached:
        """Wait until the worker has loaded its kernel, then share the arenas with it."""
        self.arenas = arenas
        answer = self._receive(Loaded, deadline_s, Code.TIMEOUT_LOAD)
        self.channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for arena in arenas:
            self._send(Map(arena=arena.arena), [arena.fd])
            self._recognise(deadline_s)
            arena.worker_address = self._receive(Mapped, deadline_s, Code.TIMEOUT_LOAD).address
        return Attached(containment=answer.containment, settings=answer.settings)

    def _recognise(self, deadline_s: float) -> None:
        """Take hold of the process that answers: the system itself writes the sender's id beside the message."""
        if self.stopper is not None:
            return
        self.channel.sock.settimeout(deadline_s)
        size = struct.calcsize("3i")
        with contextlib.suppress(OSError):
            _data, beside, _flags, _address = self.channel.sock.recvmsg(1, socket.CMSG_SPACE(size), socket.MSG_PEEK)
            for level, kind, credentials in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self.pid = struct.unpack("3i", credentials[:size])[0]
                    self.stopper = Stopper(self.pid)

    def freeze(self, frozen: bool) -> None:
        """Stop the worker's process with all its threads, or let it go on.

        Threads that work, or spin, while the other side is at work would make that slower.
        """
        if self.stopper is None or frozen == self.stopper.stopped:
            return
        if frozen:
            self.stopper.stop()
        else:
            self.hold_still()
            self.stopper.go_on()

    def hold_still(self) -> None:
        """Raise WorkerProblem when a process that was stopped has gone on by itself."""
        if self.stopper is None or not (how := self.stopper.broke_out()):
            return
        message = f"the kernel's process undid its stop, with which the other side has the machine to itself: {how}"
        raise WorkerProblem(Reason(code=Code.TAMPERING, message=message), role=self.role)

    def close(self) -> None:
        """Tell the worker to stop and let go of it."""
        if self.stopper is not None:
            self.stopper.close()
            self.stopper = None
        with contextlib.suppress(ChannelClosed):
            self.channel.send(Stop())
        self.channel.close()
        for arena in self.arenas:
            arena.close()

    def run(
        self, view: View, arena_index: int, slot: int, deadline_s: float, defences: frozenset[str],
        flush: Callable[[], None] | None = None,
    ) -> Outcome:  # fmt: skip
        """Run once on prepared memory and compare everything.

        The worker stands still from before the inputs are written until it is asked to run: flushing the caches takes
        longer than many kernels, and comes last, since it would not remove what is written after it.
        """
        arena = self.arenas[arena_index]
        kind = secrets.randbelow(2)
        self.freeze(True)
        prepare(arena, slot, view, kind, defences)
        if flush is not None:
            flush()
        sample, early, tensors = self._call(arena, arena_index, slot, deadline_s)
        reasons = list(self._integrity(arena, slot, view, tensors, defences))
        if "verify" not in defences:
            return Outcome(sample=sample, reasons=tuple(reasons))
        found, more = compare(arena, slot, view, kind, early)
        if more:
            more = [*self._late_work(arena_index, slot, bool(tensors), deadline_s), *more]
        return Outcome(sample=sample, checks=tuple(found), reasons=(*reasons, *more))

    def _call(
        self, arena: OracleArena, arena_index: int, slot: int, deadline_s: float
    ) -> tuple[Sample, dict[str, tuple[torch.Tensor, torch.Tensor]], tuple[ReturnedTensor, ...]]:
        nonce = secrets.randbits(48)
        request = Run(arena=arena_index, slot=slot, nonce=nonce)
        flat = {name: flat_bits(tensor) for name, tensor in arena.outputs(slot).items()}
        positions = {name: torch.randint(flat[name].numel(), (EARLY_SAMPLES,)) for name in flat}
        waited = self._waited_ns()
        started = time.perf_counter_ns()
        self._send(request)
        self.freeze(False)
        returned = self._receive(Returned, deadline_s, Code.TIMEOUT_RUN, nonce)
        wall_ns = time.perf_counter_ns() - started
        waited = self._waited_ns() - waited
        early = {name: (where, flat[name][where]) for name, where in positions.items()}
        looked = time.perf_counter_ns()
        done = self._receive(Done, deadline_s, Code.TIMEOUT_RUN, nonce)
        if done.tensors:
            # What a reference returns is copied after its call. What a candidate returns is there by now, and whatever
            # it still does belongs to the call: it may have been announced before the work was done.
            copies = COPIES_ALLOWED if self.role == "reference" else 0
            early = {} if copies else early
            wall_ns += max(0, time.perf_counter_ns() - looked - copies * arena.copy_ns)
        if not 0 < returned.elapsed_ns <= wall_ns:
            raise WorkerProblem(
                Reason(
                    code=Code.CLOCK,
                    message="the worker reports no time, or more than passed between request and answer",
                    evidence={"elapsed_ns": returned.elapsed_ns, "wall_ns": wall_ns},
                )
            )
        sample = Sample(role=self.role, elapsed_ns=returned.elapsed_ns, wall_ns=wall_ns, waited_ns=max(0, waited))
        return sample, early, done.tensors

    def _waited_ns(self) -> int:
        """For how long this process and the worker's have been ready to run so far, and had no processor."""
        return waited_ns(os.getpid()) + (waited_ns(self.pid) if self.pid is not None else 0)

    def _late_work(self, arena_index: int, slot: int, returned: bool, deadline_s: float) -> list[Reason]:
        """Give a wrong output time to change: if it does, somebody is still writing."""
        outputs = self.arenas[arena_index].outputs(slot)
        before = {name: tensor.clone() for name, tensor in outputs.items()}
        time.sleep(SETTLE_S)
        if returned:
            nonce = secrets.randbits(48)
            self._send(Again(arena=arena_index, slot=slot, nonce=nonce))
            self._receive(Done, deadline_s, Code.TIMEOUT_RUN, nonce)
        changed = [name for name, tensor in outputs.items() if not same_bits(before[name], tensor)]
        if not changed:
            return []
        message = f"output {', '.join(changed)} still changed after the call had returned"
        return [Reason(code=Code.LATE_WORK, message=message)]

    def _send(self, message: Map | Run | MakeEvents | RunBlock | Again, fds: list[int] | None = None) -> None:
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
        if isinstance(message, LoadFailed | Failed):
            if message.code not in WORKER_CODES:
                forged = f"the worker claims {message.code}, which is not for it to say"
                raise WorkerProblem(Reason(code=Code.FORGED_REPLY, message=forged))
            raise WorkerProblem(Reason(code=message.code, message=message.message))
        if not isinstance(message, kind) or (nonce is not None and getattr(message, "nonce", None) != nonce):
            raise WorkerProblem(
                Reason(code=Code.FORGED_REPLY, message=f"a {type(message).__name__} came that nobody had asked for")
            )
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
        self.previous = [*self.previous, *tensors][-2 * len(tensors) :] if tensors else []
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


def storage_extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to past its last; arena tensors are dense, so this is their number."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory in order, as integers: few operations know 8-bit floats."""
    return as_integers(tensor.as_strided((storage_extent(tensor),), (1,)))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality, NaN included."""
    if left.element_size() == 1:
        return bool(torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)))
    if torch.equal(left, right):
        return True
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return bool(torch.equal(left.contiguous().view(integer), right.contiguous().view(integer)))


def prepare(arena: OracleArena, slot: int, view: View, kind: int, defences: frozenset[str]) -> None:
    """Poison the outputs and write the inputs; without poison, leave the right answer lying about as a heap would."""
    outputs = arena.outputs(slot)
    for item in arena.arena.slots[slot].outputs:
        if "poison" in defences:
            poison(item.spec, outputs[item.spec.name], kind)
        else:
            outputs[item.spec.name].copy_(view.problem.expected.outputs[item.spec.name])
    # Last, because a thread of the candidate may be waiting for them.
    for name, tensor in arena.inputs(slot).items():
        tensor.copy_(view.inputs[name])


def compare(
    arena: OracleArena, slot: int, view: View, kind: int, early: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[Check], list[Reason]]:
    """Compare a slot's outputs with the oracle's, and with what they were the moment the call had returned."""
    # A private copy: what is compared must not change between two looks at it.
    outputs = {name: tensor.clone() for name, tensor in arena.outputs(slot).items()}
    problem = view.problem
    errors = problem.expected.errors(view.undo(dict(outputs)))
    checks, reasons = [], []
    for item in arena.arena.slots[slot].outputs:
        name, error, bound = item.spec.name, errors[item.spec.name], problem.expected.bounds[item.spec.name]
        passed = error <= bound
        shown, allowed = min(error, LARGEST), min(bound, LARGEST)
        checks.append(Check(regime=problem.regime, output=name, error=shown, bound=allowed, passed=passed))
        if not passed:
            reasons.append(
                explain(item.spec.name, view, outputs, is_poison(item.spec, outputs[name], kind), error, bound)
            )
    for name, (where, seen) in early.items():
        live = arena.outputs(slot)[name]
        settled = flat_bits(live)[where]
        if not same_bits(seen, settled):
            message = f"output {name} still changed after the call had returned"
            reasons.insert(0, Reason(code=Code.LATE_WORK, message=message))
    return checks, reasons


def explain(name: str, view: View, outputs: Tensors, poisoned: torch.Tensor, error: float, bound: float) -> Reason:
    """Why an output is wrong, in one reason."""
    regime = view.problem.regime
    evidence: dict[str, float | int | str | bool] = {"regime": regime, "output": name}
    evidence |= {"error": min(error, LARGEST), "bound": min(bound, LARGEST)}
    if unwritten := int(poisoned.sum()):
        evidence["unwritten_elements"] = unwritten
        message = f"{unwritten} of {poisoned.numel()} elements of {name} were never written ({regime})"
        return Reason(code=Code.UNWRITTEN, message=message, evidence=evidence)
    if outputs[name].is_floating_point() and not bool(outputs[name].isfinite().all()) and error == float("inf"):
        message = f"{name} has NaN or infinities where the oracle has none, or the other way round ({regime})"
        return Reason(code=Code.NON_FINITE, message=message, evidence=evidence)
    message = f"{name} is off by {error:.3g} rounding units, allowed are {bound:.3g} ({regime})"
    return Reason(code=Code.MISMATCH, message=message, evidence=evidence)
