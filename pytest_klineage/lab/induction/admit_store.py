"""Trials on disk, beside the card that they are about: what was begun from, what was made, and every verdict.

skills/<card>/trials/<number>-<case>/
    trial.json          the record: target, outcome, names of the files below
    trajectory.jsonl    prompts and replies, as the session wrote them
    verdicts.jsonl      every verdict with its samples, in order
    basis.json          the verdict on the state, before any kernel of the model; older trials have none
    state.*, kernel.*   the fresh state, and the kernel that the trial is about, if there is one; no file where
                        trial.json has less: a lineage and a digest for the state, an edit of the state for the kernel
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.induction.admit import Roundtrip
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget
from pytest_klineage.lab.induction.derive import without_header
from pytest_klineage.lab.induction.retime import rederived_source
from pytest_klineage.lab.library.lineages import StoredLineage, edit_between, load_lineage, read_json, texts_of
from pytest_klineage.records import (
    Category,
    Edit,
    KernelCase,
    KernelSource,
    SourceFile,
    StateFile,
    Surface,
    Trial,
    Verdict,
)
from pytest_klineage.records.edits import EditError, apply_edit
from pytest_klineage.records.verdict import SCHEMA_VERSION
from pytest_klineage.results.storage import outlined_json, write_atomically

FOLDER = "trials"
TRIAL_FILE, TRAJECTORY_FILE, VERDICTS_FILE = "trial.json", "trajectory.jsonl", "verdicts.jsonl"
BASIS_FILE = "basis.json"
OUTLINE = 1
"""Levels of the JSON files that are indented; what lies below is one line."""


class StoredKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel by its files beside trial.json, by a lineage that has it, or by an edit of the trial's state."""

    files: tuple[StateFile, ...]
    """The first is the one that is compiled or imported. They are here where neither `lineage` nor `edit` is given."""
    entry: str
    flags: tuple[str, ...] = ()
    source_digest: str
    lineage: str = ""
    """The folder, relative to this one, of the lineage that has a kernel of this digest: see `kernels_of`."""
    edit: Edit | None = None
    """What makes the kernel from the trial's state, where that is shorter than its files."""


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

    A state that one of the `lineages` has is referred to; the lineage must stay where it is, seen from the trial.

    Raises UsageError for a roundtrip that is no trial, and when writing fails.
    """
    if done.trial is None:
        raise UsageError(f"there is no trial to store: {done.message}")
    target = done.target
    directory = folder / FOLDER / f"{len(trial_folders(folder)) + 1:02d}-{target.case.id}"
    state, texts = _stored_state(target.state, directory, lineages)
    kernel, more = _stored_kernel(done.kernel, target.state) if done.kernel is not None else (None, {})
    record = TrialRecord(
        card=card, case=target.case, platform=target.platform, surface=target.surface, prior=target.prior,
        why=target.why, state=state, kernel=kernel, trial=done.trial,
    )  # fmt: skip
    try:
        if not (directory / TRIAL_FILE).exists():  # what was cut off before it was a trial
            shutil.rmtree(directory, ignore_errors=True)
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
    state = _source(directory, record.surface, record.state, "state")
    target = AdmissionTarget(
        case=record.case, platform=record.platform, surface=record.surface, prior=record.prior, why=record.why,
        rule=record.trial.rule, expected=record.trial.expected, state=state,
    )  # fmt: skip
    kernel = None
    if record.kernel is not None:
        kernel = _source(directory, record.surface, record.kernel, "kernel", texts_of(state))
    if kernel is not None and record.trial.source_digest != kernel.digest:
        raise BadRecord(f"{path}: the trial is about another kernel ({record.trial.source_digest[:12]})")
    return StoredTrial(directory=directory, record=record, target=target, kernel=kernel)


def tried(trials: Sequence[StoredTrial]) -> set[str]:
    """Names of the targets that these trials were on."""
    return {trial.target.name for trial in trials}


def kernels_of(stored: StoredLineage) -> list[KernelSource]:
    """What trials begin from: states and re-derived kernels, with the header that the author wrote or without."""
    again = (rederived_source(stored, index) for index in range(len(stored.lineage.transitions)))
    known = [*stored.sources, *(source for source in again if source is not None)]
    return [*known, *map(without_header, known)]


def _stored_state(
    state: KernelSource, directory: Path, lineages: Sequence[StoredLineage]
) -> tuple[StoredKernel, dict[str, str]]:
    """A state's entry for trial.json, and its texts by file: none where a lineage has it."""
    entry, texts = _stored("state", state)
    of = next((one for one in lineages if _of_digest(one, state.digest) is not None), None)
    if of is None:
        return entry, texts
    where = os.path.relpath(of.directory.resolve(), directory.resolve())
    return msgspec.structs.replace(entry, lineage=where), {}


