"""The messages between a judge and the template of its workers. Plain data only."""

from __future__ import annotations

import msgspec

from pytest_klineage.records.messages import Job


class Spawn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fork a worker. Beside this message: its channel and the pipe for what it prints."""

    job: Job


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End a worker and everything it started, and say how it ended."""

    worker: int
    grace_s: float = 0.0
    """How long to wait for it to end by itself."""


ToTemplate = Spawn | End


class Spawned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker was forked; `worker` is its number in later messages."""

    worker: int


class WorkerExit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How a worker ended: by itself with an exit status, by a signal, or, without either, by our hand."""

    exit_code: int | None = None
    signal: int | None = None
    libraries: tuple[str, ...] = ()
    """Shared libraries that it had mapped and the template had not."""
    generated_bytes: int = 0
    """Code of a native kernel that no file holds."""


FromTemplate = Spawned | WorkerExit
