"""Tasks of a desk: those that wait, by pool and priority, and the sealed replies and doubts for who asked."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import heapq
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from pytest_klineage.executors.answers import Doubt
from pytest_klineage.executors.cluster import pool_name
from pytest_klineage.executors.ray_judge import Order
from pytest_klineage.executors.sealing import sealed
from pytest_klineage.records import to_json
from pytest_klineage.records.judging import MachineFault

LOOKED_AT = 16
"""How many tasks a judge looks at for one that its device may take: few have met a fault."""


@dataclass
class QueuedJudgement:
    """A request on its way to a verdict."""

    order: Order
    data: bytes
    asker: str
    attempt: int = 1
    tried: set[str] = field(default_factory=set)
    """Devices on which it met a fault."""
    fault: MachineFault | None = None
    """The last of them."""
    artifact: Any = b""
    waits_since: float = field(default_factory=time.monotonic)
    reply: bytes = b""
    sent: bool = False

    @property
    def pool(self) -> str:
        return pool_name(self.order.platform, self.order.product)


class Queue:
    """Tasks that wait. Of equal priorities the one that came first is first."""

    def __init__(self) -> None:
        self._pools: defaultdict[str, list[tuple[int, int, QueuedJudgement]]] = defaultdict(list)
        self._numbers = itertools.count()

    def put(self, task: QueuedJudgement, pool: str = "") -> None:
        """Add a task, to its own pool where no other is named."""
        task.waits_since = time.monotonic()
        heapq.heappush(self._pools[pool or task.pool], (-task.order.priority, next(self._numbers), task))

    def take(self, pool: str, device: str) -> QueuedJudgement | None:
        """Take the first task that has not met a fault on the device; None without one."""
        queue, found = self._pools[pool], None
        passed: list[tuple[int, int, QueuedJudgement]] = []
        while queue and found is None and len(passed) < LOOKED_AT:
            entry = heapq.heappop(queue)
            if device in entry[2].tried:
                passed.append(entry)
            else:
                found = entry[2]
        for entry in passed:
            heapq.heappush(queue, entry)
        return found

    def take_hopeless(self, pool: str, devices: set[str], waited_s: float) -> list[QueuedJudgement]:
        """Take the tasks that have waited so long, and that none of these devices may take."""
        queue, latest = self._pools[pool], time.monotonic() - waited_s
        found = [entry for entry in queue if entry[2].waits_since < latest and not devices - entry[2].tried]
        if found:
            numbers = {number for _, number, _ in found}
            queue[:] = [entry for entry in queue if entry[1] not in numbers]
            heapq.heapify(queue)
        return [entry[2] for entry in found]

    def lengths(self) -> dict[str, int]:
        """How many tasks wait, by pool."""
        return {pool: len(queue) for pool, queue in self._pools.items() if queue}


MOST_AT_ONCE = 64
"""Replies in one message to an asker: 28 KB each at most, so 2 MB."""
GATHER_S = 0.05
"""How long the first reply of a message waits for others: a round trip for each one would cost more than the reply."""
MINUTE_S = 60.0


class Outbox:
    """Every task of a desk until its reply was fetched."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._tasks: dict[tuple[str, str], QueuedJudgement] = {}
        self._answered: collections.defaultdict[str, collections.deque[QueuedJudgement]]
        self._answered = collections.defaultdict(collections.deque)
        self._doubts: collections.defaultdict[str, dict[tuple[str, str], bytes]] = collections.defaultdict(dict)
        """Of each asker, by digest and ticket."""
        self._news = asyncio.Condition()
        self._ended: collections.deque[float] = collections.deque()

    def take_order(self, order: Order, data: bytes, asker: str) -> QueuedJudgement | None:
        """The task of a new order. None for a known one, by digest and ticket; its reply is sent again."""
        key = order.digest, order.ticket
        if (known := self._tasks.get(key)) is None:
            self._tasks[key] = QueuedJudgement(order, data, asker)
            return self._tasks[key]
        if known.reply and known.sent:
            known.sent = False
            self._answered[asker].append(known)
        return None

    async def answer(self, task: QueuedJudgement, line: bytes) -> None:
        """Put a task's sealed reply in."""
        task.reply, task.data, task.artifact = line, b"", b""
        self._ended.append(time.monotonic())
        self._forget_old_ends()
        self._answered[task.asker].append(task)
        await self.notify()

    def doubt(self, task: QueuedJudgement, judge: str, why: str) -> None:
        """Put in that a verdict is in doubt; `notify` says so."""
        doubt = Doubt(request=task.order.digest, ticket=task.order.ticket, judge=judge, why=why)
        self._doubts[task.asker][doubt.request, doubt.ticket] = sealed(to_json(doubt), self._secret)

    async def notify(self) -> None:
        """Wake the askers who wait."""
        async with self._news:
            self._news.notify_all()

    def forget(self, fetched: list[tuple[str, str]]) -> None:
        """Drop replies that an asker has on its disk."""
        for digest, ticket in fetched:
            if (task := self._tasks.get((digest, ticket))) is not None and task.reply:
                del self._tasks[digest, ticket]

    def forget_doubts(self, asker: str, doubted: list[tuple[str, str]]) -> None:
        """Drop doubts that an asker has on its disk."""
        for digest, ticket in doubted:
            self._doubts[asker].pop((digest, ticket), None)

    async def take(self, asker: str, wait_s: float) -> list[bytes]:
        """Sealed replies and doubts for an asker, after at most `wait_s`; doubts each time, until it has them."""
        async with self._news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait_for(lambda: self._has_news(asker)), wait_s)
        if 0 < len(self._answered[asker]) < MOST_AT_ONCE:
            await asyncio.sleep(min(GATHER_S, wait_s))
        waiting, found = self._answered[asker], list(self._doubts[asker].values())
        for _ in range(min(len(waiting), MOST_AT_ONCE)):
            task = waiting.popleft()
            task.sent = True
            found.append(task.reply)
        return found

    @property
    def unfetched(self) -> int:
        """Replies that no asker has on its disk."""
        return sum(1 for task in self._tasks.values() if task.reply)

    @property
    def verdicts_per_minute(self) -> int:
        """Replies of the last minute."""
        self._forget_old_ends()
        return len(self._ended)

    def _has_news(self, asker: str) -> bool:
        return bool(self._answered[asker] or self._doubts[asker])

    def _forget_old_ends(self) -> None:
        while self._ended and self._ended[0] < time.monotonic() - MINUTE_S:
            self._ended.popleft()
