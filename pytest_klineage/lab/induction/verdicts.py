"""Verdicts of a walk: one file with all of them beside the trajectory, judged once, and given again after a resume.

The trajectory's `Judged` says on which line of the file the verdict lies, with every sample.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

from pytest_klineage.errors import BadRecord, HarnessError, StoreError, UsageError
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.records import (
    Asked,
    Code,
    Event,
    Judged,
    KernelCase,
    KernelSource,
    Status,
    Verdict,
    from_json,
)
from pytest_klineage.records.codec import finite_json
from pytest_klineage.records.verdict import DISTURBED
from pytest_klineage.results.packed import is_there, read_packed, unpack

VERDICTS_FILE = "verdicts.jsonl"
WIDE = 0.1
"""Half-width, relative, above which an interval says too little of a step."""
BLURRED_TRIES, PAUSE_S = 3, 5.0
"""How often a kernel is judged while its interval is wide or others use the machine, and the time between."""

Judge: TypeAlias = Callable[[KernelCase, KernelSource, KernelSource | None], Verdict]
"""Judges a kernel on a case; the third takes the place of the case's reference. `Gate.judge` in another order."""


class Judging(Protocol):
    """What the walk asks for verdicts."""

    def __call__(self, case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict: ...


class AnyGate(Protocol):
    """A gate, here or elsewhere."""

    def judge(
        self, case: KernelCase, source: KernelSource, *, reference_source: KernelSource | None = None
    ) -> Verdict: ...


class VerdictFile:
    """Verdicts in the order in which they were made, one to a line. A line that was cut short is taken away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = read_packed(path) if is_there(path) else b""
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                unpack(path)
                os.truncate(path, len(whole))
        except OSError as error:
            raise StoreError(f"the verdicts {path} cannot be used: {error.strerror or error}") from error
        self._lines = whole.split(b"\n")[:-1]

    def append(self, verdict: Verdict) -> str:
        """Write a verdict down. Returns its place, for `Judged`. Raises StoreError."""
        line = finite_json(verdict)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unpack(self.path)
            with self.path.open("ab") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"the verdicts {self.path} cannot be used: {error.strerror or error}") from error
        self._lines.append(line)
        return f"{VERDICTS_FILE}:{len(self._lines)}"

    def read(self, judged: Judged) -> Verdict:
        """The verdict that a `Judged` speaks of. Raises BadRecord when the file has another one there, or none."""
        _, _, number = judged.verdict.rpartition(":")
        position = int(number) if number.isdigit() else 0
        if not 1 <= position <= len(self._lines):
            raise BadRecord(f"{self.path} has no line {judged.verdict!r}: take it from where the trajectory is from")
        verdict = from_json(self._lines[position - 1], Verdict)
        if (verdict.source_digest, verdict.code) != (judged.source_digest, judged.code):
            raise BadRecord(f"{self.path}, line {position}, is not the verdict that the trajectory speaks of")
        return verdict


class LiveJudging:
    """Judges by the gate, and records; after a resume it tells the recorded verdicts first. Raises UsageError where
    the gate skips a kernel: a walk cannot go on without verdicts.
    """

    def __init__(self, session: Session, file: VerdictFile, judge: Judge) -> None:
        self._session, self._file, self._judge = session, file, judge

    def __call__(self, case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        recorded = self._session.recall_verdict(source.digest)
        if recorded is not None:
            return self._file.read(recorded)
        verdict = judged_in_peace(self._judge, case, source, against)
        if verdict.status is Status.SKIPPED:
            raise UsageError(f"the gate cannot judge here: {verdict.reasons[0].message}")
        position = self._file.append(verdict)
        speed = verdict.timing.speedup.estimate if verdict.timing is not None and verdict.scored else None
        self._session.record(
            Judged(
                source_digest=source.digest, code=verdict.code, verdict=position, call=_last_call(self._session),
                speedup=speed,
            )
        )  # fmt: skip
        return verdict


class ReplayJudging:
    """Tells the recorded verdicts of a trajectory, in their order, and has every kernel judged again beside them."""

    def __init__(self, events: Iterable[Event], file: VerdictFile, judge: Judge | None) -> None:
        self._file, self._judge = file, judge
        self._recorded: dict[str, deque[Judged]] = {}
        for event in events:
            if isinstance(event, Judged):
                self._recorded.setdefault(event.source_digest, deque()).append(event)
        self.rejudged: list[Rejudged] = []

    def __call__(self, case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        waiting = self._recorded.get(source.digest)
        if not waiting:
            raise HarnessError(f"the trajectory has no verdict on {source.digest[:12]}, which its replies have made")
        recorded = self._file.read(waiting.popleft())
        if self._judge is not None:
            fresh = self._judge(case, source, against)
            self.rejudged.append(Rejudged(step=len(self.rejudged), recorded=recorded, verdict=fresh))
        return recorded


def judged_in_peace(
    judge: Judge, case: KernelCase, source: KernelSource, against: KernelSource | None, patient: Judge | None = None
) -> Verdict:  # fmt: skip
    """A verdict; where others used the machine, or the interval is wide, one of three: a quiet, then a sharp one.

    patient: judges instead where the time of `judge` was too short for its pairs.
    """
    first = judge(case, source, against)
    if patient is not None and first.code is Code.INCONCLUSIVE_FEW:
        return judged_in_peace(patient, case, source, against)
    verdicts = [first]
    while len(verdicts) < BLURRED_TRIES and _blurred(verdicts[-1]):
        verdicts.append(_once_more(judge, len(verdicts))(case, source, against))
    # A kernel that is wrong once is wrong: later verdicts were only asked for because earlier ones were right.
    if not verdicts[-1].scored:
        return verdicts[-1]
    return min(verdicts, key=lambda verdict: (verdict.code in DISTURBED, _blur(verdict)))


def _once_more(judge: Judge, repeat: int) -> Judge:
    """The judge for a repetition: after a pause here; elsewhere the repetition is a request of its own."""
    again: Callable[[int], Judge] | None = getattr(judge, "again", None)
    if again is not None:
        return again(repeat)
    time.sleep(PAUSE_S)
    return judge


class GateJudge:
    """Judges by a gate, with `again` where the gate has it: the judge of walks and trials."""

    def __init__(self, gate: AnyGate) -> None:
        self._gate = gate
        if (again := getattr(gate, "again", None)) is not None:
            self.again = lambda repeat: GateJudge(again(repeat))

    def __call__(self, case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        return self._gate.judge(case, source, reference_source=against)


def _blurred(verdict: Verdict) -> bool:
    return verdict.scored and (verdict.code in DISTURBED or _blur(verdict) > WIDE)


def _blur(verdict: Verdict) -> float:
    return verdict.timing.speedup.half_width if verdict.timing is not None else math.inf


def _last_call(session: Session) -> int:
    """The call whose reply is judged: the last one that was sent."""
    return next((event.call for event in reversed(session.events) if isinstance(event, Asked)), 0)
