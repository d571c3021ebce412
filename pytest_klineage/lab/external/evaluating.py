"""Submissions of an outside optimizer as steps of a trajectory: judged one at a time, the best of the scored ones kept.

The lines are those that our own methods leave, so that reports show both alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pytest_klineage.errors import KlineageError
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.llm.trajectory import Trajectory
from pytest_klineage.lab.optimizers.feedback import feedback_text
from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage, abridged
from pytest_klineage.lab.optimizers.session import MALFORMED_TOPIC, STEP_TOPIC, Judge, ranked_speedup
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import (
    Answered,
    Judged,
    KernelSource,
    LibraryPolicy,
    Noted,
    Status,
    Verdict,
    to_json,
)

ORDINARY_TOPIC = "ordinary"
MESSAGE_CHARACTERS = 500


class EvaluationTarget(Task, frozen=True, kw_only=True):
    """What is to be optimized, as outside optimizers are shown it."""

    root: KernelSource | None = None
    instructions: str = ""
    entry: str = "run"
    flags: tuple[str, ...] = ()
    """For submissions that name none."""


class SubmissionStep(msgspec.Struct, frozen=True, kw_only=True):
    """One submission and what came of it."""

    number: int
    """From 1; 0 is the root."""
    source: KernelSource
    verdict: Verdict
    """What counts, without samples."""
    shown: Verdict
    """What the optimizer is shown: the same, unless wrappers are shown as ordinary kernels."""
    feedback: str
    speedup: float | None
    """None unless scored."""
    is_best: bool
    best_speedup: float | None
    repeats: int | None = None
    """The earlier step with the same source; it was not judged again."""


class Evaluator:
    """Judges submissions in one thread of its own, in the order in which they come.

    That thread lives as long as the evaluator: the gate's processes end with the thread that started them.
    """

    def __init__(
        self, target: EvaluationTarget, judge: Judge, trajectory: Trajectory, *, max_steps: int,
        ordinary_wrappers: bool = False, on_step: Callable[[SubmissionStep], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`finish` is called in the evaluator's thread at its end, to close the gate."""
        self.target, self.trajectory, self.max_steps = target, trajectory, max_steps
        self.steps: list[SubmissionStep] = []
        self.malformed = 0
        self.busy = False
        """Whether a kernel is being judged."""
        self.failure: KlineageError | None = None
        """What ended judging: a fault of ours, or a case that cannot be judged here."""
        self.last_seen = time.monotonic()
        self._judge, self._ordinary = judge, ordinary_wrappers
        self._on_step, self._finish = on_step, finish
        self._closed = ""
        self._first: dict[str, SubmissionStep] = {}
        self._best: SubmissionStep | None = None
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

    def submit_root(self) -> SubmissionStep | None:
        """Judge the root as step 0; None without one."""
        root = self.target.root
        return None if root is None else self.thread.submit(self._step, root, "root", True).result()

    def submit(self, source: KernelSource, how: str) -> SubmissionStep:
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
        """Refuse further submissions; one that is being judged is waited for, those after it are refused."""
        if self._closed:
            return
        self._closed = why
        if self._finish is not None:
            self.thread.submit(self._finish).result()
        self.thread.shutdown(wait=True)

    def _step(self, source: KernelSource, how: str, is_root: bool) -> SubmissionStep:
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

    def _observe(self, source: KernelSource, how: str, is_root: bool) -> SubmissionStep:
        number = 0 if is_root else self._next_number()
        earlier = self._first.get(source.digest)
        if earlier is not None:
            again = f"step {number}: the same kernel as step {earlier.number}, not judged again"
            self.trajectory.append(Noted(topic=STEP_TOPIC, text=again))
            return msgspec.structs.replace(earlier, number=number, is_best=False, repeats=earlier.number,
                                           best_speedup=self.best_speedup)  # fmt: skip
        self.trajectory.append(Noted(topic=STEP_TOPIC, text=f"step {number}: {how}"))
        verdict = self._judge(self.target.case, source)
        speedup = ranked_speedup(verdict)
        is_best = speedup is not None and (self.best_speedup is None or speedup > self.best_speedup)
        short = msgspec.structs.replace(abridged(verdict), source_digest=source.digest)
        shown = self._shown(short, source)
        step = SubmissionStep(
            number=number, source=source, verdict=short, shown=shown, feedback=feedback_text(shown),
            speedup=speedup, is_best=is_best, best_speedup=speedup if is_best else self.best_speedup,
        )  # fmt: skip
        if is_best:
            self._best, self._best_verdict = step, verdict
        self._first[source.digest] = step
        self._write(step, 0 if is_root else self._call_of(source))
        return step

    def _shown(self, verdict: Verdict, source: KernelSource) -> Verdict:
        """What the optimizer is shown of a verdict; a wrapper, where asked for, as its own evaluator would have it."""
        if not self._ordinary or verdict.status is not Status.WRAPPER:
            return verdict
        allowed = msgspec.structs.replace(self.target.case, library=LibraryPolicy.ALLOW)
        ordinary = abridged(self._judge(allowed, source))
        return msgspec.structs.replace(ordinary, source_digest=source.digest)

    def _write(self, step: SubmissionStep, call: int) -> None:
        counted = VerdictMessage(verdict=step.verdict, feedback=step.feedback)
        self.trajectory.append(Noted(topic=VERDICT_TOPIC, text=to_json(counted).decode()))
        if step.shown is not step.verdict:
            text = f"step {step.number}: shown as {step.shown.code}, counted as {step.verdict.code}"
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
