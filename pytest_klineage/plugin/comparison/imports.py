"""Files of a tree that a kernel imports or includes, and which of them differ in another tree. Reads them as text."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from pytest_klineage.plugin.comparison.kernel_files import KernelFiles, read_text
from pytest_klineage.records import SourceFile

INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class Wanted(NamedTuple):
    """A module or package that a text imports."""

    level: int
    """How many dots stand in front; 0 for one from the top."""
    module: str
    """Its dotted name, empty for the package that the text lies in."""
    through: bool
    """Whether it is but a package that another lies in; what else it imports does not reach the imported name."""


class Imports:
    """What files of the head import; each text is parsed once."""

    def __init__(self, head: KernelFiles, base: Path) -> None:
        self._head, self._base = head, base
        self._parsed: dict[str, list[Wanted]] = {}

    def changed(self, files: Sequence[SourceFile], folders: Sequence[Path | None]) -> list[Path]:
        """Files of the head that these import, directly or not, and that the base has not or has otherwise.

        `folders` are those that the files lie in, where that is known.
        """
        own = {file.name: file.text for file in files}
        waiting = [(file.name, file.text, folder) for file, folder in zip(files, folders, strict=False)]
        compared: set[Path] = set()
        followed: set[Path] = set()
        changed = []
        while waiting:
            for path, through in self._found(*waiting.pop(), own):
                text = read_text(path)
                if text is None or own.get(path.name) == text:
                    continue
                if path not in compared and read_text(self._base / path.relative_to(self._head.root)) != text:
                    changed.append(path)
                compared.add(path)
                if not through and path not in followed:
                    followed.add(path)
                    waiting.append((path.name, text, path.parent))
        return changed

    def _found(self, name: str, text: str, folder: Path | None, own: Mapping[str, str]) -> Iterator[tuple[Path, bool]]:
        """Files that a text may import or include, and whether these are but packages that others lie in."""
        if not name.endswith(".py"):
            for header in INCLUDED.findall(text):
                found = self._included(header, folder, header in own, mine=own.get(name) == text)
                yield from ((path, False) for path in found)
            return
        if text not in self._parsed:
            self._parsed[text] = list(wanted(text))
        for level, module, through in self._parsed[text]:
            if level:
                yield from ((path, through) for path in self._below(folder, level, module))
            elif f"{module.partition('.')[0]}.py" not in own:
                yield from ((path, through) for path in self._from_the_top(module, folder))

    def _included(self, name: str, folder: Path | None, known: bool, *, mine: bool) -> list[Path]:
        """Those included by a name in quotes: the one beside, or all of that name; not what the kernel has itself.

        A kernel is built where its own files lie alone, so these come before what lies beside it in the tree.
        """
        beside = Path(os.path.normpath(folder / name)) if folder else None
        if known and mine:
            return []
        if beside is not None and os.path.isfile(beside):
            return [beside] if beside.is_relative_to(self._head.root) else []
        place = re.sub(r"^(\.\./)+", "", os.path.normpath(name))
        return [] if known else self._head.ending_with(place) or self._head.ending_with(Path(name).name)

    def _from_the_top(self, module: str, folder: Path | None) -> list[Path]:
        """Files of a module in folders that are no packages: beside the text or where Python looks, else any."""
        place = module.replace(".", "/")
        found = [
            (path.parents[end.count("/")], path)
            for end in (f"{place}.py", f"{place}/__init__.py")
            for path in self._head.ending_with(end)
        ]
        found = [(top, path) for top, path in found if not (top / "__init__.py").is_file()]
        if len({top for top, _ in found}) > 1:
            likely = {folder, *searched(module.partition(".")[0])}
            found = [one for one in found if one[0] in likely] or found
        return [path for _, path in found]

    def _below(self, folder: Path | None, level: int, module: str) -> list[Path]:
        """Files of a module named from the package in this folder, where they lie in the head."""
        if folder is None or level > len(folder.parents):
            return []
        place = (folder, *folder.parents)[level - 1].joinpath(*module.split("."))
        files = [place / "__init__.py", *([place.parent / f"{place.name}.py"] if module else [])]
        return [path for path in files if path.is_relative_to(self._head.root) and os.path.isfile(path)]


def wanted(text: str) -> Iterator[Wanted]:
    """The modules that a text imports, with the packages that they lie in; none of a text that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            # It binds the first package, and with that all that any of them imports.
            for alias in node.names:
                yield from (Wanted(0, name, through=False) for name in names_of(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [*([""] if node.level else []), *names_of(node.module or "")]
            yield from (Wanted(node.level, name, through=name != names[-1]) for name in names)
            for alias in node.names:
                yield Wanted(node.level, ".".join(filter(None, (node.module, alias.name))), through=False)


def names_of(module: str) -> list[str]:
    """A module's name and before it those of the packages that it lies in."""
    return list(accumulate(module.split("."), "{}.{}".format)) if module else []


def searched(module: str) -> set[Path]:
    """Folders where Python looks for a module from the top, and where an installed finder has it."""
    found = {Path(folder).resolve() for folder in sys.path}
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
        found |= {Path(place).resolve().parent for place in places}
    return found
