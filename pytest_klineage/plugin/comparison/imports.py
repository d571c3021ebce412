"""Files of a tree that a kernel imports or includes, and which of them differ in another tree. Reads them as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_klineage.plugin.comparison.kernel_files import KernelFiles, read_text
from pytest_klineage.records import SourceFile

INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def changed_imports(
    files: Sequence[SourceFile], folders: Sequence[Path | None], head: KernelFiles, base: Path
) -> list[Path]:
    """Files of the head that these import, directly or not, and that the base has not or has otherwise.

    `folders` are those that the files lie in, where that is known.
    """
    known = {(file.name, file.text) for file in files}
    waiting = [(file.name, file.text, folder) for file, folder in zip(files, folders, strict=False)]
    seen: set[Path] = set()
    changed = []
    while waiting:
        name, text, folder = waiting.pop()
        found = imported(text, folder, head) if name.endswith(".py") else included(text, folder, head)
        for path in found:
            other = read_text(path)
            if path in seen or other is None or (path.name, other) in known:
                continue
            seen.add(path)
            waiting.append((path.name, other, path.parent))
            if read_text(base / path.relative_to(head.root)) != other:
                changed.append(path)
    return changed


def included(text: str, folder: Path | None, head: KernelFiles) -> Iterator[Path]:
    """Files that a text in this folder may include by a name in quotes: the one there, or all of that name."""
    for name in INCLUDED.findall(text):
        beside = (folder / name).resolve() if folder else None
        yield from [beside] if beside in head.ending_with(Path(name).name) else head.ending_with(Path(name).name)


def imported(text: str, folder: Path | None, head: KernelFiles) -> Iterator[Path]:
    """Files that a text in this folder may import, packages and parts of packages among them."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from found_from_the_top(alias.name, head)
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            for name in names:
                if not node.level:
                    yield from found_from_the_top(name, head)
                elif folder is not None and node.level <= len(folder.parents):
                    yield from found_below((folder, *folder.parents)[node.level - 1], name)


def found_from_the_top(module: str, head: KernelFiles) -> Iterator[Path]:
    """Files of a module and of the packages that it lies in, from any folder that is no package itself."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        for place in ("/".join(parts[:end]) + ".py", "/".join((*parts[:end], "__init__.py"))):
            for path in head.ending_with(place):
                if not (path.parents[place.count("/")] / "__init__.py").is_file():
                    yield path


def found_below(folder: Path, module: str) -> Iterator[Path]:
    """The same of a module of a package's."""
    place = folder.joinpath(*module.split("."))
    for path in (
        folder / "__init__.py",
        place.parent.with_suffix(".py"),
        place.with_suffix(".py"),
        place / "__init__.py",
    ):
        if path.is_file():
            yield path
