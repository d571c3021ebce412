"""Processes of a suite that answer JSON lines, both ends. What is asked and answered is in the scripts themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
LIMIT_S = 180.0
"""Longest wait for one answer: FLA tunes itself for half a minute."""
END_S = 30.0
LAST_WORDS = 2000
"""Characters of a process's errors that a message keeps."""

Question = TypeVar("Question", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class ProcessEnded(Exception):
    """A process ended without an answer; the message has its status and its last words."""


def serve(kind: type[Question], answer: Callable[[Question], msgspec.Struct]) -> None:
    """Answer every line of the standard input until it ends. What libraries print goes to the errors."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            out.write(msgspec.json.encode(answer(msgspec.json.decode(line, type=kind))) + b"\n")
            out.flush()


class Process:
    """A module of this folder as a process; a context manager that waits for its end."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        found = os.pathsep.join(map(os.path.abspath, [str(HERE), str(ROOT), *paths]))
        self._module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process; close() ends both
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            cwd=HERE, env={**os.environ, **(environment or {}), "PYTHONPATH": found},
        )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, question: msgspec.Struct, kind: type[Answer], *, limit_s: float = LIMIT_S) -> Answer:
        """Send a question and wait for its answer. Raises ProcessEnded when none has come within `limit_s` seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ProcessEnded(f"{self._module} has no pipes")
        line = b""
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(msgspec.json.encode(question) + b"\n")
                stdin.flush()
            line = stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line.endswith(b"\n"):
            raise ProcessEnded(self._last_words())
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """End the process: it stops when it is asked nothing more, and is killed when it does not."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def _wait(self) -> int:
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_words(self) -> str:
        status = self._wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace")[-LAST_WORDS:].strip()
        return f"{self._module} ended with status {status} and no answer: {words or 'it said nothing'}"
