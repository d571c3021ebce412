"""The languages a kernel may be written in: registry, and reading a kernel's source from disk."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import extensions
from pytest_klineage.records import KernelSource, SourceFile, Surface
from pytest_klineage.records.source import SUFFIXES
from pytest_klineage.surfaces.base import Built, SurfaceBackend, SurfaceFailure
from pytest_klineage.surfaces.cpp import CppBackend
from pytest_klineage.surfaces.cuda import CudaBackend
from pytest_klineage.surfaces.python import PythonBackend
from pytest_klineage.surfaces.tilelang import TilelangBackend
from pytest_klineage.surfaces.triton import TritonBackend

SURFACES: dict[str, SurfaceBackend] = {
    "cpp": CppBackend(), "cuda": CudaBackend(), "python": PythonBackend(), "tilelang": TilelangBackend(),
    "triton": TritonBackend(),
}  # fmt: skip
"""By name."""

DEFAULT_ENTRY = "run"
MAX_SOURCE_BYTES = 4 * 1024 * 1024

__all__ = ["SURFACES", "Built", "SurfaceBackend", "SurfaceFailure", "read_source", "surface_backend"]


def surface_backend(name: str) -> SurfaceBackend:
    """The surface of that name, shipped or of another package. Raises UnknownName, which lists the valid ones."""
    if name in SURFACES:
        return SURFACES[name]
    others = extensions("surfaces")
    if name not in others:
        raise UnknownName("surface", name, [*SURFACES, *others])
    found = others[name].load()
    made = found() if isinstance(found, type) else found
    if not isinstance(made, SurfaceBackend) or made.surface != name:
        raise UsageError(
            f"{others[name].package} registers {others[name].point.value} as surface {name}; it is {made!r}"
        )
    SURFACES[name] = made
    return made


def surface_of(suffix: str) -> str | None:
    """The surface that a file's suffix means: a shipped one, or one of another package that claims the suffix."""
    if suffix in SUFFIXES:
        return SUFFIXES[suffix].value
    return next((name for name in extensions("surfaces") if suffix in surface_backend(name).suffixes), None)


def read_source(
    path: str | Path,
    *,
    surface: str | None = None,
    entry: str | None = None,
    flags: tuple[str, ...] = (),
    label: str = "",
    also: tuple[str | Path, ...] = (),
) -> KernelSource:
    """The source of one kernel: a file (with files it includes in `also`), or "package.module:function".

    Raises UsageError when a file cannot be read or its suffix says no surface.
    """
    text = str(path)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        module, _, function = text.partition(":")
        return KernelSource(surface=Surface.PYTHON, files=(), entry=function, module=module, label=label or text)
    main = Path(path)
    if surface is None:
        surface = surface_of(main.suffix)
    if surface is None:
        raise UsageError(
            f"{main.name}: the suffix says no surface; pass surface= one of {', '.join(sorted(SURFACES))}. "
            'A function of a module is written "package.module:function"'
        )
    surface_backend(surface)
    files = tuple(SourceFile(name=Path(item).name, text=_read(Path(item))) for item in (main, *also))
    return KernelSource(
        surface=Surface(surface),
        files=files,
        entry=entry or DEFAULT_ENTRY,
        flags=tuple(flags),
        label=label or main.stem,
    )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_SOURCE_BYTES} bytes; a kernel's source is text")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the kernel source {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the kernel source {path} is not UTF-8 text: {error.reason}") from error
