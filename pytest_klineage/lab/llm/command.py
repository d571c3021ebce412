"""Replies from a program of the user's: the prompt on its standard input, the reply on its standard output."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import EstimatedBackend, Reply
from pytest_klineage.lab.llm.conversation import Conversation, as_markdown
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.prices import Prices

TIMEOUT_S = 1800.0
REPLY_LIMIT_BYTES = 4 * 1024 * 1024
COMPLAINT_BYTES = 2000
"""How much of the end of its standard error is shown."""
POLL_S = 0.02


class CommandBackend(EstimatedBackend):
    """Any program that reads a prompt and writes a reply. Its usage is estimated; its price is that of `model`.

    The program must read all it needs from standard input, write nothing but the reply to standard output, and end
    with status 0. It is not a shell line; `max_output_tokens` is not enforced upon it, `limit_bytes` is.
    """

    name = "command"

    def __init__(
        self,
        argv: Sequence[str],
        prices: Prices,
        *,
        model: str,
        timeout_s: float = TIMEOUT_S,
        limit_bytes: int = REPLY_LIMIT_BYTES,
    ) -> None:
        super().__init__(model, prices)
        if not argv or shutil.which(argv[0]) is None:
            raise UsageError(
                f"the command that answers prompts, {' '.join(argv)!r}, names no program that can be run here: install "
                "it, write its full path, or choose another backend"
            )
        self.argv, self.timeout_s, self.limit_bytes = tuple(argv), timeout_s, limit_bytes

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Run the program once."""
        # Files, not pipes: a grandchild that holds one open does not keep us waiting, and no buffer fills up.
        with tempfile.TemporaryFile() as prompt, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            prompt.write(as_markdown(conversation).encode())
            prompt.seek(0)
            process = self._start(prompt, output, errors)
            try:
                self._wait(process, output, errors)
            finally:
                _end(process)
            if process.returncode != 0:
                detail = f"{self.argv[0]} ended with status {process.returncode}: {_shown(errors) or 'no message'}"
                raise BackendFailed(Failure.COMMAND, detail, billed=True)
            output.seek(0)
            return self._reply(conversation, output.read())

    def _start(self, prompt: IO[bytes], output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self.argv, stdin=prompt, stdout=output, stderr=errors, start_new_session=True)
        except OSError as error:
            detail = f"{self.argv[0]} cannot be started: {error.strerror or error}"
            raise BackendFailed(Failure.COMMAND, detail, billed=False) from error

    def _wait(self, process: subprocess.Popen[bytes], output: IO[bytes], errors: IO[bytes]) -> None:
        """Wait for the program's end, within the limits of time and size."""
        stop_at = time.monotonic() + self.timeout_s
        while True:
            ended = _has_ended(process)
            if _size(output) > self.limit_bytes:
                detail = f"{self.argv[0]} wrote more than {self.limit_bytes} bytes"
                raise BackendFailed(Failure.TOO_LONG, detail, billed=True)
            if ended:
                return
            if time.monotonic() > stop_at:
                detail = f"{self.argv[0]} took longer than {self.timeout_s:g} s"
                raise BackendFailed(Failure.TIMEOUT, detail, billed=True)
            if _size(errors) > self.limit_bytes:
                errors.truncate(0)  # the program writes on after a hole; only the end is shown
            time.sleep(POLL_S)

    def _reply(self, conversation: Conversation, output: bytes) -> Reply:
        try:
            text = output.decode()
        except UnicodeDecodeError as error:
            raise BackendFailed(Failure.NOT_TEXT, f"{self.argv[0]} wrote no UTF-8: {error}", billed=True) from error
        return Reply(text=text, usage=self.estimated_usage(conversation, text), model=self.model)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the program has ended. It is not reaped yet, so that its number still names its group and no other."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it started in its own session, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _shown(errors: IO[bytes]) -> str:
    errors.seek(max(0, _size(errors) - COMPLAINT_BYTES))
    text = errors.read().decode(errors="replace")
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
