"""What a build has read, by the lists that compiler and assembler write: a source may say it in any spelling.

An included or embedded file could be a library, or anything of the judge's machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from pytest_klineage.records import Code
from pytest_klineage.surfaces.base import SurfaceFailure
from pytest_klineage.surfaces.native import INCLUDE_DIR

INCLUDED, ASSEMBLED = "kernel.included", "kernel.assembled"
"""Lists of the compiler and of the assembler, in the syntax of make."""
VENDORS = re.compile(r"/(eigen\d?|blaze|armadillo_bits|ublas|libxsmm\w*|mkl\w*|oneapi|dnnl)[/.]", re.I)
"""Where headers lie that do a kernel's work when they are included."""


def foreign_reads(directory: Path, header_folders: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Files that a build in `directory` read beside what lies there, the ABI's and the compiler's own headers.

    `header_folders` says where the compiler looks for headers by itself; not all in there are its own. Raises
    SurfaceFailure where there is no list.
    """
    read = {os.path.realpath(directory / name) for list_ in (INCLUDED, ASSEMBLED) for name in listed(directory / list_)}
    elsewhere = {name for name in read if not lies_in(name, (str(directory), str(INCLUDE_DIR)))}
    return tuple(sorted(name for name in elsewhere if VENDORS.search(name) or not lies_in(name, header_folders())))


def listed(path: Path) -> list[str]:
    """The files that a rule of make depends on. Raises SurfaceFailure when there is no such rule."""
    try:
        rule = path.read_text(errors="surrogateescape")
    except FileNotFoundError as error:
        message = (
            f"the compiler wrote no {path.name}, the list of what it reads; let CXX name GCC, or Clang with GNU as"
        )
        raise SurfaceFailure(Code.BUILD_IO, message) from error
    names = re.findall(r"(?:[^\s\\]|\\.)+", rule.replace("\\\n", " ").partition(":")[2])
    return [re.sub(r"\\(.)", r"\1", name) for name in names]


def lies_in(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file lies in one of some folders, whatever links lead there."""
    return any(Path(name).is_relative_to(os.path.realpath(folder)) for folder in folders)
