"""Lineages on disk: lineage.json and the file of every state beside it; reading, writing and verifying. No judging.

experts/<operator>/<platform>-<surface>/lineage/
    lineage.json        the Lineage record: states, transitions, what was refused, why it ended
    00-naive.cpp        one file per state, naive first; further files of a state are called 00-naive.NAME
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.library.edits import EditError, apply_edit
from pytest_klineage.records import (
    Edit,
    KernelSource,
    Lineage,
    LineageState,
    SourceFile,
    StateFile,
    Status,
    Transition,
    Verdict,
    from_json,
)
from pytest_klineage.results.storage import record_json, write_atomically

FOLDER = "lineage"
LINEAGE_FILE = "lineage.json"
RIGHT = (Status.ACCEPTED, Status.SLOWER, Status.INCONCLUSIVE)
"""Statuses of a kernel that computes the right thing; a simpler state may well be slow."""


class BrokenLineage(BadRecord):
    """A lineage whose files, edits, verdicts or digests do not fit together; the message names the file."""


class StoredLineage(msgspec.Struct, frozen=True, kw_only=True):
    """A lineage with the sources of its states, as read from or written to a folder."""

    directory: Path
    lineage: Lineage
    sources: tuple[KernelSource, ...]
    """In the order of the states."""


def state_of(index: int, name: str, source: KernelSource, verdict: Verdict) -> LineageState:
    """The state at this place of a lineage, with paths for its files."""
    stem = f"{index:02d}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'state'}"
    files = [
        StateFile(file.name, f"{stem}{Path(file.name).suffix}" if place == 0 else f"{stem}.{file.name}")
        for place, file in enumerate(source.files)
    ]
    return LineageState(
        name=name, files=tuple(files), entry=source.entry, flags=source.flags, source_digest=source.digest,
        verdict=verdict,
    )  # fmt: skip


def save_lineage(directory: Path, lineage: Lineage, sources: Sequence[KernelSource]) -> StoredLineage:
    """Seal, verify and write a lineage. Raises BrokenLineage before anything is written, UsageError if writing fails.

    Files that an earlier lineage in this folder had and this one has not are removed.
    """
    stored = StoredLineage(directory=directory, lineage=lineage.sealed(), sources=tuple(sources))
    verify_lineage(stored)
    paths = {
        entry.path: file.text
        for state, source in zip(stored.lineage.states, stored.sources, strict=True)
        for entry, file in zip(state.files, source.files, strict=True)
    }
    try:
        stale = _listed_paths(directory) - set(paths)
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            write_atomically(directory / path, text.encode())
        write_atomically(directory / LINEAGE_FILE, record_json(stored.lineage))
        for path in stale:
            (directory / path).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"the lineage {directory} cannot be written: {error.strerror or error}") from error
    return stored


def load_lineage(directory: Path) -> StoredLineage:
    """Read a lineage and the files of its states, without verifying it.

    Raises UsageError when there is none, BadRecord when it does not decode, BrokenLineage when a file is missing.
    """
    lineage = read_record(directory)
    return StoredLineage(
        directory=directory,
        lineage=lineage,
        sources=tuple(_source(directory, lineage, state) for state in lineage.states),
    )


def read_record(directory: Path) -> Lineage:
    """The record alone. Raises UsageError or BadRecord, with the file's name."""
    path = directory / LINEAGE_FILE
    try:
        return from_json(path.read_bytes(), Lineage)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except BadRecord as error:
        raise BadRecord(f"{path}: {error}") from error


def find_lineages(experts: Path) -> list[Path]:
    """Folders of all lineages below experts/, sorted."""
    return sorted(path.parent for path in experts.glob(f"*/*/{FOLDER}/{LINEAGE_FILE}"))


def verify_lineage(stored: StoredLineage) -> None:
    """Raises BrokenLineage with everything that `problems_of` finds."""
    if problems := problems_of(stored):
        raise BrokenLineage(f"{stored.directory}: {'; '.join(problems)}")


def problems_of(stored: StoredLineage) -> list[str]:
    """Why the lineage cannot be believed, each with the file's name; empty for a good one.

    Source digests, verdicts on those very sources, edits that give the next state's bytes, and the chain of digests.
    """
    lineage = stored.lineage
    if len(lineage.states) != len(lineage.transitions) + 1 or len(stored.sources) != len(lineage.states):
        return [
            f"{LINEAGE_FILE}: {len(lineage.states)} states ({len(stored.sources)} sources) do not fit "
            f"{len(lineage.transitions)} transitions"
        ]
    problems = [f"{LINEAGE_FILE}: {text}" for text in _whole(lineage)]
    for state, source in zip(lineage.states, stored.sources, strict=True):
        where = state.files[0].path if state.files else LINEAGE_FILE
        problems += [f"{where}: {text}" for text in _state_problems(lineage, state, source)]
    for index, transition in enumerate(lineage.transitions):
        where = f"{LINEAGE_FILE}: transition {index + 1} ({transition.category.value})"
        before, after = stored.sources[index], stored.sources[index + 1]
        problems += [f"{where}: {text}" for text in _transition_problems(lineage, index, before, after)]
    return problems + [f"{LINEAGE_FILE}: {text}" for text in _chain_problems(lineage)]


def transition_digests(lineage: Lineage) -> tuple[str, ...]:
    """Digests of the transitions, naive first: what cards cite as evidence."""
    return tuple(transition.digest for transition in lineage.transitions)


