"""The steps of one optimization, from its events: what was judged at which cost, and what failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_klineage.records import (
    Answered,
    Code,
    Event,
    Failed,
    Interval,
    Judged,
    Noted,
    Status,
    Stopped,
    Verdict,
    begun_of,
)
from pytest_klineage.report.collect import ReadTrajectory
from pytest_klineage.report.document import Mark

VERDICT_TOPIC = "verdict"
"""Topic of notes that hold a whole verdict, without its samples."""
MALFORMED_TOPIC = "malformed"
"""Topic of notes on replies that held no kernel."""
STEP_TOPIC = "step"
STEP_NUMBER = re.compile(r"step (\d+):")
"""How notes on one step begin."""


class _VerdictNote(msgspec.Struct, frozen=True):
    """What a note with the topic "verdict" holds."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """One submission, or one reply that was none."""

    number: int
    """From 0: the root, where there is one."""
    cost_usd: float
    """Dollars charged until then."""
    mark: Mark
    notes: tuple[tuple[str, str], ...]
    """Topic and text of what the method noted since the step before."""
    code: Code | None = None
    """None for a reply without a kernel."""
    speedup: float | None = None
    """None unless scored."""
    verdict: Verdict | None = None
    """The whole verdict, where the trajectory or a run holds it."""
    reply: str = ""
    """What the model wrote; empty for a kernel that no model wrote."""
    source_digest: str = ""

    @property
    def is_root(self) -> bool:
        """Whether the kernel was given to the method, and is not its own."""
        return any(topic == STEP_TOPIC and text.startswith("step 0:") for topic, text in self.notes)

    @property
    def interval(self) -> Interval | None:
        """The speedup's interval, if the kernel was scored and the whole verdict is there."""
        if self.verdict is None or self.verdict.timing is None or self.mark is not Mark.SCORED:
            return None
        return self.verdict.timing.speedup

    @property
    def lower_bound(self) -> float:
        """The speedup that it has at least: of many estimates the highest would be the luckiest. 0 unless scored."""
        return self.interval.low if self.interval is not None else self.speedup or 0.0


@dataclass(frozen=True, slots=True)
class Optimization:
    """One run of one method on one case."""

    name: str
    path: str
    method: str
    case_id: str
    platform: str
    settings: dict[str, str]
    model: str
    budget_usd: float
    spent_usd: float
    steps: tuple[ReportedStep, ...]
    stopped: str
    """Why it ended; empty when its last line does not say."""

    @property
    def best(self) -> ReportedStep | None:
        """Step with the highest lower confidence bound; excludes the initial kernel."""
        scored = [step for step in self.steps if step.speedup is not None and not step.is_root]
        return max(scored, key=lambda step: step.lower_bound, default=None)


@dataclass(slots=True)
class _Reading:
    """State while events are walked through."""

    cost: float = 0.0
    replies: dict[int, str] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    steps: list[ReportedStep] = field(default_factory=list)


def optimization_of(read: ReadTrajectory, verdicts: dict[str, Verdict] | None = None) -> Optimization:
    """One optimization; `verdicts` by source digest fill in what the trajectory does not hold itself."""
    begun = begun_of(read.events)
    reading = _Reading(verdicts=dict(verdicts or {}))
    for event in read.events:
        _take(event, reading)
    steps = tuple(reading.steps)
    known = next((step.verdict for step in steps if step.verdict is not None), None)
    settings = begun.settings if begun is not None else {}
    name = begun.name if begun is not None else read.path.stem
    stops = [event for event in read.events if isinstance(event, Stopped)]
    return Optimization(
        name=name,
        path=str(read.path),
        method=settings.get("method") or (name.split() or ["?"])[0],
        case_id=known.case.id if known is not None else settings.get("case", ""),
        platform=settings.get("platform") or (known.machine.platform if known and known.machine else ""),
        settings=settings,
        model=begun.model if begun is not None else "",
        budget_usd=begun.budget_usd if begun is not None else 0.0,
        spent_usd=reading.cost,
        steps=steps,
        stopped=": ".join(part for part in (stops[-1].reason, stops[-1].message) if part) if stops else "",
    )


def running_best(steps: Sequence[ReportedStep]) -> Iterator[tuple[ReportedStep, float]]:
    """Scored steps that are faster than every one before, in order."""
    best = 0.0
    for step in steps:
        if step.speedup is not None and step.speedup > best:
            best = step.speedup
            yield step, best


def mark_of(code: Code, speedup: float | None, *, screened: bool = False) -> Mark:
    """What a verdict is in a figure."""
    if code.status is Status.WRAPPER:
        return Mark.WRAPPER
    if screened:
        return Mark.SCREENED
    return Mark.SCORED if speedup is not None else Mark.FAILED


def _take(event: Event, reading: _Reading) -> None:
    match event:
        case Answered():
            reading.cost += event.usage.cost_usd
            reading.replies[event.call] = event.text
        case Failed():
            reading.cost += event.cost_usd
        case Noted():
            _note(event, reading)
        case Judged():
            _append(reading, event)
        case _:
            return


def _note(event: Noted, reading: _Reading) -> None:
    if event.topic == VERDICT_TOPIC:
        try:
            note = msgspec.json.decode(event.text, type=_VerdictNote)
        except msgspec.DecodeError:
            return  # another method's note of that name, or another version's: the short form stands in Judged
        reading.verdicts[note.verdict.source_digest] = note.verdict
        return
    reading.notes.append((event.topic, event.text))
    if event.topic == MALFORMED_TOPIC:
        last = reading.replies[max(reading.replies)] if reading.replies else ""
        _step(reading, Mark.FAILED, reply=last)


def _append(reading: _Reading, event: Judged) -> None:
    mark = mark_of(event.code, event.speedup, screened=event.screened)
    speedup = event.speedup if mark is Mark.SCORED else None
    verdict = reading.verdicts.get(event.source_digest)
    if verdict is not None and verdict.code is not event.code:
        verdict = None  # of another judgement of the same source
    reply = reading.replies.get(event.call, "")
    digest = event.source_digest
    _step(reading, mark, code=event.code, speedup=speedup, verdict=verdict, reply=reply, source_digest=digest)


def _step(reading: _Reading, mark: Mark, **facts: Any) -> None:
    number, notes = _number(reading), tuple(reading.notes)
    reading.steps.append(ReportedStep(number=number, cost_usd=reading.cost, mark=mark, notes=notes, **facts))
    reading.notes.clear()


def _number(reading: _Reading) -> int:
    """The number that the notes say; steps that were not judged again are in it."""
    said = [int(found[1]) for _, text in reading.notes if (found := STEP_NUMBER.match(text))]
    return max([*said[-1:], reading.steps[-1].number + 1 if reading.steps else 0])
