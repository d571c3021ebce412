"""The oracle: the trusted process that makes inputs, knows the answers, holds the second clock and compares.

Expected values never leave it. It serves one judge, drives the workers' calls itself so that no third process stands
between request and clock, and keeps the problems of the last cases because candidates come in series.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from pytest_klineage.channel import Channel
from pytest_klineage.errors import KlineageError
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.resolve import adopt
from pytest_klineage.records import Check, Code, Reason, Signature, is_at_the_edge
from pytest_klineage.records.messages import (
    CANDIDATE_FRAME_BYTES,
    Attach,
    Attached,
    Checked,
    CheckRequest,
    Detach,
    OpenCase,
    Opened,
    OracleFault,
    Profiled,
    ProfileRequest,
    Sample,
    Shutdown,
    Timed,
    TimeRequest,
    ToOracle,
)
from pytest_klineage.records.messages import (
    Problem as ProblemMessage,
)
from pytest_klineage.worker.host.arena import OracleArena, SharedArena
from pytest_klineage.worker.problems import Disguised, Plain, ProblemSet
from pytest_klineage.worker.rounds import Player, View, WorkerProblem

if TYPE_CHECKING:
    from pytest_klineage.worker.device.oracle import Blocks

KEPT_CASES = 4
NOVEL_EVERY, NOVEL_EVERY_AT_FIRST, FIRST_NOVEL = 4, 2, 12
"""One of so many pairs gets inputs that were made for it alone: who answers from memory is slower there. More of the
first ones do, until there were so many, warm-up included: eight must be left for a short timing."""
TWIN_SHARE = 0.125
"""Share of timed repetitions whose inputs differ from the previous ones in a single element."""

Request: TypeAlias = OpenCase | Attach | Detach | CheckRequest | TimeRequest | ProfileRequest | Shutdown


class Oracle:
    """Serves the judge's requests, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.cases: OrderedDict[bytes, ProblemSet] = OrderedDict()
        self.problems: ProblemSet | None = None
        self.players: dict[str, Player] = {}
        self.turn = "candidate"
        self.threads = 1
        self.schedule = Schedule()
        self.flush_buffer = torch.empty(0)
        self.flush_bytes = 0
        self.blocks: Blocks | None = None
        """Set when the tensors lie on a GPU."""

    def serve(self) -> None:
        """Answer until told to shut down or until the judge is gone."""
        handlers = {
            OpenCase: self.open_case, Attach: self.attach, Detach: self.detach,
            CheckRequest: self.check, TimeRequest: self.time, ProfileRequest: self.profile,
        }  # fmt: skip
        while True:
            request: Request = self.channel.receive(ToOracle, timeout_s=None)
            if isinstance(request, Shutdown):
                return
            try:
                answer = handlers[type(request)](request)  # type: ignore[operator]  # keyed by the request's type
            except WorkerProblem as problem:
                role = problem.role or getattr(request, "role", self.turn)
                answer = ProblemMessage(role=role, reasons=tuple(problem.reasons), gone=problem.gone)
            except (KlineageError, RuntimeError, ValueError, MemoryError) as error:
                answer = OracleFault(kind=type(error).__name__, message=str(error)[:2000])
            self.channel.send(answer)

    def open_case(self, request: OpenCase) -> Opened:
        """Make the case's problems, or take them from an earlier judgement of the same case."""
        adopt(request.case, request.definition)
        key = request_key(request)
        if request.device == "cuda" and self.blocks is None:
            self.blocks = start_on_gpu(self)
        if key not in self.cases:
            while len(self.cases) >= KEPT_CASES:
                self.cases.popitem(last=False)
            torch.set_num_threads(request.threads)
            self.cases[key] = self.make_problems(request)
            self.threads = request.threads
            # Between two timed calls one thread is enough: a pool that wakes and sleeps would disturb what comes next.
            torch.set_num_threads(1)
        self.cases.move_to_end(key)
        self.problems = self.cases[key]
        self.schedule.begin()
        self.flush_bytes = request.flush_bytes
        if self.blocks is None and self.flush_buffer.numel() * 4 != request.flush_bytes:
            self.flush_buffer = torch.zeros(request.flush_bytes // 4)
        case, chosen = request.case, operator_of(request.case)
        return Opened(
            checks=self.problems.planned(),
            findings=tuple(self.problems.findings),
            flops=chosen.flops(case),
            min_bytes=chosen.min_bytes(case),
            seconds=self.problems.seconds,
            settings={"oracle_torch": str(torch.__version__)},
            notes=tuple(self.problems.notes),
        )

    def make_problems(self, request: OpenCase) -> ProblemSet:
        """The problems of a case; those of other cases make room where memory is short."""
        try:
            return ProblemSet(request)
        except (MemoryError, torch.OutOfMemoryError):
            if not self.cases:
                raise
        # Outside of the clause: its traceback would keep what the failed attempt had made.
        self.problems = None
        self.cases.clear()
        torch.cuda.empty_cache()
        return ProblemSet(request)

    def attach(self, request: Attach) -> Attached:
        """Take over a worker's channel and share memory with it."""
        channel = Channel.from_fd(self.channel.take_fd(), max_frame_bytes=CANDIDATE_FRAME_BYTES)
        self.detach(Detach(role=request.role))
        case = self.problem_set().case
        signatures = [operator_of(case).signature(case.at_shape(shape)) for shape in (case.shape, *case.also_shapes)]
        player, arenas = self.make_player(request.role, channel, signatures)
        self.players[request.role] = player
        return player.attach(arenas, request.deadline_s)

    def make_player(
        self, role: str, channel: Channel, signatures: list[Signature]
    ) -> tuple[Player, Sequence[OracleArena]]:
        """A player for a worker, and an arena for each shape, in the memory where the kernel works."""
        if self.blocks is None:
            return Player(role, channel), [SharedArena(signature) for signature in signatures]
        from pytest_klineage.worker.device.arena import LEAST_SLOTS, DeviceArena
        from pytest_klineage.worker.device.rounds import DevicePlayer

        player = DevicePlayer(role, channel, self.blocks.settle_ns, self.blocks.host_bound_ns)
        player.flush = self.blocks.flush(self.flush_bytes)
        # What torch keeps for later is missing for the driver's own allocations, and for the workers'.
        torch.cuda.empty_cache()
        own, *also = signatures
        return player, [DeviceArena(own), *(DeviceArena(signature, most=LEAST_SLOTS) for signature in also)]

    def detach(self, request: Detach) -> Attached:
        """Let go of a worker."""
        player = self.players.pop(request.role, None)
        if player is not None:
            player.close()
        return Attached()

    def check(self, request: CheckRequest) -> Checked:
        """One planned check: the problem as it is, run like a timed call."""
        problems = self.problem_set()
        problem = problems.checks[request.index]
        arena = 0
        if problem.case.shape != problems.case.shape:
            arena = 1 + [dict(shape) for shape in problems.case.also_shapes].index(problem.case.shape)
        if self.blocks is not None:
            return self.blocks.check(request, arena)
        self.freeze_others(request.role)
        slot = self.schedule.slot(fresh=True)
        outcome = self.players[request.role].run(
            Plain(problem), arena, slot, request.deadline_s, request.defences | {"verify"}, self.flush
        )
        shape = problem.case.shape if arena else {}
        checks = tuple(
            Check(regime=c.regime, output=c.output, error=c.error, bound=c.bound, passed=c.passed, shape=shape)
            for c in outcome.checks
        )
        return Checked(checks=checks, reasons=outcome.reasons)

    def time(self, request: TimeRequest) -> Timed:
        """Repetitions for all roles on the same, always new, inputs."""
        if self.blocks is not None:
            timed = self.blocks.time(request)
            return msgspec.structs.replace(timed, reasons=tuple(as_timed(reason) for reason in timed.reasons))
        if request.mode == "graph":
            raise ValueError("CUDA graphs need a GPU")
        problems = self.problem_set()
        fresh = "fresh_inputs" in request.defences
        samples: list[Sample] = []
        for _ in range(request.reps):
            view, slot = self.next_view(problems, fresh=fresh)
            seen: set[str] = set()
            for role in request.order:
                if role in seen:
                    # Nobody gets the same inputs twice; the two sides of a pair get the same.
                    view, slot = self.next_view(problems, fresh=fresh)
                    seen.clear()
                seen.add(role)
                self.freeze_others(role)
                self.turn = role
                # The reference goes through the same motions: what follows a call must not depend on whose call it was.
                outcome = self.players[role].run(
                    view, 0, slot, request.deadline_s, request.defences, self.flush if request.flush else None
                )
                novel = isinstance(view, Plain) and fresh
                samples.append(msgspec.structs.replace(outcome.sample, novel=novel))
                if outcome.reasons and role == "reference":
                    raise WorkerProblem(*outcome.reasons)
                if outcome.reasons:
                    return Timed(samples=tuple(samples), reasons=tuple(as_timed(r) for r in outcome.reasons))
        return Timed(samples=tuple(samples))

    def profile(self, request: ProfileRequest) -> Profiled:
        """What the device executes in one more block. Raises ValueError on a CPU."""
        if self.blocks is None:
            raise ValueError("only a GPU names the kernels that it executes")
        found = self.blocks.profile(request)
        return msgspec.structs.replace(found, reasons=tuple(as_timed(reason) for reason in found.reasons))

    def give_turn(self, role: str) -> None:
        """Let one worker run and freeze all others."""
        self.freeze_others(role)
        self.players[role].freeze(False)

    def freeze_others(self, role: str) -> None:
        """Freeze every worker but one. Raises WorkerProblem when one that was frozen has gone on by itself."""
        for name, player in self.players.items():
            if name != role:
                player.freeze(True)
                player.hold_still()

    def next_view(self, problems: ProblemSet, *, fresh: bool) -> tuple[View, int]:
        """Inputs for the next pair and the slot they go to."""
        due = not problems.has_symmetry or (problems.novel_is_cheap and self.schedule.novel_is_due())
        if not (fresh and due):
            return self.schedule.next(problems, fresh=fresh)
        torch.set_num_threads(self.threads)
        view = Plain(problems.novel())
        torch.set_num_threads(1)
        return view, self.schedule.slot(fresh=True)

    def flush(self) -> None:
        """Write more than the last-level cache holds, so that every call starts from memory."""
        if self.flush_buffer.numel():
            self.flush_buffer.add_(1.0)

    def problem_set(self) -> ProblemSet:
        """The problems of the open case. Raises ValueError before one is open."""
        if self.problems is None:
            raise ValueError("no case is open")
        return self.problems


def start_on_gpu(oracle: Oracle) -> Blocks:
    """Make the GPU this oracle's place of work."""
    from pytest_klineage.worker.device import memory
    from pytest_klineage.worker.device.oracle import Blocks

    memory.initialise()
    return Blocks(oracle)


class Schedule:
    """Which problem, disguise and slot comes next. Drawn from the system's randomness: nobody can foresee it."""

    def __init__(self) -> None:
        self.random = random.SystemRandom()
        self.last_slot = 0
        self.twin_key: str | None = None
        self.until_novel = self.novel_drawn = 0
        self.begin()

    def begin(self) -> None:
        """Another judgement: its new problems begin to be counted."""
        self.until_novel, self.novel_drawn = self.random.randrange(NOVEL_EVERY_AT_FIRST), 0

    def novel_is_due(self) -> bool:
        """True once in every few calls, at a place that nobody can foresee."""
        if self.twin_key is not None:
            return False
        self.until_novel -= 1
        if self.until_novel >= 0:
            return False
        self.novel_drawn += 1
        every = NOVEL_EVERY_AT_FIRST if self.novel_drawn < FIRST_NOVEL else NOVEL_EVERY
        self.until_novel = every - 1 + self.random.randrange(-1, 2)
        return True

    def slot(self, *, fresh: bool) -> int:
        """A slot: sometimes the same address with new content, sometimes a new address."""
        self.last_slot = self.random.randrange(2) if fresh else 0
        return self.last_slot

    def next(self, problems: ProblemSet, *, fresh: bool) -> tuple[View, int]:
        """The next repetition's inputs and where they lie."""
        if not fresh:
            return Plain(problems.timed[0]), self.slot(fresh=False)
        if self.twin_key is not None:
            key, self.twin_key = self.twin_key, None
            return Disguised(problems.twin, key), self.last_slot
        key = f"{self.random.getrandbits(128):x}"
        index = self.random.randrange(len(problems.timed))
        if self.random.random() < TWIN_SHARE:
            index, self.twin_key = 0, key
        return Disguised(problems.timed[index], key), self.slot(fresh=True)


def as_timed(reason: Reason) -> Reason:
    """A finding of a timed call. What was right in the checks and is wrong when timed was not computed.

    Unless it errs by hardly more than it may: a kernel whose rounding comes near the limit passes with some inputs and
    not with others, and is no cheat.
    """
    if reason.code is Code.MISMATCH and is_at_the_edge(reason):
        message = f"within the tolerance when checked, just outside of it when timed on new inputs: {reason.message}"
        return Reason(code=Code.MISMATCH, message=message, evidence=reason.evidence)
    if reason.code in (Code.MISMATCH, Code.UNWRITTEN, Code.NON_FINITE):
        message = f"right when checked, wrong when timed on inputs of the same kind: {reason.message}"
        return Reason(code=Code.REPLAY, message=message, evidence=reason.evidence)
    return reason


def request_key(request: OpenCase) -> bytes:
    """Identity of a case's problems."""
    return msgspec.json.encode((request.case.operator, request.case.shape, request.case.dtype, request.case.options,
                                request.case.also_shapes, request.case.definition, request.secret, request.seeds,
                                request.device))  # fmt: skip
