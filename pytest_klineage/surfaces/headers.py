"""Headers that come with the package for kernels to include (klineage/sm90/v1/*.cuh): which ones a source uses.

They are frozen: a change gets a new version folder, so that a source's digest goes on naming one kernel. What a build
used is part of its recipe and stands in its record as well.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from pytest_klineage.records import KernelSource
from pytest_klineage.surfaces.native import INCLUDE_DIR

MENTION = re.compile(r"\bklineage/\w+/v\d+/\w+\.cuh\b")
"""A header's name, anywhere in a text: an include may be computed from a macro."""


class SharedHeader(msgspec.Struct, frozen=True):
    """One header of the package: the name that it is included by, and its text."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def shared_headers(source: KernelSource) -> tuple[SharedHeader, ...]:
    """Every header of the package that a source names, and those that these name, by name.

    A name that the package does not have is left to the compiler, which says so.
    """
    found: dict[str, SharedHeader] = {}
    texts = [file.text for file in source.files]
    while texts:
        for name in MENTION.findall(texts.pop()):
            if name not in found and (INCLUDE_DIR / name).is_file():
                found[name] = SharedHeader(name, (INCLUDE_DIR / name).read_text(encoding="utf-8"))
                texts.append(found[name].text)
    return tuple(found[name] for name in sorted(found))
