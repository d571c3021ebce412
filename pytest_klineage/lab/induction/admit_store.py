"""Trials on disk, beside the card that they are about: what was begun from, what was made, and every verdict.

skills/<card>/trials/<number>-<case>/
    trial.json          the record: target, outcome, names of the files below
    trajectory.jsonl    prompts and replies, as the session wrote them
    verdicts.jsonl      every verdict with its samples, in order
    basis.json          the verdict on the state, before any kernel of the model; older trials have none
    state.*, kernel.*   the fresh state, and the kernel that the trial is about, if there is one; a state of a lineage
                        is named by the lineage's folder and its digest, and has no file here
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.induction.admit import Roundtrip
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget
from pytest_klineage.lab.library.lineages import StoredLineage, load_lineage, read_json
from pytest_klineage.records import (
    Category,
    KernelCase,
    KernelSource,
    SourceFile,
    StateFile,
    Surface,
    Trial,
    Verdict,
)
from pytest_klineage.records.verdict import SCHEMA_VERSION
from pytest_klineage.results.storage import outlined_json, write_atomically

FOLDER = "trials"
TRIAL_FILE, TRAJECTORY_FILE, VERDICTS_FILE = "trial.json", "trajectory.jsonl", "verdicts.jsonl"
BASIS_FILE = "basis.json"
OUTLINE = 1
"""Levels of the JSON files that are indented; what lies below is one line."""


class StoredKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel by its files beside trial.json."""

    files: tuple[StateFile, ...]
    """The first is the one that is compiled or imported."""
    entry: str
    flags: tuple[str, ...] = ()
    source_digest: str
    lineage: str = ""
    """The folder, relative to this one, of the lineage that has a state of this digest; empty where files are here."""


class TrialRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="schema_version", tag=SCHEMA_VERSION,
):  # fmt: skip
    """One roundtrip, so that it can be judged and replayed again."""

    card: str
    """The card's name."""
    case: KernelCase
    """With `at_least`: the speedup over the state that had to be shown."""
    platform: str
    surface: Surface
    prior: tuple[Category, ...] = ()
    why: str = ""
    state: StoredKernel
    kernel: StoredKernel | None = None
    trial: Trial
    """As the card's log has it."""


class StoredTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial as read from its folder."""

    directory: Path
    record: TrialRecord
    target: AdmissionTarget
    kernel: KernelSource | None

    @property
    def trajectory(self) -> Path:
        """The recorded session."""
        return self.directory / TRAJECTORY_FILE


def save_trial(
    folder: Path,
    card: str,
    done: Roundtrip,
    *,
    trajectory: Path,
    verdicts: Path,
    basis: Verdict | None = None,
    lineages: Sequence[StoredLineage] = (),
) -> StoredTrial:
    """Write a trial below the card's folder, with copies of its trajectory and verdicts, and read it back.

    A state that one of the `lineages` has is referred to. It must stay where it is, seen from the trial.

    Raises UsageError for a roundtrip that is no trial, and when writing fails.
    """
    if done.trial is None:
        raise UsageError(f"there is no trial to store: {done.message}")
    target = done.target
    directory = folder / FOLDER / f"{len(trial_folders(folder)) + 1:02d}-{target.case.id}"
    state, texts = _stored("state", target.state)
    if of := [one for one in lineages if any(source.digest == target.state.digest for source in one.sources)]:
        where = os.path.relpath(of[0].directory.resolve(), directory.resolve())
        state, texts = msgspec.structs.replace(state, lineage=where), {}
    kernel, more = _stored("kernel", done.kernel) if done.kernel is not None else (None, {})
    record = TrialRecord(
        card=card, case=target.case, platform=target.platform, surface=target.surface, prior=target.prior,
        why=target.why, state=state, kernel=kernel, trial=done.trial,
    )  # fmt: skip
    try:
        directory.mkdir(parents=True)
        for name, text in {**texts, **more}.items():
            write_atomically(directory / name, text.encode())
        shutil.copyfile(trajectory, directory / TRAJECTORY_FILE)
        # Nothing was judged where no reply held a kernel.
        write_atomically(directory / VERDICTS_FILE, verdicts.read_bytes() if verdicts.exists() else b"")
        if basis is not None:
            write_atomically(directory / BASIS_FILE, outlined_json(basis, OUTLINE))
        write_atomically(directory / TRIAL_FILE, outlined_json(record, OUTLINE))
    except OSError as error:
        raise UsageError(f"the trial {directory} cannot be written: {error.strerror or error}") from error
    return read_trial(directory)


def trial_folders(folder: Path) -> list[Path]:
    """Folders of a card's trials, in the order in which they were made."""
    return sorted(path.parent for path in folder.glob(f"{FOLDER}/*/{TRIAL_FILE}"))