def _listed_paths(directory: Path) -> set[str]:
    """Files that the lineage which lies there now has; a damaged one has none that we would dare to remove."""
    try:
        lineage = read_record(directory)
    except UsageError:
        return set()
    return {file.path for state in lineage.states for file in state.files if _is_plain(file.path)}


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[^/\0@.-][^/\0]*", name) is not None and name != LINEAGE_FILE


def _source(directory: Path, lineage: Lineage, state: LineageState) -> KernelSource:
    files = []
    for file in state.files:
        if not _is_plain(file.path):
            raise BrokenLineage(f"{directory / LINEAGE_FILE}: {file.path!r} is not the plain name of a file beside it")
        path = directory / file.path
        try:
            # Bytes, not text: reading as text would turn CRLF into LF, and the digest is over what is there.
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise BrokenLineage(f"{path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise BrokenLineage(f"{path} is not UTF-8: {error}") from error
        files.append(SourceFile(name=file.name, text=text))
    return KernelSource(
        surface=lineage.surface, files=tuple(files), entry=state.entry, flags=state.flags, label=state.name
    )


def _whole(lineage: Lineage) -> Iterator[str]:
    if lineage.case.operator != lineage.operator:
        yield f"the lineage is of {lineage.operator}, its case of {lineage.case.operator}"
    paths = [file.path for state in lineage.states for file in state.files]
    yield from (f"{path!r} is not the plain name of a file beside it" for path in paths if not _is_plain(path))
    yield from (f"two states share the file {path}" for path in sorted(set(paths)) if paths.count(path) > 1)


def _state_problems(lineage: Lineage, state: LineageState, source: KernelSource) -> Iterator[str]:
    if not state.files:
        yield f"the state {state.name!r} has no files"
    if source.digest != state.source_digest:
        yield f"its digest is {source.digest[:12]}, the lineage says {state.source_digest[:12]}: it was changed"
    yield from _verdict_problems(lineage, state.verdict, state.source_digest, f"the verdict of {state.name!r}")


def _verdict_problems(lineage: Lineage, verdict: Verdict, digest: str, which: str) -> Iterator[str]:
    if verdict.source_digest != digest:
        yield f"{which} is about another source ({verdict.source_digest[:12]} instead of {digest[:12]})"
    if verdict.case.id != lineage.case.id:
        yield f"{which} is about {verdict.case.id}, the lineage about {lineage.case.id}"
    if verdict.machine is not None and verdict.machine.platform != lineage.platform:
        yield f"{which} is from {verdict.machine.platform}, the lineage from {lineage.platform}"
    if verdict.status not in RIGHT:
        yield f"{which} is {verdict.status.value}: only right kernels are states"


def _transition_problems(lineage: Lineage, index: int, before: KernelSource, after: KernelSource) -> Iterator[str]:
    transition, states = lineage.transitions[index], lineage.states
    if (transition.before, transition.after) != (states[index].source_digest, states[index + 1].source_digest):
        yield f"it does not lead from {states[index].name!r} to {states[index + 1].name!r}"
    yield from _edit_problems(transition.forward, before, after, "forward")
    yield from _edit_problems(transition.backward, after, before, "backward")
    yield from _rederived_problems(transition, before, after)
    which = "the verdict of the forward edit"
    yield from _verdict_problems(lineage, transition.forward_verdict, transition.forward_digest, which)


def _edit_problems(edit: Edit, start: KernelSource, end: KernelSource, name: str) -> Iterator[str]:
    try:
        given = apply_edit(edit, _texts(start))
    except EditError as error:
        yield f"the {name} edit does not apply: {error}"
        return
    wanted = _texts(end)
    for file in sorted({*given, *wanted}):
        if given.get(file) != wanted.get(file):
            yield f"the {name} edit does not give the bytes of {file} in the state {end.label!r}"


def _rederived_problems(transition: Transition, before: KernelSource, after: KernelSource) -> Iterator[str]:
    if transition.rederived is None:
        return
    try:
        given = apply_edit(transition.rederived.edit, _texts(before))
    except EditError as error:
        yield f"the re-derived edit does not apply: {error}"
        return
    digest = with_files(after, given).digest
    if digest != transition.rederived.source_digest:
        yield f"the re-derived edit gives {digest[:12]}, not {transition.rederived.source_digest[:12]}"


def _chain_problems(lineage: Lineage) -> Iterator[str]:
    sealed = lineage.sealed()
    # From the expert backward, as the chain runs: the first that differs is where it was broken.
    for index in range(len(lineage.transitions) - 1, -1, -1):
        if lineage.transitions[index].digest != sealed.transitions[index].digest:
            yield f"the chain of digests breaks at transition {index + 1}: it, or one made before it, was changed"
            return
    if lineage.digest != sealed.digest:
        yield "its digest is not that of its content: states, rejections or the end were changed"


def with_files(source: KernelSource, files: Mapping[str, str]) -> KernelSource:
    """The source with other texts: its own files in their order, then new ones by name."""
    kept = [file.name for file in source.files if file.name in files]
    names = [*kept, *sorted(set(files) - set(kept))]
    return msgspec.structs.replace(source, files=tuple(SourceFile(name, files[name]) for name in names))


def _texts(source: KernelSource) -> dict[str, str]:
    return {file.name: file.text for file in source.files}
