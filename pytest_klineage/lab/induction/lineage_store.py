"""A walk and its files: making a lineage in an expert's folder, and replaying the trajectory that was kept with it.

experts/<operator>/<platform>-<surface>/lineage/
    lineage.json, 00-naive.cpp, ...   see library.lineages
    trajectory.jsonl                  every prompt, reply and charge of the walk
    verdicts.jsonl                    every verdict, those on refused kernels included
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, StoreError
from pytest_klineage.lab.induction.verdicts import (
    VERDICTS_FILE,
    Judge,
    LiveJudging,
    ReplayJudging,
    VerdictFile,
)
from pytest_klineage.lab.induction.walk import Report, Walk, WalkOrigin, WalkResult, WalkSettings
from pytest_klineage.lab.library.lineages import StoredLineage, load_lineage, save_lineage
from pytest_klineage.lab.llm.backend import Backend, Reply
from pytest_klineage.lab.llm.conversation import PROMPT_SET, Conversation
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.records import Begun, Event, Lineage, Opened, Rejection, Stopped, Termination, begun_of, to_json
from pytest_klineage.results.packed import read_packed

TRAJECTORY_FILE = "trajectory.jsonl"
SETTINGS_KEY = "walk"
"""Under which name a trajectory keeps the walk's settings."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory walked again."""

    walked: WalkResult
    rejudged: tuple[Rejudged, ...]
    """Every recorded verdict with that of today, in their order."""
    differences: tuple[str, ...]
    """Where the lineage that it led to is not the one that was kept."""


def trajectory_settings(origin: WalkOrigin, settings: WalkSettings) -> dict[str, str]:
    """What a trajectory must remember of a walk, for `llm.Session.begin`."""
    return {"lineage": origin.name, "case": origin.case.id, SETTINGS_KEY: to_json(settings).decode()}


def induce(
    origin: WalkOrigin, session: Session, judge: Judge, directory: Path, *, report: Report | None = None
) -> StoredLineage:
    """Walk, and keep lineage, trajectory and verdicts in `directory`. The session's own file stays where it is.

    Verdicts lie beside the session's file until then, so that a walk which was ended anywhere goes on from there. The
    walk's settings are those that the trajectory was begun with: see `trajectory_settings`.
    """
    trajectory = session.trajectory.path
    file = VerdictFile(trajectory.with_name(f"{trajectory.stem}.{VERDICTS_FILE}"))
    settings = settings_of(_begun(session.events, trajectory))
    walked = Walk(origin, session, LiveJudging(session, file, judge), settings, report).run()
    stored = save_lineage(directory, walked.lineage, walked.sources)
    try:
        shutil.copyfile(trajectory, directory / TRAJECTORY_FILE)
        (directory / VERDICTS_FILE).write_bytes(read_packed(file.path))
    except OSError as error:
        raise StoreError(f"the trajectory cannot be kept in {directory}: {error.strerror or error}") from error
    return stored


def replay(directory: Path, judge: Judge | None, *, report: Report | None = None) -> Replayed:
    """Walk the kept trajectory of a lineage again: recorded replies and verdicts lead, and `judge` judges beside them.

    Raises UsageError without a trajectory, TrajectoryMismatch for a prompt that is not the recorded one, BadRecord for
    verdicts that are not those of the trajectory. Nothing in the directory is changed.
    """
    stored = load_lineage(directory)
    events = tuple(line.event for line in read_trajectory(directory / TRAJECTORY_FILE)[0])
    begun = _begun(events, directory / TRAJECTORY_FILE)
    contract = next((event.context[0] for event in events if isinstance(event, Opened) and event.context), "")
    lineage = stored.lineage
    origin = WalkOrigin(
        case=lineage.case, platform=lineage.platform, source=stored.sources[-1], contract=contract,
        name=lineage.provenance.get("expert", lineage.name),
    )  # fmt: skip
    judging = ReplayJudging(events, VerdictFile(directory / VERDICTS_FILE), judge)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / TRAJECTORY_FILE
        copy.write_bytes(read_packed(directory / TRAJECTORY_FILE))
        with Session.resume(copy, RecordedOnly(begun, events)) as session:
            walked = Walk(origin, session, judging, settings_of(begun), report).run()
    return Replayed(
        walked=walked,
        rejudged=tuple(judging.rejudged),
        differences=tuple(_differences(lineage, walked.lineage, same_words=begun.prompt_set == PROMPT_SET)),
    )


class RecordedOnly(Backend):
    """A model without further replies: the session gives what was recorded, and nothing else is answered."""

    def __init__(self, begun: Begun, events: tuple[Event, ...]) -> None:
        self.name, self.model = begun.backend, begun.model
        self._limit_usd = begun.budget_usd
        ends = [event.reason for event in events if isinstance(event, Stopped)]
        self._end = ends[-1] if ends else ""

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Raises what ended the recorded run: BudgetExhausted or BackendFailed; else TrajectoryMismatch."""
        if self._end == Termination.BUDGET.value:
            raise BudgetExhausted(self._limit_usd, 0.0, self._limit_usd)
        if self._end == Termination.INTERRUPTED.value:
            raise BackendFailed(Failure.CONNECTION, "the recorded run ended here", billed=False)
        raise TrajectoryMismatch(
            "the trajectory has no reply to what is asked next: it was recorded by another version, or is not whole. "
            "Make the lineage again, or take version and files of the recording."
        )

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Raises TrajectoryMismatch: no call gets this far."""
        raise TrajectoryMismatch("a replay sends nothing")


def settings_of(begun: Begun) -> WalkSettings:
    """The settings that a walk's trajectory was begun with. Raises BadRecord."""
    try:
        return msgspec.json.decode(begun.settings.get(SETTINGS_KEY, "{}"), type=WalkSettings)
    except msgspec.DecodeError as error:
        raise BadRecord(f"the trajectory {begun.name} has settings that cannot be read: {error}") from error


def _without_reasons(lineage: Lineage) -> Lineage:
    def bare(rejected: tuple[Rejection, ...]) -> tuple[Rejection, ...]:
        return tuple(msgspec.structs.replace(one, reason="") for one in rejected)

    steps = tuple(msgspec.structs.replace(step, rejected=bare(step.rejected)) for step in lineage.transitions)
    return msgspec.structs.replace(lineage, transitions=steps, rejected=bare(lineage.rejected))


def _begun(events: tuple[Event, ...], path: Path) -> Begun:
    found = begun_of(events)
    if found is None:
        raise BadRecord(f"{path} does not begin as a trajectory does")
    return found


def _differences(kept: Lineage, again: Lineage, *, same_words: bool) -> list[str]:
    """Where two lineages of one trajectory differ; how they ended counts, what it cost does not.

    Why proposals were refused is compared where both runs are of one prompt set.
    """
    if not same_words:
        kept, again = _without_reasons(kept), _without_reasons(again)
        kept = kept.sealed()
    found = []
    # Digests are computed when a lineage is kept; the one that was just walked has none yet.
    sealed = again.sealed()
    for name in ("states", "transitions", "rejected", "termination"):
        one, other = getattr(kept, name), getattr(sealed, name)
        if one != other:
            count = f": {len(one)} and {len(other)}" if isinstance(one, tuple) and len(one) != len(other) else ""
            found.append(f"{name} differ{count}")
    return found
