"""The chains of an experiment, read from their trajectories: one target in one arm, shot by shot. Nothing is compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage
from pytest_klineage.lab.optimizers.session import MALFORMED_TOPIC, STEP_TOPIC
from pytest_klineage.lab.studies.shots import SUCCESS, is_success
from pytest_klineage.records import Answered, Begun, Event, Judged, Noted, Status, Verdict, from_json
from pytest_klineage.results.packed import line_files

AGAIN = re.compile(r"step \d+: the same kernel as step (\d+),")
"""How a run notes a kernel that it was sent before."""


class Failure(StrEnum):
    """What became of a shot that is no success."""

    MALFORMED = "no kernel"
    BUILD = "build"
    """Not built, or without the instructions that are asked for."""
    REFUSED = "refused"
    """Work of a library, or tampering."""
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"


KINDS = {
    Status.BUILD_ERROR: Failure.BUILD, Status.WRAPPER: Failure.REFUSED, Status.CHEAT: Failure.REFUSED,
    Status.RUNTIME_ERROR: Failure.CRASH, Status.TIMEOUT: Failure.HANG,
}  # fmt: skip
"""Failures by status; other statuses without a score are wrong."""


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of a chain."""

    verdict: Verdict | None
    """Without samples; None for a reply that held no kernel."""
    tokens: int
    """Input and output tokens of the chain up to here."""
    usd: float
    """Dollars of the chain up to here."""

    def succeeds(self, least: float = SUCCESS) -> bool:
        """Whether its kernel is right and has that share of the reference's speed."""
        return self.verdict is not None and is_success(self.verdict, least)

    @property
    def speedup(self) -> float | None:
        """Of a right kernel over the reference; None for any other."""
        timing = self.verdict.timing if self.verdict is not None and self.verdict.scored else None
        return None if timing is None else timing.speedup.estimate

    def failure(self, least: float = SUCCESS) -> Failure | None:
        """Why it is no success; None for one."""
        if self.verdict is None:
            return Failure.MALFORMED
        if self.succeeds(least):
            return None
        return Failure.SLOW if self.verdict.scored else KINDS.get(self.verdict.status, Failure.WRONG)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one target in one arm."""

    arm: str
    target: str
    repeat: int
    shots: tuple[Shot, ...]
    design: str = ""
    """Digest of the frozen design that it was run under."""
    model: str = ""

    @property
    def trial(self) -> tuple[str, int]:
        """What two arms are paired by."""
        return self.target, self.repeat

    @property
    def first(self) -> Shot | None:
        """None while there is none, or where the harness has failed: such a chain is in no comparison."""
        shot = next(iter(self.shots), None)
        lost = shot is not None and shot.verdict is not None and shot.verdict.status is Status.SKIPPED
        return None if lost else shot

    def best(self) -> float | None:
        """The largest speedup of a right kernel; None without one."""
        return max((speed for shot in self.shots if (speed := shot.speedup) is not None), default=None)

    def first_success(self, least: float = SUCCESS) -> Shot | None:
        """The first shot that is a success; None without one."""
        return next((shot for shot in self.shots if shot.succeeds(least)), None)


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What a study's trajectories call arm, target and repeat in their settings."""

    arm: str = "arm"
    target: str = "target"
    repeat: str = "repeat"


def chains_below(folder: Path, keys: Keys | None = None) -> list[Chain]:
    """Every chain whose trajectory lies below a folder, in the order of their names. Raises BadRecord."""
    return [chain_of([line.event for line in read_trajectory(path)[0]], keys or Keys()) for path in line_files(folder)]


def chain_of(events: Sequence[Event], keys: Keys) -> Chain:
    """One chain. Raises ValueError for events that do not begin with its settings."""
    begun = next((event for event in events if isinstance(event, Begun)), None)
    if begun is None:
        raise ValueError("a trajectory begins with its settings")
    said = begun.settings
    return Chain(
        arm=said[keys.arm], target=said[keys.target].partition("-")[0], repeat=int(said[keys.repeat]),
        shots=tuple(_shots(events)), design=said.get("design", ""), model=begun.model,
    )  # fmt: skip


def _shots(events: Iterable[Event]) -> Iterator[Shot]:
    """The shots in their order; the root, which no call brought, is none."""
    tokens, usd = 0, 0.0
    by_step: dict[int, Verdict | None] = {}
    verdict: Verdict | None = None
    step = 0
    for event in events:
        if isinstance(event, Answered):
            tokens += event.usage.total_input_tokens + event.usage.output_tokens
            usd += event.usage.cost_usd
            continue
        if isinstance(event, Noted) and event.topic == VERDICT_TOPIC:
            verdict = from_json(event.text, VerdictMessage).verdict
            continue
        again = AGAIN.match(event.text) if isinstance(event, Noted) and event.topic == STEP_TOPIC else None
        malformed = isinstance(event, Noted) and event.topic == MALFORMED_TOPIC
        if isinstance(event, Judged) and not event.call:
            by_step[0] = verdict
        elif isinstance(event, Judged) or malformed or again is not None:
            step += 1
            said = by_step.get(int(again[1])) if again is not None else None if malformed else verdict
            by_step[step] = said
            yield Shot(verdict=said, tokens=tokens, usd=usd)
