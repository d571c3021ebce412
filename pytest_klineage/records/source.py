"""KernelSource: the files of one kernel, its entry point and its build flags, with a digest over all of them."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import cast

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.extensions import extensions


class Surface(StrEnum):
    """The language a kernel is written in, as far as building and calling it differ; packages register others."""

    CPP = "cpp"
    CUDA = "cuda"
    TRITON = "triton"
    TILELANG = "tilelang"
    PYTHON = "python"

    @classmethod
    def _missing_(cls, value: object) -> Surface | None:
        """The surface that an installed package registers under this name."""
        if not isinstance(value, str) or value not in extensions("surfaces"):
            return None
        made = str.__new__(cls, value)
        made._name_, made._value_ = value.upper(), value
        return cast("Surface", cls._value2member_map_.setdefault(value, made))


SUFFIXES = {".cpp": Surface.CPP, ".cc": Surface.CPP, ".cxx": Surface.CPP, ".cu": Surface.CUDA, ".py": Surface.PYTHON}
"""Which surface a file's suffix means when the user does not say."""


class SourceFile(msgspec.Struct, frozen=True):
    """One file of a kernel: its name without directories, and its text. Raises UsageError for any other name."""

    name: str
    text: str

    def __post_init__(self) -> None:
        # The name becomes a file below the build cache and an argument of a compiler; a model may have chosen it.
        if not re.fullmatch(r"[^/\0@.-][^/\0]*", self.name):
            raise UsageError(f"a source file is called by its plain name, such as kernel.cu, got {self.name!r}")


class KernelSource(msgspec.Struct, frozen=True, kw_only=True):
    """The complete source of one kernel. Two sources with one digest are the same kernel."""

    surface: Surface
    files: tuple[SourceFile, ...]
    """The first file is the one that is compiled or imported; the others lie beside it."""
    entry: str
    """Exported symbol (cpp, cuda) or function name (python, triton, tilelang)."""
    flags: tuple[str, ...] = ()
    """Build flags; only those on the surface's allow-list are accepted."""
    module: str = ""
    """For the python surface: an importable module to gate instead of files."""
    label: str = ""
    """What people call it in tables; not part of the digest."""

    @property
    def digest(self) -> str:
        """SHA-256 over surface, files, entry, flags and module, in hexadecimal."""
        content = (self.surface, self.files, self.entry, self.flags, self.module)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()

    @property
    def main(self) -> SourceFile | None:
        """The file that is compiled or imported; None for an installed module."""
        return self.files[0] if self.files else None
