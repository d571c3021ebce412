"""The chains of an experiment, read from their trajectories: one target in one arm, shot by shot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage
from pytest_klineage.lab.optimizers.session import MALFORMED_TOPIC, STEP_TOPIC
from pytest_klineage.records import Answered, Code, Event, Failed, Judged, Noted, Status, Verdict, begun_of, from_json
from pytest_klineage.results.packed import line_files, read_lines
from pytest_klineage.results.runs import Record

SUCCESS = 0.5
"""Share of the reference's speed from which a right kernel is a success."""
ROOT = "naive"
"""Label of the kernel that a chain begins with."""
AGAIN = re.compile(r"step \d+: the same kernel as step (\d+),")
"""How a run notes a kernel that it was sent before."""


class ShotFailure(StrEnum):
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
    Status.BUILD_ERROR: ShotFailure.BUILD, Status.WRAPPER: ShotFailure.REFUSED, Status.CHEAT: ShotFailure.REFUSED,
    Status.RUNTIME_ERROR: ShotFailure.CRASH, Status.TIMEOUT: ShotFailure.HANG,
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
        return self.speedup is not None and self.speedup >= least

    @property
    def speedup(self) -> float | None:
        """Of a right kernel over the reference; None for any other."""
        timing = self.verdict.timing if self.verdict is not None and self.verdict.scored else None
        return None if timing is None else timing.speedup.estimate

    def failure(self, least: float = SUCCESS) -> ShotFailure | None:
        """Why it is no success; None for one."""
        if self.verdict is None:
            return ShotFailure.MALFORMED
        if self.succeeds(least):
            return None
        return ShotFailure.SLOW if self.verdict.scored else KINDS.get(self.verdict.status, ShotFailure.WRONG)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one target in one arm."""

    arm: str
    target: str
    repeat: int
    shots: tuple[Shot, ...]
    root: Verdict | None = None
    """On the kernel that it begins with, where that was judged."""
    case: str = ""
    """Id of the target's case."""
    design: str = ""
    """Digest of the frozen design that it was run under."""
    model: str = ""
    """As the answering side calls it; several after commas."""

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


def root_speeds(path: Path) -> dict[str, float]:
    """The speedup of each case's root over its reference, from a file of records; of several the last one.

    A root is ours, so too few pairs to exclude an answer from memory are enough: one call of a naive kernel may take
    half a second. Empty where there is no file. Raises BadRecord.
    """
    verdicts = [record.verdict for record in read_lines(path, Record)]
    return {
        one.case.id: one.timing.speedup.estimate
        for one in verdicts
        if one.label == ROOT and (one.scored or one.code is Code.INCONCLUSIVE_FEW) and one.timing is not None
    }


def chain_of(events: Sequence[Event], keys: Keys) -> Chain:
    """One chain. Raises ValueError for events that do not begin with its settings."""
    begun = begun_of(events)
    if begun is None:
        raise ValueError("a trajectory begins with its settings")
    said, (root, shots) = begun.settings, _read(events)
    models = dict.fromkeys(event.model or begun.model for event in events if isinstance(event, Answered))
    return Chain(
        arm=said[keys.arm], target=said[keys.target].partition("-")[0], repeat=int(said[keys.repeat]),
        shots=shots, root=root, case=said.get("case", ""), design=said.get("design", ""),
        model=", ".join(models) or begun.model,
    )  # fmt: skip


def _read(events: Iterable[Event]) -> tuple[Verdict | None, tuple[Shot, ...]]:
    """The verdict on the root, which no call brought, and the shots in their order."""
    tokens, usd = 0, 0.0
    root: Verdict | None = None
    verdict: Verdict | None = None
    shots: list[Shot] = []
    for event in events:
        match event:
            case Answered(usage=usage):
                tokens += usage.total_input_tokens + usage.output_tokens
                usd += usage.cost_usd
                continue
            case Failed(cost_usd=charged):
                usd += charged
                continue
            case Noted(topic=topic, text=text) if topic == VERDICT_TOPIC:
                verdict = from_json(text, VerdictMessage).verdict
                continue
            case Judged(call=0):
                root = verdict
                continue
            case Judged():
                said = verdict
            case Noted(topic=topic) if topic == MALFORMED_TOPIC:
                said = None
            case Noted(topic=topic, text=text) if topic == STEP_TOPIC and (again := AGAIN.match(text)):
                said = shots[int(again[1]) - 1].verdict if int(again[1]) else root
            case _:
                continue
        shots.append(Shot(verdict=said, tokens=tokens, usd=usd))
    return root, tuple(shots)
