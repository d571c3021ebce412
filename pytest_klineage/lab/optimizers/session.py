"""The one loop of all methods: propose, judge, observe, until a limit. What is proposed is the methods' business."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from pytest_klineage.errors import HarnessError, KlineageError, StoreError, UsageError, Waiting
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.feedback import feedback_text, malformed_text, repeated_text
from pytest_klineage.lab.optimizers.recording import (
    VERDICT_TOPIC,
    Notebook,
    Rejudged,
    VerdictMessage,
    abridged,
    recording_of,
)
from pytest_klineage.lab.optimizers.task import Observation, Proposal, StepProgress, Task
from pytest_klineage.records import Code, Judged, KernelCase, KernelSource, Noted, Status, Stopped, Verdict, to_json

Judge: TypeAlias = Callable[[KernelCase, KernelSource], Verdict]
Screen: TypeAlias = Callable[[KernelCase, KernelSource, float], Verdict]
"""A judge that gets the speedup of the best kernel so far, and stops timing once it is excluded."""
Proposals: TypeAlias = Generator[Proposal, Observation, None]

MALFORMED_TOPIC, STEP_TOPIC = "malformed", "step"


class Method(Protocol):
    """A way to come to kernels. Implement it in one file."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def proposals(self, task: Task, models: Session) -> Proposals:
        """A generator that yields proposals and is sent what the gate said of each. It asks models as it likes.

        The root has been submitted before: `task.submitted`. BudgetExhausted and BackendFailed of a chat are left to
        the loop, which ends the run; so does the generator's return.
        """
        ...


class EndReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    """The method had nothing more to propose."""
    STEP_LIMIT = "step_limit"
    BUDGET = "budget_exhausted"
    TARGET = "target_reached"
    BACKEND = "backend_failed"
    """A model call brought no reply; the trajectory can be resumed."""
    NOT_JUDGED = "not_judged"
    """The gate cannot judge here, or not now. That verdict is not recorded: a resumed run asks for it again, and ends
    there once more while nothing has changed. What only a proposal's own flags need is not meant: the method hears."""
    INTERRUPTED = "interrupted"
    """From the keyboard; only in the trajectory, since the interruption goes on."""
    HARNESS = "harness_failed"
    """A fault that says nothing about a kernel; only in the trajectory, since the error goes on."""
    MISUSE = "misuse"
    """Something that cannot be, such as a resumed run that asks otherwise than it did; the error goes on as well."""


CUT_SHORT = (
    EndReason.BACKEND, EndReason.NOT_JUDGED, EndReason.INTERRUPTED, EndReason.HARNESS, EndReason.MISUSE,
)  # fmt: skip
"""Ends that are none of the run's own: it goes on from there."""


class OptimizationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    best: KernelSource | None
    best_verdict: Verdict | None
    """With samples, unless it was recorded by an earlier run."""
    observations: tuple[Observation, ...]
    """The root's first, if there was one."""
    stopped: str
    """A word of `EndReason`."""
    message: str = ""
    spent_usd: float
    rejudged: tuple[Rejudged, ...] = ()
    """In a replay: what the gate says now of each recorded kernel."""

    @property
    def best_speedup(self) -> float | None:
        """Of the best kernel; None when none was scored."""
        verdict = self.best_verdict
        return verdict.timing.speedup.estimate if verdict is not None and verdict.timing is not None else None


def optimize(
    task: Task,
    method: Method,
    session: Session,
    judge: Judge,
    *,
    max_steps: int,
    on_step: Callable[[StepProgress], None] | None = None,
    target_speedup: float | None = None,
    submit_root: bool = True,
    rejudge: bool = True,
    screen: Screen | None = None,
) -> OptimizationResult:
    """Submit the root, then what the method proposes, and keep the best of what was scored.

    `max_steps` bounds the proposals, malformed ones included; the root is step 0 and free. `target_speedup` ends the
    run when the lower end of the interval of the best one, or of the latest one, reaches it. Without `submit_root` the
    root is not judged, and methods have it to begin with all the same. With the replay backend the method gets the
    recorded verdicts, and with `rejudge` the gate is asked as well: see `OptimizationResult.rejudged`. With `screen` a
    kernel is screened once there is a best one; one that seems better is judged in full, and only that verdict counts
    for it.

    Raises UsageError, TrajectoryMismatch among them, and HarnessError; what was recorded stays, and can be resumed.
    Raises Waiting where a verdict or a reply has not come yet: nothing is recorded of that, and the run goes on from
    there when it is resumed.
    """
    if max_steps < 1:
        raise UsageError(f"max_steps must be 1 or more, got {max_steps}")
    run = _Run(
        task, session, judge, submit_root=submit_root, rejudge=rejudge, target_speedup=target_speedup, screen=screen
    )
    try:
        stopped, message = _drive(run, method, max_steps, on_step)
    except KeyboardInterrupt:
        session.record(
            Stopped(reason=EndReason.INTERRUPTED, message="from the keyboard; resume the trajectory to go on")
        )
        raise
    except Waiting:
        raise  # not an end: the same run goes on when the verdict or the reply is there
    except KlineageError as error:
        reason = EndReason.HARNESS if isinstance(error, HarnessError) else EndReason.MISUSE
        with contextlib.suppress(StoreError):  # a file that cannot be written may be the very reason
            session.record(Stopped(reason=reason, message=str(error).partition("\n")[0]))
        raise
    end = Stopped(reason=stopped, message=message)
    again = stopped in CUT_SHORT and session.events[-1:] == (end,)  # taken up in vain: its end stands there
    if stopped is not EndReason.BUDGET and not again:  # the chat has written that one down itself
        session.record(end)
    return run.outcome(stopped, message)


