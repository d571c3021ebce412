"""The oracle: the trusted process that makes inputs, knows the answers, holds the second clock and compares.

Expected values never leave it. It serves one judge, drives the workers' calls itself so that no third process stands
between request and clock, and keeps the problems of the last cases because candidates come in series.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from pytest_klineage.channel import Channel
from pytest_klineage.errors import KlineageError
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.resolve import adopt
from pytest_klineage.records import Code, Reason, Signature, is_at_the_edge
from pytest_klineage.records.messages import (
    CANDIDATE_FRAME_BYTES,
    Attach,
    Attached,
    CaseOpened,
    Checked,
    CheckRequest,
    Detach,
    OpenCase,
    OracleFault,
    Profiled,
    ProfileRequest,
    Shutdown,
    Stock,
    Timed,
    TimedCall,
    TimeRequest,
    ToOracle,
)
from pytest_klineage.records.messages import (
    WorkerFailure as ProblemMessage,
)
from pytest_klineage.worker.host.arena import OracleArena, SharedArena
from pytest_klineage.worker.problems import PERTURBED, Plain, ProblemSet
from pytest_klineage.worker.rounds import RepetitionResult, WorkerHandle, WorkerProblem
from pytest_klineage.worker.turns import TimedPair, Turns

if TYPE_CHECKING:
    from pytest_klineage.worker.device.oracle import Blocks

KEPT_CASES = 4
WRONG_VALUES = (Code.MISMATCH, Code.UNWRITTEN, Code.NON_FINITE)
Request: TypeAlias = OpenCase | Attach | Detach | CheckRequest | TimeRequest | ProfileRequest | Stock | Shutdown


class Oracle:
    """Serves the judge's requests, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.cases: OrderedDict[bytes, ProblemSet] = OrderedDict()
        self.turns = Turns()
        self.flush_buffer = torch.empty(0)
        self.flush_bytes = 0
        self.blocks: Blocks | None = None
        """Set when the tensors lie on a GPU."""

    def serve(self) -> None:
        """Answer until asked to shut down or until the judge is gone."""
        handlers = {
            OpenCase: self.open_case, Attach: self.attach, Detach: self.detach,
            CheckRequest: self.check, TimeRequest: self.time, ProfileRequest: self.profile, Stock: self.stock,
        }  # fmt: skip
        while True:
            request: Request = self.channel.receive(ToOracle, timeout_s=None)
            if isinstance(request, Shutdown):
                return
            try:
                answer = handlers[type(request)](request)  # type: ignore[operator]  # keyed by the request's type
            except WorkerProblem as problem:
                role = problem.role or getattr(request, "role", self.turns.current)
                answer = ProblemMessage(role=role, reasons=tuple(problem.reasons), gone=problem.gone)
            except (KlineageError, RuntimeError, ValueError, MemoryError) as error:
                answer = OracleFault(kind=type(error).__name__, message=str(error)[:2000])
            self.channel.send(answer)

    def open_case(self, request: OpenCase) -> CaseOpened:
        """Make the case's problems, or take them from an earlier judgement of the same case."""
        adopt(request.case, request.definition)
        key = request_key(request)
        if request.device == "cuda" and self.blocks is None:
            self.blocks = start_on_gpu(self.turns)
        if key not in self.cases:
            while len(self.cases) >= KEPT_CASES:
                self.cases.popitem(last=False)
            self.turns.threads = request.threads
            with self.turns.all_threads():
                self.cases[key] = self.make_problems(request)
        self.cases.move_to_end(key)
        self.turns.problems = self.cases[key]
        self.turns.schedule.begin()
        self.flush_bytes = request.flush_bytes
        if self.blocks is None and self.flush_buffer.numel() * 4 != request.flush_bytes:
            self.flush_buffer = torch.zeros(request.flush_bytes // 4)
        case, chosen = request.case, operator_of(request.case)
        return CaseOpened(
            checks=self.turns.problems.planned(),
            findings=tuple(self.turns.problems.findings),
            flops=chosen.flops(case),
            min_bytes=chosen.min_bytes(case),
            settings={"oracle_torch": str(torch.__version__)},
            notes=tuple(self.turns.problems.notes),
            mixed=self.turns.problems.has_symmetry
            and (self.turns.problems.novel_is_cheap or bool(self.turns.problems.stock_size)),
            only_moves=self.turns.problems.only_moves,
        )

    def make_problems(self, request: OpenCase) -> ProblemSet:
        """The problems of a case; those of other cases make room where memory is short."""
        try:
            return ProblemSet(request)
        except (MemoryError, torch.OutOfMemoryError):
            if not self.cases:
                raise
        # Outside of the clause: its traceback would keep what the failed attempt had made.
        self.turns.problems = None
        self.cases.clear()
        torch.cuda.empty_cache()
        return ProblemSet(request)

    def attach(self, request: Attach) -> Attached:
        """Take over a worker's channel and share memory with it."""
        channel = Channel.from_fd(self.channel.take_fd(), max_frame_bytes=CANDIDATE_FRAME_BYTES)
        self.detach(Detach(role=request.role))
        signatures = [operator_of(case).signature(case) for case in self.turns.problem_set().layouts()]
        handle, arenas = self.make_handle(request, channel, signatures)
        self.turns.handles[request.role] = handle
        return handle.attach(arenas, request.deadline_s)

    def make_handle(
        self, request: Attach, channel: Channel, signatures: list[Signature]
    ) -> tuple[WorkerHandle, Sequence[OracleArena]]:
        """A player for a worker, and an arena for each shape, in the memory where the kernel works."""
        if self.blocks is None:
            return WorkerHandle(request.role, channel), [
                SharedArena(one, read_only=request.read_only, unreadable=request.unreadable) for one in signatures
            ]
        from pytest_klineage.worker.device.arena import LEAST_SLOTS, DeviceArena
        from pytest_klineage.worker.device.rounds import DeviceWorkerHandle

        handle = DeviceWorkerHandle(request.role, channel, self.blocks.settle_ns, self.blocks.host_bound_ns)
        handle.flush = self.blocks.flush(self.flush_bytes)
        # What torch keeps for later is missing for the driver's own allocations, and for the workers'.
        torch.cuda.empty_cache()
        own, *also = signatures
        return handle, [DeviceArena(own), *(DeviceArena(signature, most=LEAST_SLOTS) for signature in also)]

    def detach(self, request: Detach) -> Attached:
        """Let go of a worker."""
        handle = self.turns.handles.pop(request.role, None)
        if handle is not None:
            handle.close()
        return Attached()

    def check(self, request: CheckRequest) -> Checked:
        """One planned check: the problem as it is, run like a timed call."""
        problems = self.turns.problem_set()
        problem = problems.check(request.index, again=request.again)
        arena = problems.layout_of(problem)
        if self.blocks is not None:
            return self.blocks.check(request, problem, arena)
        self.turns.freeze_others(request.role)
        # A twin comes to the address of what it resembles.
        schedule, is_twin = self.turns.schedule, problem.input_distribution == PERTURBED
        slot = schedule.last_slot if is_twin else schedule.slot(fresh=True)
        outcome = self.turns.handles[request.role].run(
            Plain(problem), arena, slot, request.deadline_s, request.defences | {"verify"}, self.flush,
            checking=True,
        )  # fmt: skip
        shape = problem.case.shape if problem.case.shape != problems.case.shape else {}
        checks = tuple(msgspec.structs.replace(check, shape=shape) for check in outcome.checks)
        return Checked(checks=checks, reasons=outcome.reasons, refused=outcome.refused)

    def time(self, request: TimeRequest) -> Timed:
        """Repetitions for all roles on the same, always new, inputs."""
        if self.blocks is not None:
            timed = self.blocks.time(request)
            return msgspec.structs.replace(timed, reasons=tuple(as_timed(reason) for reason in timed.reasons))
        if request.mode == "graph":
            raise ValueError("CUDA graphs need a GPU")
        samples: list[TimedCall] = []
        pair, seen = self.next_pair(request), set[str]()
        for role in request.order * request.reps:
            if role in seen:
                # No side gets the same inputs twice; the two sides of a pair get the same.
                pair = self.next_pair(request)
                seen.clear()
            seen.add(role)
            outcome = self.timed_call(role, pair, request)
            if pair.check is None:
                novel = pair.novel and "fresh_inputs" in request.defences
                samples.append(msgspec.structs.replace(outcome.sample, novel=novel))
            if outcome.reasons:
                found = as_timed if pair.check is None else as_checked_among
                return Timed(samples=tuple(samples), reasons=tuple(found(reason) for reason in outcome.reasons))
        return Timed(samples=tuple(samples))

    def next_pair(self, request: TimeRequest) -> TimedPair:
        """Inputs for both sides."""
        fresh = "fresh_inputs" in request.defences
        return self.turns.next_pair(
            self.turns.problem_set(), fresh=fresh, timed=request.flush, checks=request.checks and request.flush
        )

    def timed_call(self, role: str, pair: TimedPair, request: TimeRequest) -> RepetitionResult:
        """One side's call. The reference goes through the same motions as the candidate: what follows a call must not
        depend on whose call it was. Raises WorkerProblem where the reference is wrong."""
        began = time.monotonic()
        self.turns.freeze_others(role)
        self.turns.current = role
        flush = self.flush if request.flush else None
        outcome = self.turns.handles[role].run(
            pair.of(role), 0, pair.slot, request.deadline_s, request.defences, flush
        )  # fmt: skip
        self.turns.schedule.spend(time.monotonic() - began, on_check=pair.check is not None)
        if outcome.reasons and role == "reference":
            raise WorkerProblem(*outcome.reasons)
        return outcome

    def stock(self, request: Stock) -> Attached:
        """Make the new problems of the open case that are made before timing."""
        with self.turns.all_threads():
            self.turns.problem_set().make_stock(checks=request.checks)
        return Attached()

    def profile(self, request: ProfileRequest) -> Profiled:
        """What the device executes in one more block. Raises ValueError on a CPU."""
        if self.blocks is None:
            raise ValueError("only a GPU names the kernels that it executes")
        found = self.blocks.profile(request)
        return msgspec.structs.replace(found, reasons=tuple(as_timed(reason) for reason in found.reasons))

    def flush(self) -> None:
        """Write more than the last-level cache holds, so that every call starts from memory."""
        if self.flush_buffer.numel():
            self.flush_buffer.add_(1.0)


def start_on_gpu(turns: Turns) -> Blocks:
    """Make the GPU this oracle's place of work."""
    from pytest_klineage.worker.device import memory
    from pytest_klineage.worker.device.oracle import Blocks

    memory.initialise()
    return Blocks(turns)


def as_timed(reason: Reason) -> Reason:
    """A finding of a timed call. What was right in the checks and is wrong when timed was not computed.

    Unless it errs by hardly more than it may: a kernel whose rounding comes near the limit passes with some inputs and
    not with others, and is no cheat.
    """
    if reason.code is Code.MISMATCH and is_at_the_edge(reason):
        message = f"within the tolerance when checked, just outside of it when timed on new inputs: {reason.message}"
        return Reason(code=Code.MISMATCH, message=message, evidence=reason.evidence)
    if reason.code in WRONG_VALUES:
        message = f"right when checked, wrong when timed on inputs of the same kind: {reason.message}"
        return Reason(code=Code.REPLAY, message=message, evidence=reason.evidence)
    return reason


def as_checked_among(reason: Reason) -> Reason:
    """A finding of a check among timed calls."""
    if reason.code not in WRONG_VALUES:
        return reason
    message = f"right when checked before it was timed, wrong in a check among timed calls: {reason.message}"
    return Reason(code=reason.code, message=message, evidence=reason.evidence)


def request_key(request: OpenCase) -> bytes:
    """Identity of a case's problems."""
    return msgspec.json.encode((request.case.operator, request.case.shape, request.case.dtype, request.case.options,
                                request.case.also_shapes, request.case.definition, request.secret, request.seeds,
                                request.device))  # fmt: skip
