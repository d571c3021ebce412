"""Lineages on disk: lineage.json and the first state's files; reading, writing and verifying.

experts/<operator>/<platform>-<surface>/lineage/
    lineage.json        the Lineage record: states, transitions, what was refused, why it ended
    00-naive.cpp        the first state; its further files are called 00-naive.NAME. The others are made by edits
experts/<operator>/<platform>-<surface>/stages/
    the same for a lineage that the author of the expert wrote by hand; in derived/ what was made of its steps
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_klineage.errors import BadRecord, UnknownName, UsageError
from pytest_klineage.records import (
    Edit,
    KernelSource,
    Lineage,
    LineageState,
    Machine,
    SourceFile,
    StateFile,
    Status,
    Transition,
    Verdict,
    from_json,
)
from pytest_klineage.records.edits import EditError, apply_edit, diff_edit, state_texts
from pytest_klineage.results.retimed import effect_problems, read_retimed, with_effects
from pytest_klineage.results.spans import span_problems
from pytest_klineage.results.storage import outlined_json, write_atomically

T = TypeVar("T")
FOLDER, HAND_MADE, KEPT = "lineage", "stages", "derived"
LINEAGE_FILE = "lineage.json"
OUTLINE = 3
"""Levels of lineage.json that are indented: each field of a state and of a step is one line."""
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

    def state(self, name: str) -> tuple[LineageState, KernelSource]:
        """The state of that name, with its source. Raises UnknownName."""
        for state, source in zip(self.lineage.states, self.sources, strict=True):
            if state.name == name:
                return state, source
        raise UnknownName(f"state of {self.directory}", name, [state.name for state in self.lineage.states])

    def platforms_of(self, state: LineageState) -> tuple[str, ...]:
        """Platforms that a state can be built for."""
        return state.platforms or (self.lineage.platform,)


def state_of(index: int, name: str, source: KernelSource, verdict: Verdict) -> LineageState:
    """The state at this place of a lineage, with paths for its files."""
    stem = f"{index:02d}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'state'}"
    files = [
        StateFile(file.name, f"{stem}{Path(file.name).suffix}" if position == 0 else f"{stem}.{file.name}")
        for position, file in enumerate(source.files)
    ]
    return LineageState(
        name=name, files=tuple(files), entry=source.entry, flags=source.flags, source_digest=source.digest,
        verdict=verdict,
    )  # fmt: skip


def save_lineage(directory: Path, lineage: Lineage, sources: Sequence[KernelSource]) -> StoredLineage:
    """Seal, verify and write a lineage. Raises BrokenLineage before anything is written, UsageError if writing fails.

    Of the states the first is written; the others are its edits.
    Files that an earlier lineage in this folder had and this one has not are removed.
    """
    stored = StoredLineage(directory=directory, lineage=lineage.sealed(), sources=tuple(sources))
    verify_lineage(stored)
    first = zip(stored.lineage.states[0].files, stored.sources[0].files, strict=True)
    paths = {entry.path: file.text for entry, file in first}
    try:
        stale = _listed_paths(directory) - set(paths)
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            write_atomically(directory / path, text.encode())
        write_atomically(directory / LINEAGE_FILE, outlined_json(stored.lineage, OUTLINE))
        for path in stale:
            (directory / path).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"the lineage {directory} cannot be written: {error.strerror or error}") from error
    return stored


def load_lineage(directory: Path) -> StoredLineage:
    """Read a lineage and make the sources of its states, without verifying it.

    Raises UsageError without one, BadRecord when it does not decode, BrokenLineage when a file is missing or an
    edit does not apply.
    """
    lineage = read_record(directory)
    first = {file.name: _read(directory, file.path) for state in lineage.states[:1] for file in state.files}
    try:
        texts = list(state_texts(lineage, first))
    except EditError as error:
        raise BrokenLineage(f"{directory / LINEAGE_FILE}: {error}") from error
    pairs = zip(lineage.states, texts, strict=False)  # a number that does not fit is a problem of `problems_of`
    sources = tuple(_source(directory, lineage, *pair) for pair in pairs)
    return StoredLineage(directory=directory, lineage=lineage, sources=sources)


def read_record(directory: Path) -> Lineage:
    """The record alone. Raises UsageError or BadRecord, with the file's name."""
    return read_json(directory / LINEAGE_FILE, Lineage)


def read_json(path: Path, kind: type[T]) -> T:
    """The record of a file. Raises UsageError when it cannot be read, BadRecord with its name when it is damaged."""
    try:
        return from_json(path.read_bytes(), kind)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except BadRecord as error:
        raise BadRecord(f"{path}: {error}") from error