def read_trial(directory: Path) -> StoredTrial:
    """A trial and its kernels. Raises UsageError or BadRecord, with the file's name, when something does not fit."""
    path = directory / TRIAL_FILE
    record = read_json(path, TrialRecord)
    target = AdmissionTarget(
        case=record.case, platform=record.platform, surface=record.surface, prior=record.prior, why=record.why,
        rule=record.trial.rule, expected=record.trial.expected,
        state=_source(directory, record.surface, record.state, "state"),
    )  # fmt: skip
    kernel = _source(directory, record.surface, record.kernel, "kernel") if record.kernel is not None else None
    if kernel is not None and record.trial.source_digest != kernel.digest:
        raise BadRecord(f"{path}: the trial is about another kernel ({record.trial.source_digest[:12]})")
    return StoredTrial(directory=directory, record=record, target=target, kernel=kernel)


def tried(trials: Sequence[StoredTrial]) -> set[str]:
    """Names of the targets that these trials were on."""
    return {trial.target.name for trial in trials}


def _stored(stem: str, source: KernelSource) -> tuple[StoredKernel, dict[str, str]]:
    """A kernel's entry for trial.json, and its texts by file."""
    files = tuple(
        StateFile(file.name, f"{stem}{Path(file.name).suffix}" if position == 0 else f"{stem}.{file.name}")
        for position, file in enumerate(source.files)
    )
    entry = StoredKernel(files=files, entry=source.entry, flags=source.flags, source_digest=source.digest)
    return entry, {stored.path: file.text for stored, file in zip(files, source.files, strict=True)}


def _of_lineage(directory: Path, stored: StoredKernel) -> KernelSource:
    """Raises BadRecord where the lineage that is named has no such state, and what `load_lineage` raises."""
    lineage = load_lineage(directory / stored.lineage)
    found = next((source for source in lineage.sources if source.digest == stored.source_digest), None)
    if found is None:
        raise BadRecord(f"{directory / TRIAL_FILE}: {stored.lineage} has no state {stored.source_digest[:12]}")
    return found


def _source(directory: Path, surface: Surface, stored: StoredKernel, label: str) -> KernelSource:
    if stored.lineage:
        return msgspec.structs.replace(_of_lineage(directory, stored), label=label)
    files = []
    for file in stored.files:
        if Path(file.path).name != file.path:
            raise BadRecord(f"{directory / TRIAL_FILE}: {file.path!r} is not the plain name of a file beside it")
        try:
            # Bytes, not text: reading as text would change line ends, and the digest is over what is there.
            files.append(SourceFile(name=file.name, text=(directory / file.path).read_bytes().decode("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{directory / file.path} cannot be read: {error}") from error
    source = KernelSource(surface=surface, files=tuple(files), entry=stored.entry, flags=stored.flags, label=label)
    if source.digest != stored.source_digest:
        raise BadRecord(
            f"{directory}: the digest of its {label} is {source.digest[:12]}, the trial says "
            f"{stored.source_digest[:12]}: it was changed"
        )
    return source
