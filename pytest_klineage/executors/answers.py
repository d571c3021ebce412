"""Files of answers: append-only lines, one file for each writer. Askers resume from them, judges write before they say.

A line is what was asked (request and ticket), a sealed reply, or a sealed doubt. What a crash cut short is left out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import BinaryIO

import msgspec

from pytest_klineage.errors import BadRecord, StoreError
from pytest_klineage.executors.sealing import open_reply, opened
from pytest_klineage.records import from_json
from pytest_klineage.records.judging import JudgeReply


class AskedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was sent, and the ticket that its reply must bear."""

    asked: str
    ticket: str


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict between the last good canary of a judge and a bad one."""

    request: str
    ticket: str
    judge: str
    why: str


class Answers:
    """The answers of one run, or of one judge. Of each request the first verdict stays. Raises StoreError."""

    def __init__(self, path: Path, secret: bytes, *, read_only: bool = False) -> None:
        self.path, self._secret = path, secret
        self.tickets: dict[str, str] = {}
        self.doubts: dict[str, Doubt] = {}
        self.refused = 0
        """Lines that are not sealed with this secret, or not whole."""
        self._places: dict[str, int] = {}
        """Where in the file the verdict of a request stands, in bytes: verdicts stay on disk."""
        self._faults: dict[str, JudgeReply] = {}
        """Faults of this process; a run that goes on asks again."""
        self._doubt_lines: list[bytes] = []
        try:
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("rb" if read_only else "a+b")
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror or error}") from error
        if self._read() and not read_only:
            self._append(b"")

    def ticket(self, digest: str) -> str:
        """The ticket of a request, drawn and written down on first use, before anything is sent."""
        if digest not in self.tickets:
            self.tickets[digest] = secrets.token_hex(16)
            self._append(msgspec.json.encode(AskedRequest(asked=digest, ticket=self.tickets[digest])))
        return self.tickets[digest]

    def add(self, line: bytes) -> None:
        """Keep a sealed reply, unless its request has a verdict. Raises BadRecord for one without a good seal."""
        self.keep(open_reply(line, self._secret), line)

    def keep(self, reply: JudgeReply, line: bytes) -> None:
        """Keep a reply whose line was opened already, unless its request has a verdict."""
        if reply.request in self._places:
            return
        position = self._append(line)
        if reply.verdict is None:
            self._faults[reply.request] = reply
        else:
            self._places[reply.request] = position

    def add_doubt(self, line: bytes) -> Doubt | None:
        """Keep a sealed doubt about a verdict of this file. None for what is no doubt; raises BadRecord unsealed."""
        content = opened(line, self._secret)
        try:
            doubt = from_json(content, Doubt)
        except BadRecord:
            return None
        if self.tickets.get(doubt.request) == doubt.ticket and doubt.request not in self.doubts:
            self._note_doubt(doubt, line)
            self._append(line)
        return doubt

    def has(self, digest: str) -> bool:
        """Whether a request has its final answer in this run."""
        return digest in self._places or digest in self._faults

    def get(self, digest: str) -> JudgeReply | None:
        """The verdict of a request, else its last fault, else None."""
        if (position := self._places.get(digest)) is None:
            return self._faults.get(digest)
        self._file.seek(position)
        return open_reply(self._file.readline(), self._secret)

    def __len__(self) -> int:
        return len(self._places)

    def collect(self, other: Answers) -> None:
        """Take over the tickets, verdicts and doubts of another file that are not here."""
        for digest in other.tickets.keys() - self.tickets.keys():
            self.tickets[digest] = other.tickets[digest]
            self._append(msgspec.json.encode(AskedRequest(asked=digest, ticket=self.tickets[digest])))
        for position in other._places.values():
            other._file.seek(position)
            self.add(other._file.readline().rstrip(b"\n"))
        for line in other._doubt_lines:
            self.add_doubt(line)

    def sync(self) -> None:
        """Have what was written survive the machine."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _note_doubt(self, doubt: Doubt, line: bytes) -> None:
        self.doubts[doubt.request] = doubt
        self._doubt_lines.append(line)

    def _read(self) -> bool:
        """Take every whole line. Returns whether a crash has left a fragment behind them."""
        self._file.seek(0)
        position, line = 0, b"\n"
        for line in self._file:
            if line.endswith(b"\n"):
                self._take(line, position)
            position += len(line)
        return not line.endswith(b"\n")

    def _take(self, line: bytes, position: int) -> None:
        with contextlib.suppress(BadRecord):
            asked = from_json(line, AskedRequest)
            self.tickets[asked.asked] = asked.ticket
            return
        try:
            content = opened(line, self._secret)
        except BadRecord:
            self.refused += bool(line.strip())
            return
        with contextlib.suppress(BadRecord):
            doubt = from_json(content, Doubt)
            self._note_doubt(doubt, line.rstrip(b"\n"))
            return
        reply = from_json(content, JudgeReply)
        if reply.verdict is not None:
            self._places.setdefault(reply.request, position)

    def _append(self, line: bytes) -> int:
        """Write one line; returns where it begins."""
        try:
            position = self._file.seek(0, os.SEEK_END)
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror or error}") from error
        return position


def merge(paths: list[Path], output: Path, secret: bytes) -> tuple[int, int, int]:
    """Collect files of answers into one: of each request the first verdict stays, and every ticket and doubt.

    Returns how many verdicts and doubts are in it, and how many lines were refused. Raises StoreError.
    """
    refused = 0
    with contextlib.closing(Answers(output, secret)) as merged:
        for path in paths:
            with contextlib.closing(Answers(path, secret, read_only=True)) as answers:
                merged.collect(answers)
                refused += answers.refused
        merged.sync()
        return len(merged), len(merged.doubts), refused
