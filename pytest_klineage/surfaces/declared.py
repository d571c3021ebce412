"""Having a file's COMPILE compiled by a process of its own (ahead.py): what it is asked, and its answer, checked."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import msgspec

from pytest_klineage.records import Code, KernelSource
from pytest_klineage.surfaces.ahead import RESULT
from pytest_klineage.surfaces.base import SurfaceFailure
from pytest_klineage.surfaces.compiling import compile_once
from pytest_klineage.surfaces.python import lay_out
from pytest_klineage.surfaces.resources import Unit

AHEAD = Path(__file__).with_name("ahead.py")
CONTAINMENT = Path(__file__).parents[1] / "worker" / "sandbox" / "containment.py"
RESULT_LIMIT = 4 << 20
"""Bytes of a result that are read; what ptxas says of one kernel is about 1 kB."""
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/sys/devices/system/cpu", "/proc")


class CompileReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the compiling process reports."""

    entry: bool
    """Whether the file has the entry."""
    units: tuple[Unit, ...]


class CompileTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What is compiled for, and in which environment."""

    platform: str
    arch: int | str
    """What the language calls the platform."""
    environment: dict[str, str]
    programs: tuple[str, ...] = ()
    """Paths of the compilers that are started, wherever they are installed."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, where its files lie, and the compiler's log."""

    answer: CompileReport
    out: Path
    log: str
    seconds: float


def compile_ahead(source: KernelSource, directory: Path, target: CompileTarget, *, timeout_s: float) -> Compiled:
    """Compile what the file declares for a platform.

    Raises SurfaceFailure with the compiler's words, or when the process leaves no answer.
    """
    out = directory / "out"
    out.mkdir()
    request = {
        "surface": source.surface.value, "platform": target.platform, "arch": target.arch, "entry": source.entry,
        "environment": target.environment,
        "directory": str(directory), "files": str(lay_out(source, directory / "files")), "out": str(out),
        "paths": python_path(), "readable": readable_for(target), "containment": str(CONTAINMENT),
        # Compilers use several cores; the wall-clock limit is what holds, this one is for an unsupervised process.
        "cpu_s": int(timeout_s * (os.cpu_count() or 1)) + 10,
    }  # fmt: skip
    asked = directory / "request.json"
    asked.write_text(json.dumps(request))
    command = [sys.executable, "-P", "-s", "-B", str(AHEAD), str(asked)]
    log, seconds = compile_once(command, directory, timeout_s=timeout_s)
    answer = read_answer(out, log)
    if not answer.entry:
        raise SurfaceFailure(Code.ENTRY_MISSING, f"the kernel file has no function {source.entry!r}", log=log)
    return Compiled(answer=answer, out=out, log=log, seconds=seconds)


def readable_for(target: CompileTarget) -> list[str]:
    """What the process may read: the system, this Python, and where the compilers are installed."""
    return [*READABLE, *interpreter_paths(), *map(installation_of, target.programs)]


def installation_of(program: str) -> str:
    """The folder that a program's own files lie in: /opt/gcc of /opt/gcc/bin/g++, whatever links lead there.

    No home folder and no whole machine: of ~/bin/g++ it is ~/bin, of ~/g++ the program alone.
    """
    path, home = Path(program).resolve(), Path.home().resolve()
    folders = [path.parent.parent] if path.parent.name == "bin" else []
    return str(next(folder for folder in (*folders, path.parent, path) if not is_too_much(folder, home)))


def is_too_much(folder: Path, home: Path) -> bool:
    """Whether a folder is a home, this user's or another's beside it, or holds homes."""
    beside = folder.parent == home.parent != Path("/")
    return folder == home or folder in home.parents or beside


def python_path() -> list[str]:
    """What PYTHONPATH names: the process sees it, as workers do."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(path) for path in paths if path]


def interpreter_paths() -> list[str]:
    """Where this Python and its packages lie."""
    return [sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], str(AHEAD.parent), *python_path()]


def read_answer(out: Path, log: str) -> CompileReport:
    """The answer of the process, checked: it ran beside the candidate. Raises SurfaceFailure."""
    path = out / RESULT
    if not is_plain(path) or path.stat().st_size > RESULT_LIMIT:
        message = "the process that compiles the file ended without an answer; the file must not end it"
        raise SurfaceFailure(Code.COMPILE, message, log=log)
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=CompileReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the process that compiles the file gave a strange answer: {error}"
        raise SurfaceFailure(Code.COMPILE, message, log=log) from error
    for unit in answer.units:
        if not re.fullmatch(r"\d\d+\.cubin", unit.file) or not is_plain(out / unit.file):
            message = f"the process that compiles the file named no file of its own: {unit.file!r:.80}"
            raise SurfaceFailure(Code.COMPILE, message, log=log)
    return answer


def is_plain(path: Path) -> bool:
    """Whether a path is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()
