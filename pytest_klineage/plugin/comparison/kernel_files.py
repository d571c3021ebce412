"""The files of a tree by name. Which of them are a base's is `base_checkout`'s business."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pytest_klineage.records import SourceFile

PASSED_OVER = frozenset({"__pycache__", "node_modules"})
"""Folders without kernels of the project's own; those with a dot in front and virtual environments are others."""


class KernelFiles:
    """The files of a tree by name, read once, on first use."""

    def __init__(self, root: Path, without: Path | None = None) -> None:
        self.root = root
        self._without = without
        self._ending: dict[str, list[Path]] = {}

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

    def ending_with(self, place: str) -> list[Path]:
        """The files whose path ends like this, in whole names."""
        if place not in self._ending:
            named = self._by_name.get(Path(place).name, ())
            found = [path for path in named if f"/{path.relative_to(self.root).as_posix()}".endswith(f"/{place}")]
            self._ending[place] = found
        return self._ending[place]

    def places(self, file: SourceFile, near: Path) -> list[Path]:
        """Every file of this name and text, the closest to the folder `near` first."""
        same = [path for path in self._by_name.get(file.name, ()) if read_text(path) == file.text]
        return sorted(same, key=lambda path: (-_shared(path, near), str(path)))


def read_text(path: Path) -> str | None:
    """A file's text; None where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _shared(path: Path, near: Path) -> int:
    """How many folders two paths have in common, from the top."""
    pairs = zip(path.parent.parts, near.parts, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(near.parts))
