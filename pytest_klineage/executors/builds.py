"""Builds ahead of judgements: on the CPUs of a Ray cluster, by priority, each artifact once."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pytest_klineage.executors.queueing import Queue, QueuedJudgement
from pytest_klineage.executors.ray_judge import build, build_verdict
from pytest_klineage.executors.sealing import seal_reply

KEPT_BUILDS = 256
"""Artifacts whose object references are held; older ones are built again when they are asked for."""
POOL = "build"
"""The one pool of tasks that wait for their build."""


class Builds:
    """Builds of a desk, as many at a time as the cluster has CPUs, so that Ray's own queue stays short.

    answer: takes a task whose kernel does not build, with the sealed reply. put: takes a task that is built.
    """

    def __init__(
        self, secret: bytes, answer: Callable[[QueuedJudgement, bytes], Awaitable[None]],
        put: Callable[[QueuedJudgement], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._secret, self._answer, self._put = secret, answer, put
        self._queue, self._wake = Queue(), asyncio.Semaphore(0)
        self._builders: list[asyncio.Future[Any]] = []
        self._references: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._building = 0

    def __len__(self) -> int:
        return self._building + self._queue.lengths().get(POOL, 0)

    def add(self, task: QueuedJudgement, cpus: int) -> None:
        """Have a task's kernel built."""
        self._queue.put(task, POOL)
        while len(self._builders) < cpus:
            self._builders.append(asyncio.ensure_future(self._build_on()))
        self._wake.release()

    def forget(self, recipe: str) -> None:
        """Have an artifact built again when it is asked for."""
        self._references.pop(recipe, None)

    async def _build_on(self) -> None:
        while True:
            await self._wake.acquire()
            task = self._queue.take(POOL, "")
            if task is not None:
                task.artifact = await self._built(task)
                if not task.reply:
                    await self._put(task)

    async def _built(self, task: QueuedJudgement) -> Any:
        """A reference to the artifact. A kernel that does not build has its verdict with that; b"" when none builds."""
        import ray

        reference = self._reference(task)
        self._building += 1
        try:
            built = await reference
            if (reply := build_verdict(built, self._secret)) is None:
                return reference if built else b""
            if reply.request == task.order.digest:  # another case may allow what this one does not, such as spills
                own = msgspec.structs.replace(reply, ticket=task.order.ticket)
                await self._answer(task, seal_reply(own, self._secret))
            return b""
        except ray.exceptions.RayError:
            self.forget(task.order.recipe)
            return b""
        finally:
            self._building -= 1

    def _reference(self, task: QueuedJudgement) -> Any:
        import ray

        recipe = task.order.recipe
        if recipe not in self._references:
            self._references[recipe] = ray.remote(build).options(num_cpus=1, max_retries=2).remote(task.data)
            if len(self._references) > KEPT_BUILDS:
                self._references.popitem(last=False)
        return self._references[recipe]
