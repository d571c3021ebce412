"""Submissions of an outside optimizer as steps of a trajectory: judged one at a time, the best of the scored ones kept.

The lines are those that our own methods leave, so that reports show both alike. HTTP is served elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec

from pytest_klineage.errors import KlineageError
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.llm.trajectory import Trajectory
from pytest_klineage.records import (
    Answered,
    Judged,
    KernelCase,
    KernelSource,
    LibraryPolicy,
    Noted,
    Status,
    Surface,
    Verdict,
)

Judge: TypeAlias = Callable[[KernelCase, KernelSource], Verdict]

STEP_TOPIC, MALFORMED_TOPIC, VERDICT_TOPIC, ORDINARY_TOPIC = "step", "malformed", "verdict", "ordinary"
MESSAGE_CHARACTERS = 500


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be optimized, as outside optimizers are told."""

    case: KernelCase
    platform: str
    surface: Surface
    entry: str = "run"
    flags: tuple[str, ...] = ()
    """For submissions that name none."""
    root: KernelSource | None = None
    instructions: str = ""
    """The contract as text."""


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """How verdicts become text; the same for every method."""

    feedback: Callable[[Verdict], str]
    abridged: Callable[[Verdict], Verdict]
    """Without what nobody is told, such as samples."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One submission and what came of it."""

    number: int
    """From 1; 0 is the root."""
    source: KernelSource
    verdict: Verdict
    """What counts, without samples."""
    told: Verdict
    """What the optimizer is told: the same, unless wrappers are told as ordinary kernels."""
    feedback: str
    speedup: float | None
    """None unless scored."""
    is_best: bool
    best_speedup: float | None
    repeats: int | None = None
    """The earlier step with the same source; it was not judged again."""


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict as trajectories keep it."""

    verdict: Verdict
    feedback: str


class Evaluator:
    """Judges submissions in one thread of its own, in the order in which they come.

    That thread lives as long as the evaluator: the gate's processes end with the thread that started them.
    """

    def __init__(
        self, target: Target, judge: Judge, trajectory: Trajectory, telling: Telling, *, max_steps: int,
        ordinary_wrappers: bool = False, on_step: Callable[[Step], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`finish` is called in the evaluator's thread at its end, to close the gate."""
        self.target, self.trajectory, self.max_steps = target, trajectory, max_steps
        self.steps: list[Step] = []
        self.malformed = 0
        self.busy = False
        """Whether a kernel is being judged."""
        self.failure: KlineageError | None = None
        """What ended judging: a fault of ours, or a case that cannot be judged here."""
        self.last_seen = time.monotonic()
        self._judge, self._telling, self._ordinary = judge, telling, ordinary_wrappers
        self._on_step, self._finish = on_step, finish
        self._closed = ""
        self._first: dict[str, Step] = {}
        self._best: Step | None = None
        self._best_verdict: Verdict | None = None
        self._calls_seen = 0
        self._numbers = 0
        self._lock = threading.Lock()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klineage-judge")

    @property
    def best(self) -> KernelSource | None:
        """The fastest scored kernel."""
        return self._best.source if self._best is not None else None

    @property
    def best_verdict(self) -> Verdict | None:
        """Its verdict, samples included."""
        return self._best_verdict

    @property
    def best_speedup(self) -> float | None:
        """Its speedup."""
        return self._best.speedup if self._best is not None else None

    @property
    def steps_left(self) -> int:
        """Submissions that will still be judged; the root is free."""
        return max(0, self.max_steps - self._numbers)

    def submit_root(self) -> Step | None:
        """Judge the root as step 0; None without one."""
        return (
            None
            if self.target.root is None
            else self.thread.submit(self._step, self.target.root, "root", True).result()
        )

    def submit(self, source: KernelSource, how: str) -> Step:
        """Judge a kernel and record it; `how` says by which contract it came. Runs in the evaluator's thread.

        Raises Refused when no further step is judged, HarnessError or UsageError when nothing can be.
        """
        try:
            judged = self.thread.submit(self._step, source, how, False)
        except RuntimeError as error:  # the thread was shut down between two requests
            raise Refused(Refusal.CLOSED, f"the run has ended: {self._closed or error}") from error
        return judged.result()

    def reject(self, refused: Refused) -> None:
        """Record a submission that holds no kernel."""
        self.malformed += 1
        self.last_seen = time.monotonic()
        text = f"step {self._next_number()}: {refused.refusal}: {refused}"[:MESSAGE_CHARACTERS]
        self.trajectory.append(Noted(topic=MALFORMED_TOPIC, text=text))

    def check_open(self) -> None:
        """Raise Refused when no further step is judged."""
        if self._closed:
            raise Refused(Refusal.CLOSED, f"the run has ended: {self._closed}. Begin a new run to go on")
        if self.failure is not None:
            raise Refused(Refusal.CLOSED, f"nothing can be judged any more: {self.failure}")
        if not self.steps_left:
            raise Refused(Refusal.STEP_LIMIT, f"all {self.max_steps} steps are used up: begin a run with more")

    def close(self, why: str) -> None:
        """Refuse further submissions; one that is being judged is waited for, those behind it are refused."""
        if self._closed:
            return
        self._closed = why
        if self._finish is not None:
            self.thread.submit(self._finish).result()
        self.thread.shutdown(wait=True)

    def _step(self, source: KernelSource, how: str, is_root: bool) -> Step:
        if not is_root:
            self.check_open()
        self.busy = True
        try:
            step = self._observe(source, how, is_root)
        except KlineageError as error:
            self.failure = error
            raise
        finally:
            self.busy = False
        self.steps.append(step)
        self.last_seen = time.monotonic()
        if self._on_step is not None:
            self._on_step(step)
        return step

    def _observe(self, source: KernelSource, how: str, is_root: bool) -> Step:
        number = 0 if is_root else self._next_number()
        earlier = self._first.get(source.digest)
        if earlier is not None:
            again = f"step {number}: the same kernel as step {earlier.number}, not judged again"
            self.trajectory.append(Noted(topic=STEP_TOPIC, text=again))
            return msgspec.structs.replace(earlier, number=number, is_best=False, repeats=earlier.number,
                                           best_speedup=self.best_speedup)  # fmt: skip
        self.trajectory.append(Noted(topic=STEP_TOPIC, text=f"step {number}: {how}"))
        verdict = self._judge(self.target.case, source)
        speedup = verdict.timing.speedup.estimate if verdict.scored and verdict.timing else None
        is_best = speedup is not None and (self.best_speedup is None or speedup > self.best_speedup)
        short = msgspec.structs.replace(self._telling.abridged(verdict), source_digest=source.digest)
        told = self._told(short, source)
        step = Step(
            number=number, source=source, verdict=short, told=told, feedback=self._telling.feedback(told),
            speedup=speedup, is_best=is_best, best_speedup=speedup if is_best else self.best_speedup,
        )  # fmt: skip
        if is_best:
            self._best, self._best_verdict = step, verdict
        self._first[source.digest] = step
        self._write(step, 0 if is_root else self._call_of(source))
        return step

    def _told(self, verdict: Verdict, source: KernelSource) -> Verdict:
        """What the optimizer is told of a verdict; a wrapper, where asked for, as its own evaluator would have it."""
        if not self._ordinary or verdict.status is not Status.WRAPPER:
            return verdict
        allowed = msgspec.structs.replace(self.target.case, library=LibraryPolicy.ALLOW)
        ordinary = self._telling.abridged(self._judge(allowed, source))
        return msgspec.structs.replace(ordinary, source_digest=source.digest)

    def _write(self, step: Step, call: int) -> None:
        counted = _Told(verdict=step.verdict, feedback=step.feedback)
        self.trajectory.append(Noted(topic=VERDICT_TOPIC, text=msgspec.json.encode(counted).decode()))
        if step.told is not step.verdict:
            text = f"step {step.number}: told as {step.told.code}, counted as {step.verdict.code}"
            self.trajectory.append(Noted(topic=ORDINARY_TOPIC, text=text))
        judged = Judged(
            source_digest=step.source.digest, code=step.verdict.code,
            verdict=f"judged at {step.verdict.judged_at or 'unknown'}", call=call, speedup=step.speedup,
            best_speedup=step.best_speedup,
        )  # fmt: skip
        self.trajectory.append(judged)

    def _call_of(self, source: KernelSource) -> int:
        """The call whose reply holds the kernel; else the last one answered since the step before; else 0."""
        answered = [event for event in self.trajectory.events if isinstance(event, Answered)]
        fresh, self._calls_seen = answered[self._calls_seen :], len(answered)
        texts = [file.text.strip() for file in source.files if file.text.strip()]
        for event in reversed(answered):
            if any(text in event.text for text in texts):
                return event.call
        return fresh[-1].call if fresh else 0

    def _next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers
