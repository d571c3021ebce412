"""The template: a process with its imports done that forks workers on demand, watches over them and ends them.

It knows no seed, no expected value and no verdict. Below it stands a keeper for every worker, which enters new
namespaces and adopts orphans; below that, where there are pid namespaces, their first process; then the worker. Ending
the keeper ends everything the kernel has started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from pytest_klineage.channel import Channel
from pytest_klineage.records.messages import Job
from pytest_klineage.records.template_messages import End, Spawn, Spawned, ToTemplate, WorkerExit
from pytest_klineage.worker.mappings import MappedRange, foreign_code, mappings_of
from pytest_klineage.worker.sandbox import containment, refusal

KILL_GRACE_S = 0.5
KILL_LIMIT_S = 5.0


class Keeper(NamedTuple):
    """What the template knows of one worker."""

    pid: int
    status_fd: int
    job: Job


class Template:
    """Serves Spawn and End requests of the judge, one at a time."""

    def __init__(self, channel: Channel, *, preload: str) -> None:
        self.channel = channel
        self.keepers: dict[int, Keeper] = {}
        if preload != "none":
            import torch

            # The first tensor initialises the allocator and the type system; a fork inherits them for nothing.
            torch.zeros(1)
        if preload == "refused":
            refusal.refuse_compute()
        self.own_mappings = mappings_of(os.getpid())
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Answer requests until the judge closes the channel; then end every worker."""
        try:
            while True:
                request: ToTemplate = self.channel.receive(ToTemplate, timeout_s=None)
                if isinstance(request, Spawn):
                    self.channel.send(Spawned(worker=self.spawn(request.job)))
                else:
                    self.channel.send(self.end(request))
        finally:
            for worker in list(self.keepers):
                self.end(End(worker=worker))

    def spawn(self, job: Job) -> int:
        """Fork a keeper and, below it, the worker. Returns the keeper's process id."""
        channel_fd, log_fd = self.channel.take_fd(), self.channel.take_fd()
        if job.refuse_framework:
            refusal.prepare(unmasking=job.platform != "cpu", copies=job.refuse_copies)
            self.own_mappings = mappings_of(os.getpid())
        namespaces = containment.CPU_NAMESPACES if job.platform == "cpu" else containment.gpu_namespaces()
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(status_read)
            self.channel.close()
            keep(job, namespaces, channel_fd, log_fd, status_write)
        for fd in (channel_fd, log_fd, status_write):
            os.close(fd)
        self.keepers[pid] = Keeper(pid, status_read, job)
        return pid

    def end(self, request: End) -> WorkerExit:
        """End one worker with everything below it."""
        keeper = self.keepers.pop(request.worker, None)
        if keeper is None:
            return WorkerExit()
        code = foreign_code(family_mappings(keeper.pid), self.own_mappings, keeper.job)
        status = read_status(keeper.status_fd, request.grace_s)
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper.pid, signal.SIGTERM)
            read_status(keeper.status_fd, KILL_GRACE_S)
        reap(keeper.pid)
        os.close(keeper.status_fd)
        how = os.waitstatus_to_exitcode(status) if status is not None else None
        return WorkerExit(
            exit_code=how if how is not None and how >= 0 else None,
            signal=-how if how is not None and how < 0 else None,
            libraries=code.libraries,
            generated_bytes=code.generated_bytes,
        )


def keep(job: Job, namespaces: tuple[str, ...], channel_fd: int, log_fd: int, status_fd: int) -> None:
    """The keeper's life: start the worker in new namespaces, wait for its end, leave nothing behind. Never returns."""
    status = 0
    try:
        containment.die_with_parent()
        os.setsid()
        containment.become_subreaper()
        active = containment.enter_namespaces(namespaces) if job.sandbox else []
        child = os.fork()
        if child == 0:
            if "namespace:mount" in active and not containment.mount_own_proc():
                os._exit(70)
            if "namespace:pid" in active:
                become_init(status_fd, channel_fd, log_fd)
            os.close(status_fd)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_to_the_end(job, channel_fd, log_fd, active)
        os.close(channel_fd)
        os.close(log_fd)
        inside = "namespace:pid" in active
        signal.signal(signal.SIGTERM, lambda _number, _frame: end_family(child, inside=inside))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = wait_for(child)
        if not inside:
            os.write(status_fd, status.to_bytes(4, "little"))
        end_family(child)
    finally:
        os._exit(0)


def become_init(status_fd: int, channel_fd: int, log_fd: int) -> None:
    """The first process of a pid namespace: fork, return in the child; the parent waits for it and says how it ended.

    The kernel shields a namespace's first process from signals; a worker in its place could neither abort nor be killed
    by its own doing, and how it ended would be lost. When this process exits, the kernel ends all others in here.
    """
    worker = os.fork()
    if worker == 0:
        containment.die_with_parent()
        return
    try:
        signal.signal(signal.SIGTERM, lambda _number, _frame: os.kill(worker, signal.SIGKILL))
        containment.die_with_parent()
        os.close(channel_fd)
        os.close(log_fd)
        os.write(status_fd, wait_for(worker).to_bytes(4, "little"))
    finally:
        os._exit(0)


def run_to_the_end(job: Job, channel_fd: int, log_fd: int, active: list[str]) -> None:
    """Run the worker in this process. Never returns; a fault of ours ends it with status 70 and a traceback."""
    from pytest_klineage.worker.runtime import run_worker

    status = 70
    try:
        run_worker(job, channel_fd, log_fd, active)
        status = 0
    except BaseException:  # process boundary: the traceback goes to the log, the status to the judge
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def family_mappings(pid: int) -> list[MappedRange]:
    """What the descendants of a process have mapped."""
    return [one for child in children(pid) for one in (*mappings_of(child), *family_mappings(child))]


def wait_for(worker: int) -> int:
    """Wait status of the worker; adopted orphans that end meanwhile are reaped."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return 0
        if pid == worker:
            return status


def end_family(worker: int, *, inside: bool = False) -> None:
    """Kill this process's children until there are none, then exit: every round kills all that it sees.

    The first process `inside` of a namespace is asked first to end the worker and to wait for it. Killed, it takes all
    others along, which no process waits for: their CPU time would be lost, and count as that of strangers.
    """
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if inside:
            os.kill(worker, signal.SIGTERM)
            reap(worker)
        else:
            os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    os._exit(0)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def read_status(fd: int, timeout_s: float) -> int | None:
    """The wait status a keeper reports, or None when the worker lives on."""
    ready, _, _ = select.select([fd], [], [], timeout_s)
    data = os.read(fd, 4) if ready else b""
    return int.from_bytes(data, "little") if len(data) == 4 else None


def reap(pid: int) -> None:
    """Wait for a keeper; kill it when it does not end by itself."""
    deadline = time.monotonic() + KILL_GRACE_S
    while time.monotonic() < deadline:
        done, _status = os.waitpid(pid, os.WNOHANG)
        if done:
            return
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