def _stored_kernel(kernel: KernelSource, state: KernelSource) -> tuple[StoredKernel, dict[str, str]]:
    """A kernel's entry for trial.json, and its texts by file: none where an edit of the state is shorter."""
    entry, texts = _stored("kernel", kernel)
    edit = edit_between(state, kernel)
    if len(edit.diff) >= sum(map(len, texts.values())):
        return entry, texts
    return msgspec.structs.replace(entry, edit=edit), {}


def _stored(stem: str, source: KernelSource) -> tuple[StoredKernel, dict[str, str]]:
    """A kernel's entry for trial.json, and its texts by file."""
    files = tuple(
        StateFile(file.name, f"{stem}{Path(file.name).suffix}" if position == 0 else f"{stem}.{file.name}")
        for position, file in enumerate(source.files)
    )
    entry = StoredKernel(files=files, entry=source.entry, flags=source.flags, source_digest=source.digest)
    return entry, {stored.path: file.text for stored, file in zip(files, source.files, strict=True)}


def _of_digest(stored: StoredLineage, digest: str) -> KernelSource | None:
    return next((source for source in kernels_of(stored) if source.digest == digest), None)


def _texts(directory: Path, stored: StoredKernel, state: Mapping[str, str]) -> Mapping[str, str]:
    """The texts by file. Raises BadRecord where lineage or edit do not give them, and what `load_lineage` raises."""
    if stored.lineage:
        found = _of_digest(load_lineage(directory / stored.lineage), stored.source_digest)
        if found is None:
            raise BadRecord(f"{directory / TRIAL_FILE}: {stored.lineage} has no kernel {stored.source_digest[:12]}")
        return texts_of(found)
    if stored.edit is None:
        return {file.name: _read(directory, file.path) for file in stored.files}
    try:
        return apply_edit(stored.edit, state, renames=True)
    except EditError as error:
        raise BadRecord(f"{directory / TRIAL_FILE}: the edit of the state does not apply: {error}") from error


def _read(directory: Path, name: str) -> str:
    if Path(name).name != name:
        raise BadRecord(f"{directory / TRIAL_FILE}: {name!r} is not the plain name of a file beside it")
    try:
        # Bytes, not text: reading as text would change line ends, and the digest is over what is there.
        return (directory / name).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{directory / name} cannot be read: {error}") from error


def _source(
    directory: Path, surface: Surface, stored: StoredKernel, label: str, state: Mapping[str, str] | None = None
) -> KernelSource:
    """The kernel, from the texts of the state where it is an edit. Raises BadRecord where its digest is another."""
    texts = _texts(directory, stored, state or {})
    files = tuple(SourceFile(name=file.name, text=texts.get(file.name, "")) for file in stored.files)
    source = KernelSource(surface=surface, files=files, entry=stored.entry, flags=stored.flags, label=label)
    if source.digest != stored.source_digest:
        raise BadRecord(
            f"{directory}: the digest of its {label} is {source.digest[:12]}, the trial says "
            f"{stored.source_digest[:12]}: it was changed"
        )
    return source
