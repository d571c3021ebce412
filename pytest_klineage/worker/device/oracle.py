"""The oracle's work on a GPU: which inputs go into a block, when the same ones meet both sides, what a sample is."""

from __future__ import annotations

import itertools

import msgspec
import torch

from pytest_klineage.records import Code, Reason
from pytest_klineage.records.messages import (
    Checked,
    CheckRequest,
    Profiled,
    ProfileRequest,
    Timed,
    TimedCall,
    TimeRequest,
)
from pytest_klineage.worker.comparison import View
from pytest_klineage.worker.device.calls import DeviceClock
from pytest_klineage.worker.device.rounds import BlockOutcome, CallBlock, DeviceWorkerHandle, Flush
from pytest_klineage.worker.problems import Plain, Problem, ProblemSet, TransformedProblem
from pytest_klineage.worker.rounds import WorkerProblem
from pytest_klineage.worker.turns import Turns

FLUSH_TRIES = 12
SETTLE_CALLS = 40
"""Empty calls from which the oracle learns how long an idle device takes to find itself idle."""


def is_late(reasons: tuple[Reason, ...]) -> bool:
    """Whether late work is all that was found."""
    return bool(reasons) and all(reason.code is Code.LATE_WORK for reason in reasons)


def settle_time_ns(*, head_start: bool = True) -> int:
    """Median time between the end of an empty call and the moment when the device has nothing left to do.

    Without a head start the device waits for the host in between, as it does after a call that waits for the device.
    """
    clock = DeviceClock(0)
    moments = clock.moments(SETTLE_CALLS)
    if head_start:
        clock.head_start(SETTLE_CALLS)
    for events in moments:
        clock.run(events, lambda: None)
    clock.wait()
    times = sorted(clock.between_ns(events.stop, events.settled) for events in moments)
    torch.cuda.set_stream(torch.cuda.default_stream())
    return times[len(times) // 2]


def flush_time_ns(num_bytes: int) -> int:
    """Shortest time in which the device writes so many bytes: another gate may be at work during some of the tries."""
    if not num_bytes:
        return 0
    clock = DeviceClock(num_bytes)
    moments = clock.moments(FLUSH_TRIES)
    clock.head_start(FLUSH_TRIES)
    for events in moments:
        clock.run(events, lambda: None, None, num_bytes)
    clock.wait()
    # From where one empty call has settled to where the next one starts there is a flush and nothing else.
    times = [clock.between_ns(first.settled, second.start) for first, second in itertools.pairwise(moments)]
    torch.cuda.set_stream(torch.cuda.default_stream())
    return min(times)


class Blocks:
    """Blocks of calls for one oracle's workers."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        # The least of three: another gate may have been at work on the GPU during one of them.
        self.settle_ns = min(settle_time_ns() for _ in range(3))
        self.host_bound_ns = sorted(settle_time_ns(head_start=False) for _ in range(3))[1]
        self._flushes: dict[int, Flush] = {}

    def flush(self, num_bytes: int) -> Flush:
        """A flush of so many bytes, with the time that it takes here."""
        if num_bytes not in self._flushes:
            self._flushes[num_bytes] = Flush(bytes=num_bytes, ns=flush_time_ns(num_bytes))
            torch.cuda.empty_cache()
        return self._flushes[num_bytes]

    def check(self, request: CheckRequest, problem: Problem, arena: int) -> Checked:
        """One planned check as a block of a single call."""
        turns = self.turns
        handle = self._turn(request.role)
        slot = turns.schedule.random.randrange(handle.arenas[arena].num_slots)
        block = CallBlock(views=[Plain(problem)], calls=1, arena=arena, first_slot=slot, alone=False)
        outcome = handle.run_block(block, request.deadline_s, request.defences | {"verify"})
        shape = problem.case.shape if problem.case.shape != turns.problem_set().case.shape else {}
        checks = tuple(msgspec.structs.replace(check, shape=shape) for check in outcome.checks)
        return Checked(checks=checks, reasons=outcome.reasons)

    def time(self, request: TimeRequest) -> Timed:
        """Blocks for all roles; those of new processes once more where the device went on working after a call.

        A process that is being ended leaves work on the device. Later nothing is run again: a kernel could be late on
        purpose wherever it does not like its inputs. What is late once is added to the call's time, and counts.
        """
        handles = [self.turns.handles[role] for role in dict.fromkeys(request.order)]
        new = [handle for handle in handles if isinstance(handle, DeviceWorkerHandle) and handle.is_new]
        try:
            timed = self._timed(request)
        except WorkerProblem as problem:
            if not new or not is_late(problem.reasons):
                raise
            timed = self._timed(request)
        else:
            if new and is_late(timed.reasons):
                timed = self._timed(request)
        for handle in new:
            handle.is_new = False
        return timed

    def _timed(self, request: TimeRequest) -> Timed:
        """Blocks for all roles; the two sides of a pair get the same inputs, and no side the same twice."""
        samples: list[TimedCall] = []
        queued, per_sample = request.mode == "queued", 1
        for _ in range(1 if queued else request.reps):
            seen: set[str] = set()
            views: list[View] = []
            novel = False
            for role in request.order:
                if not views or role in seen:
                    views, novel = self._views(request, role)
                    views = views[: request.reps] if queued else views
                    seen.clear()
                seen.add(role)
                calls = request.reps if queued else len(views)
                outcome = self._run(role, request, CallBlock(views=views, calls=calls, graph=request.mode == "graph"))
                found = outcome.calls if queued else (outcome.whole,)
                per_sample = 1 if queued else calls
                samples += [msgspec.structs.replace(sample, novel=novel) for sample in found]
                if outcome.reasons:
                    return Timed(samples=tuple(samples), reasons=outcome.reasons)
        return Timed(samples=tuple(samples), calls_per_sample=per_sample, one_block=queued)

    def profile(self, request: ProfileRequest) -> Profiled:
        """One more block, like a timed one, with the names of what the device executes."""
        views, _novel = self._views(request, request.role)
        block = CallBlock(views=views, calls=len(views), profile=True)
        outcome = self._run(request.role, request, block)
        return Profiled(
            kernels=outcome.kernels, calls=block.calls, busy_ns=outcome.busy_ns, claimed_ns=outcome.claimed_ns,
            reasons=outcome.reasons,
        )  # fmt: skip

    def _run(self, role: str, request: TimeRequest | ProfileRequest, block: CallBlock) -> BlockOutcome:
        outcome = self._turn(role).run_block(block, request.deadline_s, request.defences)
        if outcome.reasons and role == "reference":
            raise WorkerProblem(*outcome.reasons)
        return outcome

    def _turn(self, role: str) -> DeviceWorkerHandle:
        self.turns.current = role
        self.turns.give_turn(role)
        handle = self.turns.handles[role]
        if not isinstance(handle, DeviceWorkerHandle):
            raise TypeError(f"the {role} does not run on a GPU")
        return handle

    def _views(self, request: TimeRequest | ProfileRequest, role: str) -> tuple[list[View], bool]:
        """Inputs for every slot: symmetry transforms of known problems, or, in some blocks, of one that no kernel has
        met."""
        turns = self.turns
        problems: ProblemSet = turns.problem_set()
        count = self._turn(role).arenas[0].num_slots
        if "fresh_inputs" not in request.defences:
            return [Plain(problems.timed[0])] * count, False
        if not problems.has_symmetry:
            return [Plain(problems.novel()) for _ in range(count)], True
        if turns.schedule.novel_is_due():
            problem = problems.novel()
            return [
                TransformedProblem(problem, f"{turns.schedule.random.getrandbits(128):x}") for _ in range(count)
            ], True
        return [turns.schedule.next(problems, fresh=True)[0] for _ in range(count)], False
