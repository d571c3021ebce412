"""Whose code a process has mapped, read from /proc by a process above it: libraries, and code that no file holds."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from pytest_klineage.records.messages import Job
from pytest_klineage.worker.sandbox import containment
from pytest_klineage.worker.sandbox.reading import RUNTIME, is_narrow

LIBRARY_NAMES = re.compile(
    r"/lib[^/]*(mkl|openblas|blis|blas|lapack|dnnl|onednn|atlas|armpl|torch|cublas|cudnn|cutlass|flashinfer)[^/]*\.so",
    re.I,
)
"""Shared libraries that do a kernel's work for it."""
DEVICE_LIBRARY_NAMES = re.compile(
    r"/lib[^/]*(torch(?!audio|vision|codec)|cublas|cudnn|cutlass|flashinfer)[^/]*\.so", re.I
)
"""Those that do so on a GPU. Packages of Python import libraries for CPUs too, which no kernel on a GPU comes from."""
ENGINES = re.compile(r"/lib-dynload/_(sqlite3|tkinter|dbm|gdbm)\b")
"""Extension modules of Python's standard library that lead to an engine of somebody else's."""
PYTHON_PARTS = re.compile(
    r"/lib-dynload/[^/]+\.so$|/(?:site|dist)-packages/(?:torch|numpy|numba|llvmlite|triton|_cffi_backend|gmpy2|optree"
    r"|psutil|_?yaml|markupsafe|msgspec)\b"
    r"|/lib(?:python\d|ffi|z|zstd|bz2|lzma|crypto|ssl|uuid|expat|b2|tinfow?|ncursesw?|readline|resolv|nss_\w+"
    r"|LLVM|tbb|tbbmalloc|svml|intlc|imf|irc|irng)\b[\w.+-]*\.so[.\d]*$"
)
"""What Python, PyTorch with what it imports late, NumPy, Numba and their compilers may map as code."""
MEMORY_FILE = "/memfd:"
"""How the path of a file begins that is in memory only: the template's are copies of code with traps."""
UNNAMED = re.compile(r"(\[.*\])?")
"""Where a mapping of no file lies in the last column of /proc/PID/maps: nothing, or a name such as [stack]."""


class MappedRange(NamedTuple):
    """One line of /proc/PID/maps."""

    path: str
    start: int
    end: int
    executable: bool
    inode: str = ""
    """Of the file; no other has it as long as one process maps it."""

    def lies_in(self, others: Iterable[MappedRange]) -> bool:
        """Whether it is the same file at the same addresses as one of others, or a part of that."""
        return any(one.path == self.path and one.start <= self.start and self.end <= one.end for one in others)


class ForeignCode(NamedTuple):
    """What a worker has mapped and its template had not."""

    libraries: tuple[str, ...] = ()
    generated_bytes: int = 0
    """Code that no file holds, of a native kernel that had no library within reach to copy it from."""


def mappings_of(pid: int) -> list[MappedRange]:
    """All mappings of a process; none of one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        span, rights, _offset, _device, inode, *path = line.split(maxsplit=5)
        start, _, end = span.partition("-")
        found.append(MappedRange(path[0] if path else "", int(start, 16), int(end, 16), "x" in rights, inode))
    return found


def foreign_code(now: Collection[MappedRange], before: Collection[MappedRange], job: Job) -> ForeignCode:
    """Code in a worker that neither its template had nor its job brings.

    A native kernel may have its own artifact and the language's runtime; all else counts as a library. Without a file
    to tell whose it is, code counts as one too, unless the kernel could read none: then it has generated the code.
    """
    ours = {one.inode for one in before if one.path.startswith(MEMORY_FILE)}
    now = [one for one in now if not (one.path.startswith(MEMORY_FILE) and one.inode in ours)]
    if job.surface != "cpp":
        # A just-in-time compiler's own stubs lie in the private directory, and are no library's work.
        workdir = os.devnull if job.allow_processes else job.workdir
        names = LIBRARY_NAMES if job.platform == "cpu" or job.surface == "cuda" else DEVICE_LIBRARY_NAMES
        known, theirs = vendors(before, os.devnull, names), vendors(now, workdir, names)
        found = loaded_since(theirs, known)
        if job.surface == "python" and job.platform == "cpu" and not job.module:
            found |= unknown_libraries(now, before)
        return ForeignCode(tuple(sorted(found)))
    new = [one for one in now if one.executable and not one.lies_in(before)]
    unnamed = sum(one.end - one.start for one in new if UNNAMED.fullmatch(one.path))
    libraries = {Path(one.path).name for one in new if not UNNAMED.fullmatch(one.path) and not is_own(one.path, job)}
    if not unnamed or (is_narrow(job) and containment.landlock_abi()):
        return ForeignCode(tuple(sorted(libraries)), unnamed)
    return ForeignCode((*sorted(libraries), f"{unnamed >> 10} KiB of code that no file holds"))


def unknown_libraries(now: Iterable[MappedRange], before: Collection[MappedRange]) -> set[str]:
    """Names of files with code, not mapped before, that are no part of Python, nor of what a kernel is compiled by.

    For a kernel of one file, which imports what it names. A package may import anything beside the kernel.
    """
    paths = {one.path for one in before}
    new = {one.path for one in now if one.executable and one.path.startswith("/")} - paths
    return {Path(path).name for path in new if ENGINES.search(path) or not is_of_python(path)}


def is_of_python(path: str) -> bool:
    """Whether a file is of the language's runtime, or among PYTHON_PARTS."""
    return RUNTIME.fullmatch(Path(path).name) is not None or PYTHON_PARTS.search(path) is not None


def is_own(path: str, job: Job) -> bool:
    """Whether code in a file is the job's artifact, or of the runtime and not put there by the worker."""
    private = path.startswith((f"{job.workdir}/", MEMORY_FILE))
    return path == os.path.realpath(job.artifact) or (not private and RUNTIME.fullmatch(Path(path).name) is not None)


def vendors(mappings: Iterable[MappedRange], workdir: str, names: re.Pattern[str]) -> list[MappedRange]:
    """Those of the shared libraries of these names.

    Code from a worker's own directory or from a memory file counts under whatever name it goes: only its kernel can
    have put it there.
    """
    private = (f"{workdir}/", MEMORY_FILE)
    return [
        one for one in mappings
        if names.search(one.path) or (one.executable and one.path.startswith(private))
    ]  # fmt: skip


def loaded_since(now: Iterable[MappedRange], before: Collection[MappedRange]) -> set[str]:
    """Names of libraries that were not mapped before: by another path, or as code at other addresses.

    A second copy of a library, which a linker's namespace or another name gives, is code at other addresses.
    """
    paths = {one.path for one in before}
    return {
        Path(one.path).name for one in now
        if one.path not in paths or (one.executable and not one.lies_in(before))
    }  # fmt: skip
