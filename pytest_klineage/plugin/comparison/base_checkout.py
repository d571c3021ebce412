"""The base of a pull request: which file of another checkout is the older version of a kernel.

Suites may hand over a kernel's text alone, not its path: then the file is found by name and text in the head's tree.
The base has its older version at the same place; that of a file that was renamed or moved is the most alike of those
that only the base has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.records import KernelSource, SourceFile

PASSED_OVER = frozenset({"__pycache__", "node_modules"})
"""Folders without kernels of the project's own; those with a dot in front and virtual environments are others."""

NAMED = re.compile(r'^[ \t]*(?:#[ \t]*include[ \t]*"([^"/\n]+)"|(?:from|import)[ \t]+\.?(\w+))', re.MULTILINE)
"""A file that another one names: in C++ with its suffix, in Python without."""

ALIKE = 0.5
"""Share of lines that a renamed file has kept at least; git's own limit for a rename."""


class KernelFiles:
    """The files of a tree by name, read once, on first use."""

    def __init__(self, root: Path, without: Path | None = None) -> None:
        self.root = root
        self._without = without

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for path in self._files():
            found.setdefault(path.name, []).append(path)
        return found

    def _files(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root):
            here = Path(folder)
            folders[:] = sorted(name for name in folders if self._enters(here / name))
            yield from (here / name for name in sorted(names))

    def _enters(self, folder: Path) -> bool:
        skipped = folder.name.startswith(".") or folder.name in PASSED_OVER or folder == self._without
        return not skipped and not (folder / "pyvenv.cfg").exists()

    def locate(self, file: SourceFile, near: Path) -> Path | None:
        """Where a kernel's file lies; ties resolve to the path closest to the folder `near`. None if not found."""
        return next(iter(self.places(file, near)), None)

    def gone(self, other: Path, suffix: str) -> list[Path]:
        """The files with that suffix whose place in another tree is empty."""
        named = (path for name, paths in self._by_name.items() if Path(name).suffix == suffix for path in paths)
        return [path for path in named if not (other / path.relative_to(self.root)).exists()]

    def places(self, file: SourceFile, near: Path) -> list[Path]:
        """Every file of this name and text, the closest to the folder `near` first."""
        same = [path for path in self._by_name.get(file.name, ()) if _text(path) == file.text]
        return sorted(same, key=lambda path: (-_shared(path, near), str(path)))


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

    def base_kernel(self, source: KernelSource, near: Path, at: Sequence[Path] = ()) -> KernelSource | None:
        """The base's version of a kernel, with the head's entry and flags; None when the base has no such file.

        The kernel's files lie at `at`, where that is known, in the source's order. Raises UsageError when the kernel
        has no file in the head, when it may be any of several of the base, or the base's cannot be read.
        """
        if source.main is None:
            raise UsageError("an installed module has no file that the base could have another version of")
        paths = [self._older(file, near, path) for file, path in zip_longest(source.files, at)]
        if paths[0] is None:
            return None
        files = [read(path) for path in paths if path is not None]
        older = msgspec.structs.replace(source, files=tuple(files))
        if older.digest == source.digest:
            return older
        return msgspec.structs.replace(older, files=(*files, *named_beside([path for path in paths if path])))

    def _older(self, file: SourceFile, near: Path, at: Path | None) -> Path | None:
        if at is not None and (own := self._at_the_same_place(at)) is not None:
            return own
        places = self.files.places(file, near)
        if not places:
            raise UsageError(f"no file of {self.files.root.name} has the name and the text of {file.name}")
        # A copy that was added beside the test, nearer than the file, must not make an old kernel a new one.
        there = [older for path in places if (older := self._at_the_same_place(path)) is not None]
        if len({_text(path) for path in there}) > 1:
            # The text of a changed kernel may have been written over another one of its name, which was slower.
            names = ", ".join(str(path.relative_to(self.base)) for path in there)
            raise UsageError(f"{file.name} has the text of several files, which differ in the base: {names}")
        return there[0] if there else self._renamed(file)

    def _at_the_same_place(self, path: Path) -> Path | None:
        """The base's file at the place of one of the head's, if it has one."""
        resolved = path.resolve()
        if not resolved.is_relative_to(self.files.root):
            return None
        there = self.base / resolved.relative_to(self.files.root)
        return there if there.is_file() else None

    def _renamed(self, file: SourceFile) -> Path | None:
        """What the head's file was called in the base, if anything; the most alike, then the first by name."""
        lines = file.text.splitlines()
        gone = sorted(self._older_files.gone(self.files.root, Path(file.name).suffix))
        found = [(alike(lines, _text(path) or ""), path) for path in gone]
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


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _shared(path: Path, near: Path) -> int:
    """How many folders two paths have in common, from the top."""
    pairs = zip(path.parent.parts, near.parts, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(near.parts))