def _drive(
    run: _Run, method: Method, max_steps: int, on_step: Callable[[StepProgress], None] | None
) -> tuple[EndReason, str]:
    """Run the method to its end. Returns why it ended."""

    def observed(proposal: Proposal) -> Observation:
        seen = run.observe(proposal)
        if on_step is not None:
            budget = run.session.budget
            on_step(
                StepProgress(
                    observation=seen, max_steps=max_steps, spent_usd=budget.spent_usd, limit_usd=budget.limit_usd
                )
            )
        return seen

    try:
        return _stepped(run, method, max_steps, observed)
    except BudgetExhausted as error:
        return EndReason.BUDGET, str(error)
    except BackendFailed as error:
        return EndReason.BACKEND, str(error)
    except _NotJudged as error:
        return EndReason.NOT_JUDGED, str(error)


def _stepped(
    run: _Run, method: Method, max_steps: int, observed: Callable[[Proposal], Observation]
) -> tuple[EndReason, str]:
    """Submit the root and what the method proposes, until one of them says that it is enough."""
    task = run.task
    if run.submitted_root is not None:
        task = msgspec.structs.replace(task, submitted=observed(Proposal(source=run.submitted_root, note="root")))
    with contextlib.closing(method.proposals(task, run.session)) as coroutine:
        try:
            proposal = next(coroutine)
            for step in range(1, max_steps + 1):
                seen = observed(proposal)
                if run.reached_target(seen):
                    return EndReason.TARGET, f"step {step} reaches {run.target_speedup:g}x"
                if step < max_steps:
                    proposal = coroutine.send(seen)
        except StopIteration:
            return EndReason.FINISHED, "the method has nothing more to propose"
    return EndReason.STEP_LIMIT, f"{max_steps} steps"


class _NotJudged(Exception):
    """The gate cannot judge here, which says nothing about the kernel: a run that goes on asks for it again."""


