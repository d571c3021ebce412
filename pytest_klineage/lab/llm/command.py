"""Replies from a program of the user's: the prompt on its standard input, the reply on its standard output."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.backend import EstimatedBilling, Reply
from pytest_klineage.lab.llm.conversation import Conversation, as_markdown
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.prices import Prices

TIMEOUT_S = 1800.0
REPLY_LIMIT_BYTES = 4 * 1024 * 1024
COMPLAINT_BYTES = 2000
"""How much of the end of its standard error is told."""
LINGER_S = 0.5
"""How long a pipe is read on after the program has ended; a grandchild may hold it open forever."""
CHUNK_BYTES = 65536
POLL_S = 0.02


class CommandBackend(EstimatedBilling):
    """Any program that reads a prompt and writes a reply. Its usage is estimated; its price is that of `model`.

    The program must read all it needs from standard input, write nothing but the reply to standard output, and end
    with status 0. It is not a shell line; `max_output_tokens` is not enforced upon it, `limit_bytes` is.
    """

    name = "command"
    resumable = False

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
        with tempfile.TemporaryFile() as prompt:
            prompt.write(as_markdown(conversation).encode())
            prompt.seek(0)
            process = self._start(prompt)
            try:
                output, complaint = self._collect(process)
            finally:
                _end(process)
        if process.returncode != 0:
            detail = f"{self.argv[0]} ended with status {process.returncode}: {_shown(complaint) or 'no message'}"
            raise BackendFailed(Failure.COMMAND, detail, billed=True)
        return self._reply(conversation, output)

    def _start(self, prompt: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.argv, stdin=prompt, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            detail = f"{self.argv[0]} cannot be started: {error.strerror or error}"
            raise BackendFailed(Failure.COMMAND, detail, billed=False) from error

    def _collect(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Standard output and the end of standard error, within the limits of time and size."""
        stop_at = time.monotonic() + self.timeout_s
        ended_at: float | None = None
        output, complaint = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            for stream, into in ((process.stdout, output), (process.stderr, complaint)):
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, into)
            while selector.get_map():
                now = time.monotonic()
                if now > stop_at:
                    raise BackendFailed(
                        Failure.TIMEOUT, f"{self.argv[0]} took longer than {self.timeout_s:g} s", billed=True
                    )
                if _has_ended(process):
                    ended_at = now if ended_at is None else ended_at
                    if now > ended_at + LINGER_S:
                        break
                self._read_ready(selector, output, complaint)
        self._wait(process, stop_at)
        return bytes(output), bytes(complaint)

    def _read_ready(self, selector: selectors.BaseSelector, output: bytearray, complaint: bytearray) -> None:
        for key, _ in selector.select(timeout=0.1):
            data = os.read(key.fd, CHUNK_BYTES)
            if not data:
                selector.unregister(key.fileobj)
            key.data.extend(data)
        del complaint[:-COMPLAINT_BYTES]
        if len(output) > self.limit_bytes:
            detail = f"{self.argv[0]} wrote more than {self.limit_bytes} bytes"
            raise BackendFailed(Failure.TOO_LONG, detail, billed=True)

    def _wait(self, process: subprocess.Popen[bytes], stop_at: float) -> None:
        while not _has_ended(process):
            if time.monotonic() > stop_at:
                detail = f"{self.argv[0]} closed its output and did not end within {self.timeout_s:g} s"
                raise BackendFailed(Failure.TIMEOUT, detail, billed=True)
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
    """End the program and what it started in its own session, close our ends of the pipes, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    process.wait()


def _shown(complaint: bytes) -> str:
    text = complaint.decode(errors="replace")
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
