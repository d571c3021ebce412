"""Recorded optimizations, gone through again without a model: their steps, their best kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.klineage import CARDS_TOPIC, OWN
from pytest_klineage.lab.optimizers.methods import recorded_method
from pytest_klineage.lab.optimizers.recording import Recording, VerdictMessage
from pytest_klineage.lab.optimizers.session import MALFORMED_TOPIC, STEP_TOPIC, Judge, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import Begun, Event, Judged, KernelCase, KernelSource, Noted, Surface, Verdict, begun_of
from pytest_klineage.results.packed import line_files

ROOT_NOTE = "step 0: root"
AGAIN = "not judged again"
"""How the note on a step ends whose kernel was sent before."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded optimization, as far as a replay needs it."""

    path: Path
    begun: Begun
    events: tuple[Event, ...]
    case: KernelCase

    @property
    def steps(self) -> int:
        """Proposals that were made: judged, sent again, or malformed."""
        return steps_of(self.events)

    @property
    def judged(self) -> tuple[str, ...]:
        """Digests of the kernels that were judged, in order, the root's first."""
        return tuple(event.source_digest for event in self.events if isinstance(event, Judged))

    @property
    def best_speedup(self) -> float | None:
        """Of the fastest kernel that the method made; None when none was scored. The root is not among them."""
        judged = [event for event in self.events if isinstance(event, Judged)][has_root(self.events) :]
        return max((event.speedup for event in judged if event.speedup is not None), default=None)


def read_recorded(path: Path) -> Recorded:
    """Read a trajectory. Raises UsageError, BadRecord among them, for one that cannot be replayed."""
    lines, _ = read_trajectory(path)
    events = tuple(line.event for line in lines)
    begun = begun_of(events)
    message = _first_message(events)
    if begun is None or message is None:
        raise UsageError(f"{path} holds no judged kernel: there is nothing to replay; run it again")
    return Recorded(path=path, begun=begun, events=events, case=message.verdict.case)


def best_recorded(folder: Path, method: str, case: KernelCase, platform: str) -> Recorded | None:
    """The recorded run of a method on a case whose kernel is the fastest; None when no run has one.

    Files that hold no such run are left out, and runs that were shown cards of the very case.
    """
    found: list[tuple[float, Recorded]] = []
    for path in line_files(folder):
        try:
            recorded = read_recorded(path)
        except (BadRecord, UsageError):
            continue
        settings, speedup = recorded.begun.settings, recorded.best_speedup
        asked = (settings.get("method"), settings.get("platform"), recorded.case.id) == (method, platform, case.id)
        if asked and speedup is not None and not has_own_cards(recorded.events):
            found.append((speedup, recorded))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def has_own_cards(events: Iterable[Event]) -> bool:
    """Whether a run's cards were in part lifted from its own operator and shape, as it noted."""
    return any(isinstance(event, Noted) and event.topic == CARDS_TOPIC and event.text.endswith(OWN) for event in events)


def best_made(outcome: OptimizationResult) -> KernelSource | None:
    """The fastest kernel that a method made, which is not the root; None when none was scored."""
    made = [seen for seen in outcome.observations if seen.step > 0 and seen.speedup is not None]
    best = max(made, key=lambda seen: seen.speedup or 0.0, default=None)
    return best.proposal.source if best is not None else None


def steps_of(events: Sequence[Event]) -> int:
    """How many proposals a method made, the root left out."""
    judged = sum(isinstance(event, Judged) for event in events)
    notes = [event for event in events if isinstance(event, Noted)]
    malformed = sum(note.topic == MALFORMED_TOPIC for note in notes)
    return judged - has_root(events) + malformed + repeats_of(events)


def repeats_of(events: Sequence[Event]) -> int:
    """How many proposals were kernels of an earlier step."""
    notes = [event for event in events if isinstance(event, Noted)]
    return sum(note.topic == STEP_TOPIC and note.text.endswith(AGAIN) for note in notes)


def has_root(events: Sequence[Event]) -> bool:
    """Whether the first kernel that was judged is the root, which no model wrote."""
    return any(isinstance(event, Noted) and (event.topic, event.text) == (STEP_TOPIC, ROOT_NOTE) for event in events)


def replayed(
    recorded: Recorded, root: KernelSource | None, scratch: Path, judge: Judge | None = None
) -> OptimizationResult:
    """Go through a recorded optimization again, writing its own trajectory to `scratch`, a new file.

    The method gets the recorded verdicts. With `judge` every kernel is judged again (`OptimizationResult.rejudged`).
    It
    ends after as many steps as were recorded. Raises UsageError, TrajectoryMismatch among them, where the run would
    take
    another way than the recorded one, as after a change of prompts or of the root.
    """
    if not recorded.steps:
        raise UsageError(f"{recorded.path} holds no step of a method: there is nothing to replay; run it again")
    settings = recorded.begun.settings
    submitted = has_root(recorded.events)
    if submitted and (root is None or root.digest != recorded.judged[0]):
        raise UsageError(
            f"{recorded.path} began with another kernel than is there now (digest {recorded.judged[0][:12]}): restore "
            "that one, or record the run again"
        )
    task = Task(
        case=recorded.case, platform=settings["platform"], surface=Surface(settings["surface"]), root=root,
        instructions="", seed=int(settings.get("seed", 0)),
    )  # fmt: skip
    method = recorded_method(settings, recorded.steps)
    with Session.begin(
        scratch, ReplayBackend(recorded.path), limit_usd=recorded.begun.budget_usd, name=recorded.begun.name,
        settings=settings,
    ) as session:  # fmt: skip
        outcome = optimize(
            task, method, session, judge or _no_judge, max_steps=recorded.steps, submit_root=submitted,
            rejudge=judge is not None,
        )  # fmt: skip
    _same_way(recorded, scratch)
    return outcome


def _first_message(events: Sequence[Event]) -> VerdictMessage | None:
    return next(iter(Recording(events).messages.values()), None)


def _same_way(recorded: Recorded, scratch: Path) -> None:
    """Raise UsageError unless a replay submitted the recorded kernels in the recorded order."""
    again = tuple(line.event for line in read_trajectory(scratch)[0])
    digests = tuple(event.source_digest for event in again if isinstance(event, Judged))
    if digests != recorded.judged or steps_of(again) != recorded.steps:
        raise UsageError(
            f"{recorded.path} cannot be replayed: the same replies led to other kernels. Replay with the version that "
            "recorded it, or record it again"
        )


def _no_judge(case: KernelCase, source: KernelSource) -> Verdict:
    """The judge of a replay that judges nothing: a kernel without a recorded verdict is of another run."""
    raise UsageError(
        f"the replay came to a kernel ({source.digest[:12]} on {case.id}) that was not recorded: replay with the "
        "version that recorded it, or record it again"
    )