def read_timed(directory: Path) -> Lineage:
    """The record with the effects that count: see results.retimed. Raises UsageError or BadRecord."""
    return with_effects(read_record(directory), read_retimed(directory))


def find_lineages(experts: Path) -> list[Path]:
    """Folders of the lineages below experts/ that walks have made, sorted."""
    return sorted(path.parent for path in experts.glob(f"*/*/{FOLDER}/{LINEAGE_FILE}"))


def find_hand_made(experts: Path) -> list[Path]:
    """Folders of the lineages below experts/ that authors have written, sorted."""
    return sorted(path.parent for path in experts.glob(f"*/*/{HAND_MADE}/{LINEAGE_FILE}"))


def find_all(experts: Path) -> list[Path]:
    """Folders of the lineages below experts/, walked ones first."""
    return find_lineages(experts) + find_hand_made(experts)


def judged_on(lineage: Lineage) -> Machine | None:
    """The machine on which the author's states were judged: a prompt can be written before the judge is there."""
    found = [state.verdict.machine for state in lineage.states if state.verdict is not None]
    return found[-1] if found else None


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


def all_problems_of(stored: StoredLineage) -> list[str]:
    """The same, and what is wrong with its steps that were timed again, or together. Raises BadRecord."""
    retimed = effect_problems(stored.lineage, read_retimed(stored.directory))
    return [*problems_of(stored), *retimed, *span_problems(stored.lineage, stored.directory)]


def _listed_paths(directory: Path) -> set[str]:
    """Files that the lineage which lies there now has; a damaged one has none that we would dare to remove."""
    try:
        lineage = read_record(directory)
    except UsageError:
        return set()
    return {file.path for state in lineage.states for file in state.files if _is_plain(file.path)}


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[^/\0@.-][^/\0]*", name) is not None and name != LINEAGE_FILE


def _read(directory: Path, name: str) -> str:
    if not _is_plain(name):
        raise BrokenLineage(f"{directory / LINEAGE_FILE}: {name!r} is not the plain name of a file beside it")
    path = directory / name
    try:
        # Bytes, not text: reading as text would turn CRLF into LF, and the digest is over what is there.
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BrokenLineage(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BrokenLineage(f"{path} is not UTF-8: {error}") from error


def _source(directory: Path, lineage: Lineage, state: LineageState, texts: Mapping[str, str]) -> KernelSource:
    names = [file.name for file in state.files]
    if sorted(names) != sorted(texts):
        made = ", ".join(sorted(texts))
        raise BrokenLineage(f"{directory / LINEAGE_FILE}: the state {state.name!r} names other files than {made}")
    return KernelSource(
        surface=lineage.surface, files=tuple(SourceFile(name, texts[name]) for name in names), entry=state.entry,
        flags=state.flags, label=state.name,
    )  # fmt: skip


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
    if state.verdict is not None:
        yield from _verdict_problems(lineage, state.verdict, state.source_digest, f"the verdict of {state.name!r}")
    elif not lineage.hand_made:
        yield f"the state {state.name!r} has no verdict"


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
    if transition.backward is None or transition.forward_verdict is None:
        if not lineage.hand_made:
            yield "it has no backward edit, or no verdict of the forward edit"
        return
    yield from _edit_problems(transition.backward, after, before, "backward")
    yield from _rederived_problems(transition, before, after)
    which = "the verdict of the forward edit"
    yield from _verdict_problems(lineage, transition.forward_verdict, transition.forward_digest, which)


def _edit_problems(edit: Edit, start: KernelSource, end: KernelSource, name: str) -> Iterator[str]:
    try:
        given = apply_edit(edit, texts_of(start), renames=True)
    except EditError as error:
        yield f"the {name} edit does not apply: {error}"
        return
    wanted = texts_of(end)
    for file in sorted({*given, *wanted}):
        if given.get(file) != wanted.get(file):
            yield f"the {name} edit does not give the bytes of {file} in the state {end.label!r}"


def _rederived_problems(transition: Transition, before: KernelSource, after: KernelSource) -> Iterator[str]:
    if transition.rederived is None:
        return
    try:
        given = apply_edit(transition.rederived.edit, texts_of(before))
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


def edit_between(start: KernelSource, end: KernelSource) -> Edit:
    """The edit that makes the files of one kernel those of another."""
    return diff_edit(texts_of(start), texts_of(end))


def texts_of(source: KernelSource) -> dict[str, str]:
    """The texts of a kernel by file."""
    return {file.name: file.text for file in source.files}
