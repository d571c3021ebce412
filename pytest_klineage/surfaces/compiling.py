"""Running a compiler: time limit, bounded log, content-addressed cache with atomic publication."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from pytest_klineage.records import Code
from pytest_klineage.surfaces.base import SurfaceFailure

LOG_LIMIT = 8_000
"""Characters of compiler output that a verdict keeps: enough for the first errors."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Status of a compiler that the system killed: its own, or as its driver passes it on."""


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over several parts, each length-prefixed so that they cannot run into one another."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def bounded(text: str, limit: int = LOG_LIMIT) -> str:
    """The beginning of a text, with a note on how much was left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n... {len(text) - limit} more characters"


@contextlib.contextmanager
def scratch(cache: Path):  # type: ignore[no-untyped-def]  # a generator's context manager; mypy infers it from here
    """A private directory beside the cache, so that publishing is a rename on one file system."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="build-", dir=cache))
    except OSError as error:
        raise SurfaceFailure(
            Code.BUILD_IO, f"the build cache {cache} cannot be written ({error}); set --klineage-cache-dir"
        ) from error
    try:
        yield directory
    except OSError as error:
        raise SurfaceFailure(Code.BUILD_IO, f"the build in {cache} failed: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_bounded(command: list[str], output: Path, environment: dict[str, str], limit_s: float) -> int | None:
    """Run a command with its children in the folder of `output`, where what it prints goes.

    Returns its status, or None when it was ended at the limit.
    """
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=output.parent, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # A compiler driver starts children; an interrupted test run must not leave them behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compile_once(command: list[str], directory: Path, *, timeout_s: float, limit: int = LOG_LIMIT) -> tuple[str, float]:
    """Run a compiler in `directory`. Returns its log, at most `limit` characters, and the seconds it took.

    Raises SurfaceFailure when it fails, with as much of the log as a verdict keeps.
    """
    started = time.monotonic()
    log_path = directory / "compiler.log"
    status = run_bounded(command, log_path, compiler_environment(directory), timeout_s)
    if status is None:
        raise SurfaceFailure(
            Code.TIMEOUT_BUILD, f"the compiler ran longer than {timeout_s:g} s; raise --klineage-build-timeout"
        )
    with log_path.open("rb") as log:
        text = log.read(limit * 4).decode(errors="replace").replace(str(directory) + "/", "")
    if status:
        killed = ": it was killed, by the system most likely, for want of memory" if status in KILLED else ""
        raise SurfaceFailure(Code.COMPILE, f"the compiler ended with status {status}{killed}", log=bounded(text))
    return bounded(text, limit), time.monotonic() - started


def compiler_environment(directory: Path) -> dict[str, str]:
    """What a compiler needs and no more; variables such as CPATH would put unrecorded files into a build.

    PyTorch's compiler asks for the user's name when it is imported; in a sandbox /etc/passwd cannot say it.
    """
    folder = str(directory)
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "LC_ALL": "C", "TMPDIR": folder, "HOME": folder, "USER": "kernel"}
