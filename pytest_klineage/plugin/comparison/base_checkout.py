"""The base of a pull request: which file of another checkout is the older version of a kernel.

Suites may hand over a kernel's text alone, not its path: then the file is found by name and text in the head's tree.
The base has its older version at the same place; that of a file that was renamed or moved is the most alike of those
that only the base has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.comparison.imports import Imports
from pytest_klineage.plugin.comparison.kernel_files import KernelFiles, read_text
from pytest_klineage.records import KernelSource, SourceFile

NAMED = re.compile(r'^[ \t]*(?:#[ \t]*include[ \t]*"([^"/\n]+)"|(?:from|import)[ \t]+\.?(\w+))', re.MULTILINE)
"""A file that another one names: in C++ with its suffix, in Python without."""

ALIKE = 0.5
"""Share of lines that a renamed file has kept at least; git's own limit for a rename."""


class BaseCheckout:
    """A checkout of the base beside the head that is being tested. Raises UsageError unless it is one."""

    def __init__(self, root: Path, base: Path) -> None:
        if not base.is_dir():
            raise UsageError(f"--klineage-base: {base} is not a folder; check the base out there: git worktree add")
        self.base = base.resolve()
        head = tree_of(root.resolve(), self.base)
        if head == self.base:
            raise UsageError(f"--klineage-base: {base} is the tree under test; name a checkout of the base")
        self.files = KernelFiles(head, without=self.base)
        self._older_files = KernelFiles(self.base)
        self._imports = Imports(self.files, self.base)

    def base_kernel(
        self, source: KernelSource, near: Path, at: Sequence[Path] = (), instead: Path | None = None
    ) -> KernelSource | None:
        """The base's version of a kernel, with the head's entry and flags; None when the base has no such file.

        The kernel's files lie at `at`, where that is known, in the source's order; `instead` is the base's file in the
        place of the first. Raises UsageError when the kernel has no file in the head, when it may be any of several of
        the base, the base's cannot be read, or only what it imports has changed and cannot be laid beside it.
        """
        if source.main is None:
            raise UsageError("an installed module has no file that the base could have another version of")
        first, *others = zip_longest(source.files, at)
        paths = [instead or self._older(*first, near), *(self._older(*one, near) for one in others)]
        if paths[0] is None:
            return None
        files = [read(path) for path in paths if path is not None]
        older = msgspec.structs.replace(source, files=tuple(files))
        unchanged = older.digest == source.digest
        beside = [] if unchanged else named_beside([path for path in paths if path])
        names = {file.name for file in (*files, *beside)}
        where = [self._folder(file, path, near) for file, path in zip_longest(source.files, at)]
        more = [file for file in self._older_imports(source, where, strict=unchanged) if file.name not in names]
        return msgspec.structs.replace(older, files=(*files, *beside, *more))

    def _folder(self, file: SourceFile, at: Path | None, near: Path) -> Path | None:
        """The folder of one of a kernel's files, where that is known."""
        path = at or self.files.locate(file, near)
        return path.resolve().parent if path else None

    def _older_imports(self, source: KernelSource, folders: Sequence[Path | None], *, strict: bool) -> list[SourceFile]:
        """The base's versions of what a kernel imports and that has changed, where these can lie beside it.

        Raises UsageError for others where nothing else has changed, when `strict`: nothing would be compared.
        """
        changed = self._imports.changed(source.files, folders)
        alone = [path for path in changed if self._is_alone(path)]
        if strict and (others := [str(path.relative_to(self.files.root)) for path in changed if path not in alone]):
            raise UsageError(f"what it imports has changed, and both would import the head's: {', '.join(others)}")
        return [read(older) for path in alone if (older := self.base / path.relative_to(self.files.root)).is_file()]

    def _is_alone(self, path: Path) -> bool:
        """Whether a file is imported by its name alone, and none other has it."""
        return not (path.parent / "__init__.py").is_file() and len(self.files.ending_with(path.name)) == 1

    def _older(self, file: SourceFile, at: Path | None, near: Path) -> Path | None:
        if at is not None and (own := self.at_the_same_place(at)) is not None:
            return own
        places = self.files.places(file, near)
        if not places:
            raise UsageError(f"no file of {self.files.root.name} has the name and the text of {file.name}")
        # A copy that was added beside the test, nearer than the file, must not make an old kernel a new one.
        there = [older for path in places if (older := self.at_the_same_place(path)) is not None]
        if len({read_text(path) for path in there}) > 1:
            # The text of a changed kernel may have been written over another one of its name, which was slower.
            names = ", ".join(str(path.relative_to(self.base)) for path in there)
            raise UsageError(f"{file.name} has the text of several files, which differ in the base: {names}")
        return there[0] if there else self._renamed(file)

    def at_the_same_place(self, path: Path) -> Path | None:
        """The base's file at the place of one of the head's, if it has one."""
        there = (self.base / place for place in places_of(path, self.files.root))
        return next((path for path in there if path.is_file()), None)

    def became_a_link(self, path: Path) -> bool:
        """Whether one of the head's files is a link, and the base's at its place a file."""
        older = self.in_base(path)
        return path.is_symlink() and older.is_file() and not older.is_symlink()

    def in_base(self, path: Path) -> Path:
        """Where the base has a file of the head, if it has it."""
        return next((self.base / place for place in places_of(path, self.files.root)), self.base / path.name)

    def _renamed(self, file: SourceFile) -> Path | None:
        """What the head's file was called in the base, if anything; the most alike, then the first by name."""
        lines = file.text.splitlines()
        gone = sorted(self._older_files.gone(self.files.root, Path(file.name).suffix))
        found = [(alike(lines, read_text(path) or ""), path) for path in gone]
        share, path = max(found, key=lambda one: one[0], default=(0.0, None))
        return path if share >= ALIKE else None


def alike(lines: list[str], text: str) -> float:
    """Share of lines that a file has in common with another, from 0 to 1."""
    compared = SequenceMatcher(None, lines, text.splitlines(), autojunk=False)
    return compared.ratio() if compared.quick_ratio() >= ALIKE else 0.0


def read(path: Path) -> SourceFile:
    """A file of the base. Raises UsageError when it cannot be read."""
    try:
        return SourceFile(name=path.name, text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the base's {path.name} cannot be read: {error}") from error


def named_beside(paths: list[Path]) -> list[SourceFile]:
    """Further files that these include or import, and that lie beside them.

    The head may have done away with one since: without it the base could not be built, and nothing would be compared.
    """
    known, found = {path.name for path in paths}, []
    while paths:
        path, *paths = paths
        for header, module in NAMED.findall(read(path).text):
            other = path.parent / (header or f"{module}.py")
            if other.name not in known and other.is_file():
                known.add(other.name)
                found.append(read(other))
                paths.append(other)
    return found


def tree_of(root: Path, base: Path) -> Path:
    """The folder of the head that `base` is another version of: the repository's, or pytest's root directory."""
    if (base / ".git").exists():
        return next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    return root


def places_of(path: Path, root: Path) -> list[Path]:
    """Where a file lies in a tree: as its path is written, then where links lead. Empty outside of it."""
    written, resolved = Path(os.path.abspath(path)), path.resolve()
    found = []
    if written.exists() and written.samefile(path):
        found = [written.relative_to(folder) for folder in written.parents if folder.resolve() == root]
    return [*found, *([resolved.relative_to(root)] if resolved.is_relative_to(root) else [])]
