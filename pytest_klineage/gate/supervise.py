"""Starting, talking to and ending the worker processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, TypeVar

import msgspec

from pytest_klineage.channel import BadFrame, Channel, ChannelClosed
from pytest_klineage.errors import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    HarnessError,
    MissingDependency,
    UsageError,
    WorkerDied,
)
from pytest_klineage.gate.host.cpu import KEPT_MEMORY
from pytest_klineage.records.messages import FromOracle, Job, OracleFault, ToOracle, WorkerFailure
from pytest_klineage.records.template_messages import End, Spawn, Spawned, WorkerExit

T = TypeVar("T")

START_DEADLINE_S = 120.0
"""Importing torch from a cold disk takes tens of seconds; anything longer is a fault."""
END_DEADLINE_S = 15.0
ENDED_S = 1.0
"""How soon after its channel was closed a process has ended, if that is why."""
CALL_SLACK_S = 30.0
"""Time beside the kernel's own deadline that one request to the oracle may take."""
LOG_KEPT_BYTES = 16 * 1024
LOG_FLOOD_BYTES = 8 << 20
"""A candidate that prints more than this is ended: no verdict needs it, and a disk or a terminal might suffer."""
ERROR_TAIL = 2_000


class WorkerProcess:
    """One trusted process: `python -m pytest_klineage.worker ROLE`, with a channel to it."""

    def __init__(
        self, role: str, *, preload: str = "none", threads: int, environment: dict[str, str] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        self.role = role
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process; close() ends both
        command = [sys.executable, "-P", "-s", "-m", "pytest_klineage.worker", role, str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, "--preload", preload],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=worker_environment(threads) | (environment or {}),
            cwd=tempfile.gettempdir(),
            # Ctrl-C in a terminal reaches the judge alone; it ends its workers in order.
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        self.lost = False
        """Whether it died or owes an answer: the next request needs another process."""

    def ask(self, request: object, kind: Any, deadline_s: float, fds: list[int] | None = None) -> Any:
        """Send a request and wait for its answer. Raises WorkerDied or DeadlineExceeded."""
        try:
            self.channel.send(request, fds)
            return self.channel.receive(kind, timeout_s=deadline_s)
        except (ChannelClosed, BadFrame) as error:
            self.lost = True
            words = f"the {self.role} process ended ({error}).{self._last_words()}"
            raise WorkerDied(words, killed=self._was_killed()) from error
        except TimeoutError as error:
            self.lost = True
            raise DeadlineExceeded(f"the {self.role} process did not answer within {deadline_s:g} s") from error

    def _last_words(self) -> str:
        """What it printed before it died."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - ERROR_TAIL))
        text = self._errors.read().decode(errors="replace").strip()
        if "No module named 'torch'" in text:
            raise MissingDependency("torch", "pip install 'pytest-klineage[cpu]'")
        return f" It printed: {text}" if text else " It printed nothing; the system may have run out of memory."

    def _was_killed(self) -> bool:
        """Whether the system ended it, as it does for want of memory."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDED_S) == -signal.SIGKILL
        return False

    def close(self) -> None:
        """End the process: closing its channel is enough, the rest is patience. A lost one gets none."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self.lost else END_DEADLINE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._errors.close()


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of trusted processes and, from them, of workers: no variable of the caller's but a few."""
    kept = (
        "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
        "CUDA_PATH", "FLASHINFER_CUDA_ARCH_LIST", "MAX_JOBS",
    )  # fmt: skip
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    if "PYTHONPATH" in environment:
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    count = str(threads)
    return environment | {
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONHASHSEED": "0",
    }


class LogDrain:
    """Reads a worker's output pipe to its end, keeps the beginning and counts the rest."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.kept = bytearray()
        self.total = 0
        self._thread = threading.Thread(target=self._drain, name="klineage-log", daemon=True)

    def start(self) -> None:
        """Begin reading; call it after the write end has been handed over."""
        os.close(self.write_fd)
        self._thread.start()

    def _drain(self) -> None:
        while data := os.read(self.read_fd, 1 << 16):
            self.kept += data[: max(0, LOG_KEPT_BYTES - len(self.kept))]
            self.total += len(data)
        os.close(self.read_fd)

    @property
    def flooded(self) -> bool:
        return self.total > LOG_FLOOD_BYTES

    def text(self) -> str:
        """What was kept, once the pipe is closed at the other end."""
        self._thread.join(END_DEADLINE_S)
        return bytes(self.kept).decode(errors="replace")


class Worker:
    """A forked worker: its template, its log, its private directory, and how it ended once it has."""

    def __init__(self, template: WorkerProcess, job: Job) -> None:
        self.template = template
        self.workdir = tempfile.mkdtemp(prefix="klineage-")
        self.log = LogDrain()
        oracle_end, worker_end = socket.socketpair()
        # From the first message on: the system writes the sender's id beside what is sent after this.
        oracle_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.oracle_end = oracle_end
        job = msgspec.structs.replace(job, workdir=self.workdir)
        try:
            fds = [worker_end.fileno(), self.log.write_fd]
            self.id = template.ask(Spawn(job=job), Spawned, START_DEADLINE_S, fds).worker
        except BaseException:
            self.discard()
            raise
        finally:
            worker_end.close()
            self.log.start()
        self.ended: WorkerExit | None = None

    def end(self, grace_s: float = 0.0) -> WorkerExit:
        """End it with everything it started; idempotent."""
        if self.ended is None:
            self.oracle_end.close()
            try:
                self.ended = self.template.ask(
                    End(worker=self.id, grace_s=grace_s), WorkerExit, END_DEADLINE_S + grace_s
                )
            finally:
                shutil.rmtree(self.workdir, ignore_errors=True)
        return self.ended

    def discard(self) -> None:
        """Remove what is left of a worker whose template is gone."""
        self.oracle_end.close()
        shutil.rmtree(self.workdir, ignore_errors=True)


class Processes:
    """The oracle and the templates of one judge, started when first needed and kept."""

    def __init__(
        self, threads: int, environment: dict[str, str] | None = None, binding: dict[str, str] | None = None
    ) -> None:
        self.threads = threads
        self._environment = environment or {}
        self._binding = binding or {}
        """Variables that bind OpenMP's threads. The oracle is not bound: it must find a processor that is free."""
        self._oracle: WorkerProcess | None = None
        self._templates: dict[str, WorkerProcess] = {}

    def oracle(self) -> WorkerProcess:
        """The oracle. Its idle threads sleep at once, or they would take cores from what is being timed."""
        if self._oracle is not None and self._oracle.lost:
            self._oracle.close()
            self._oracle = None
        if self._oracle is None:
            environment = {**self._environment, **KEPT_MEMORY, "OMP_WAIT_POLICY": "PASSIVE"}
            self._oracle = WorkerProcess("oracle", threads=self.threads, environment=environment)
        return self._oracle

    def template(self, preload: str) -> WorkerProcess:
        """The bare template, the one with torch loaded, or the one in which torch refuses to compute."""
        if preload in self._templates and self._templates[preload].lost:
            self._templates.pop(preload).close()
        if preload not in self._templates:
            self._templates[preload] = WorkerProcess(
                "template", preload=preload, threads=self.threads, environment={**self._environment, **self._binding}
            )
        return self._templates[preload]

    def ask_oracle(
        self, request: ToOracle, kind: type[T], deadline_s: float, fds: list[int] | None = None
    ) -> T | WorkerFailure:
        """An answer of `kind`, or a worker's problem. Raises HarnessError or UsageError for the oracle's own faults."""
        answer = self.oracle().ask(request, FromOracle, deadline_s, fds)
        if isinstance(answer, OracleFault):
            if answer.kind in ("UsageError", "UnknownName"):
                raise UsageError(answer.message)
            if answer.kind == "MissingDependency":
                raise MissingDependency.parsed(answer.message)
            if answer.kind in ("OutOfMemoryError", "DeviceOutOfMemory"):
                raise DeviceOutOfMemory(f"the case does not fit into the GPU's memory: {answer.message}")
            raise HarnessError(f"the oracle cannot do that: {answer.kind}: {answer.message}")
        if not isinstance(answer, kind | WorkerFailure):
            raise HarnessError(f"the oracle answered with a {type(answer).__name__}")
        return answer

    def abort(self) -> None:
        """End everything at once. Keepers and workers die with their template."""
        for process in (*self._templates.values(), *((self._oracle,) if self._oracle else ())):
            process.process.kill()
        self.close()

    def close(self) -> None:
        """End everything. Templates end their workers first."""
        every = (*self._templates.values(), *((self._oracle,) if self._oracle else ()))
        for process in every:
            process.channel.close()
        for process in every:
            process.close()
        self._templates.clear()
        self._oracle = None
