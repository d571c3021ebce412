"""A model of judging on many GPUs: requests, builds, judges, canaries, failing hosts. Events by simpy; no kernel runs.

A request is built on a pool of cores, waits in one queue by priority, and is judged on whichever GPU is free. A verdict
counts once the GPU's next canary is good: a sick GPU leaves, and what it judged since the last one is judged again. A
host that fails loses what its GPUs have unconfirmed, and comes back. Search enters through a window, which bounds the
queue.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[Any, Any, None]
CANARY_EVERY = 50  # verdicts of a GPU
GPUS_A_HOST, CORES_A_GPU = 8, 16
WINDOW = 12
"""Search requests for each GPU that are built or waiting at one time."""
PR, SEARCH = 0, 1  # priorities; the lower number is judged first


@dataclass(frozen=True)
class Rates:
    """What happens how often, and how long it takes. One of the recorded times is drawn for each request."""

    verdict_s: Sequence[float]
    build_s: Sequence[float]
    canary_s: float
    host_failures_per_hour: float = 0.01
    host_back_s: float = 600.0
    sick_share: float = 1e-4  # of canaries


@dataclass
class Request:
    number: int
    priority: int
    verdict_s: float
    build_s: float
    ready: float = 0.0
    position: Any = None  # in the window

    def __lt__(self, other: Request) -> bool:  # of one priority, longer ones first: none is left to the end
        return (self.priority, -self.verdict_s, self.number) < (other.priority, -other.verdict_s, other.number)


@dataclass
class Fleet:
    """One simulation: how often each request got its verdict; seconds from built to begun, by priority."""

    gpus: int
    rates: Rates
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)
    asked: list[Request] = field(default_factory=list)
    confirmed: Counter[int] = field(default_factory=Counter)
    waits: dict[int, list[float]] = field(default_factory=lambda: {PR: [], SEARCH: []})
    most_waiting: int = 0
    judged_again: int = 0
    quarantined: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.queue = simpy.PriorityStore(self.env)
        self.cores = simpy.PriorityResource(self.env, CORES_A_GPU * self.gpus)
        self.window = simpy.Resource(self.env, WINDOW * self.gpus)
        for first in range(0, self.gpus, GPUS_A_HOST):
            judges = [self.env.process(self._judge()) for _ in range(min(GPUS_A_HOST, self.gpus - first))]
            self.env.process(self._host(judges))

    def ask(self, priority: int, position: Any = None) -> None:
        drawn = self.draw.choice(self.rates.verdict_s), self.draw.choice(self.rates.build_s)
        self.asked.append(Request(len(self.asked), priority, *drawn, position=position))
        self.env.process(self._built(self.asked[-1]))

    def search(self, requests: int) -> Process:
        """So many requests, each as soon as the window has room for it."""
        for _ in range(requests):
            position = self.window.request()
            yield position
            self.ask(SEARCH, position)

    def gate(self, per_second: float, seconds: float) -> Process:
        """Requests of a PR gate, at random; they need no place in the window."""
        while self.env.now < seconds:
            yield self.env.timeout(self.draw.expovariate(per_second))
            self.ask(PR)

    def _built(self, request: Request) -> Process:
        with self.cores.request(priority=request.priority) as core:
            yield core
            yield self.env.timeout(request.build_s)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.ready = self.env.now
        self.queue.put(request)
        self.most_waiting = max(self.most_waiting, len(self.queue.items))

    def _judge(self) -> Process:
        """One GPU until it is found sick. An interruption is its host's failure."""
        held: list[Request] = []
        while True:
            taking = self.queue.get()
            try:
                if taking.triggered or not held:
                    request = yield taking
                    self.waits[request.priority].append(self.env.now - request.ready)
                    held.append(request)
                    yield self.env.timeout(request.verdict_s)
                    if request.position is not None:
                        self.window.release(request.position)
                        request.position = None
                    if len(held) < CANARY_EVERY:
                        continue
                taking.cancel()
                yield self.env.timeout(self.rates.canary_s)
                if self.draw.random() < self.rates.sick_share:
                    self.quarantined += 1
                    return self._again(held)
                self.confirmed.update(request.number for request in held)
                held.clear()
            except simpy.Interrupt:
                taking.cancel()
                if taking.triggered and not any(request is taking.value for request in held):
                    held.append(taking.value)  # handed out in the very moment of the failure
                self._again(held)
                yield self.env.timeout(self.rates.host_back_s)

    def _again(self, held: list[Request]) -> None:
        self.judged_again += len(held)
        for request in held:
            self._wait(request)
        held.clear()

    def _host(self, judges: Sequence[simpy.Process]) -> Process:
        """Fail now and then, with all GPUs."""
        while self.rates.host_failures_per_hour:
            yield self.env.timeout(self.draw.expovariate(self.rates.host_failures_per_hour / 3600))
            self.failures += 1
            for judge in [judge for judge in judges if judge.is_alive]:
                judge.interrupt()
            yield self.env.timeout(2 * self.rates.host_back_s)