class _Run:
    """The state of one optimization."""

    def __init__(
        self,
        task: Task,
        session: Session,
        judge: Judge,
        *,
        submit_root: bool,
        rejudge: bool,
        target_speedup: float | None,
        screen: Screen | None = None,
    ) -> None:
        self.task, self.session, self.target_speedup = task, session, target_speedup
        self.submitted_root = task.root if submit_root else None
        self._judge, self._rejudge, self._screen = judge, rejudge, screen
        self._recording, self._notes = recording_of(session), Notebook(session)
        self._is_replay = isinstance(session.backend, ReplayBackend)
        self._observations: list[Observation] = []
        self._first: dict[str, Observation] = {}
        self._best: Observation | None = None
        self._best_verdict: Verdict | None = None
        self._rejudged: list[Rejudged] = []

    @property
    def best_speedup(self) -> float | None:
        """Of the best step so far."""
        return self._best.speedup if self._best is not None else None

    def observe(self, proposal: Proposal) -> Observation:
        """Judge a proposal, unless it was judged before, and write down what came of it."""
        source, step = proposal.source, self._next_step()
        if source is None:
            self._notes.note(MALFORMED_TOPIC, f"step {step}: {proposal.malformed}")
            return self._keep(self._without_verdict(step, proposal))
        if proposal.note:
            self._notes.note(STEP_TOPIC, f"step {step}: {proposal.note}")
        if (earlier := self._first.get(source.digest)) is not None:
            self._notes.note(STEP_TOPIC, f"step {step}: the same kernel as step {earlier.step}, not judged again")
            return self._keep(self._again(step, proposal, earlier))
        verdict, message = self._verdict(step, source)
        if verdict.status is Status.SKIPPED and self._ends_at(step, source, verdict):
            raise _NotJudged(verdict.reasons[0].message)
        speedup = ranked_speedup(message.verdict)
        before = self.best_speedup
        is_best = speedup is not None and (before is None or speedup > before)
        best = speedup if is_best else before
        seen = Observation(
            step=step, proposal=proposal, verdict=message.verdict, feedback=message.feedback, speedup=speedup,
            is_best=is_best, best_speedup=best,
        )  # fmt: skip
        if is_best:
            self._best, self._best_verdict = seen, verdict
        self._first[source.digest] = seen
        self._write(seen, message)
        return self._keep(seen)

    def reached_target(self, seen: Observation) -> bool:
        """Whether the lower end of the interval of the best one, or of what was seen last, is at the target.

        A recorded run that went on after a verdict goes on after it again.
        """
        latest = seen.verdict if seen.repeats is None else None
        went_on = latest is not None and self._recording.went_on_after(latest.source_digest)
        return self._reaches(self._best_verdict) or (not went_on and self._reaches(latest))

    def outcome(self, stopped: EndReason, message: str) -> OptimizationResult:
        """What it came to."""
        return OptimizationResult(
            best=self._best.proposal.source if self._best is not None else None,
            best_verdict=self._best_verdict,
            observations=tuple(self._observations),
            stopped=stopped.value,
            message=message,
            spent_usd=self.session.budget.spent_usd,
            rejudged=tuple(self._rejudged),
        )

    def _reaches(self, verdict: Verdict | None) -> bool:
        if self.target_speedup is None or verdict is None or verdict.timing is None:
            return False
        return verdict.ranked and verdict.screened is None and verdict.timing.speedup.low >= self.target_speedup

    def _next_step(self) -> int:
        return len(self._observations) + (0 if self.submitted_root is not None else 1)

    def _verdict(self, step: int, source: KernelSource) -> tuple[Verdict, VerdictMessage]:
        """The verdict, and what the method gets of it: the recorded one where there is one."""
        message = self._recording.messages.get(source.digest)
        if message is None:
            verdict = self._fresh(source)
            short = msgspec.structs.replace(abridged(verdict), source_digest=source.digest)
            return verdict, VerdictMessage(verdict=short, feedback=feedback_text(short))
        if self._is_replay and self._rejudge:
            verdict = self._judge(self.task.case, source)
            self._rejudged.append(Rejudged(step=step, recorded=message.verdict, verdict=verdict))
        return message.verdict, message

    def _ends_at(self, step: int, source: KernelSource, skipped: Verdict) -> bool:
        """Whether a skip ends the run: unless it is recorded, or this proposal's own flags ask for what is missing.

        Such as the headers of a library; a compiler is not missing once a kernel was judged.
        """
        if not step:
            return True
        if source.digest in self._recording.messages:
            return False
        added = set(source.flags).difference(self.task.root.flags if self.task.root is not None else ())
        judged = any(
            seen.verdict is not None and seen.verdict.status is not Status.SKIPPED for seen in self._first.values()
        )
        return not (added and judged and skipped.code is Code.SKIPPED_DEPENDENCY)

    def _fresh(self, source: KernelSource) -> Verdict:
        """A new verdict: screened against the best so far where that is asked for, in full where it seems better."""
        best = self.best_speedup
        if self._screen is not None and best is not None:
            screened = self._screen(self.task.case, source, best)
            if (ranked_speedup(screened) or 0.0) <= best:
                return screened
        return self._judge(self.task.case, source)

    def _write(self, seen: Observation, message: VerdictMessage) -> None:
        """Put a verdict into the trajectory, unless it stands there."""
        digest = message.verdict.source_digest
        if self.session.recall_verdict(digest) is not None:
            return
        # The whole one first: a Judged line never stands without it.
        self.session.record(Noted(topic=VERDICT_TOPIC, text=to_json(message).decode()))
        judged = Judged(
            source_digest=digest,
            code=message.verdict.code,
            verdict=f"judged at {message.verdict.judged_at or 'unknown'}",
            call=seen.proposal.call,
            speedup=seen.speedup if message.verdict.screened is None else None,
            best_speedup=seen.best_speedup,
            screened=message.verdict.screened is not None,
        )
        self.session.record(judged)

    def _keep(self, seen: Observation) -> Observation:
        self._observations.append(seen)
        return seen

    def _without_verdict(self, step: int, proposal: Proposal) -> Observation:
        return Observation(
            step=step, proposal=proposal, verdict=None, feedback=malformed_text(proposal.malformed), speedup=None,
            is_best=False, best_speedup=self.best_speedup,
        )  # fmt: skip

    def _again(self, step: int, proposal: Proposal, earlier: Observation) -> Observation:
        return Observation(
            step=step, proposal=proposal, verdict=earlier.verdict, speedup=earlier.speedup, is_best=False,
            feedback=repeated_text(earlier.step, earlier.feedback), best_speedup=self.best_speedup,
            repeats=earlier.step,
        )  # fmt: skip


def ranked_speedup(verdict: Verdict) -> float | None:
    """The speedup by which a search compares kernels; None for one that was not right or not timed."""
    return verdict.timing.speedup.estimate if verdict.ranked and verdict.timing is not None else None
