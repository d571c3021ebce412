"""Without a GPU: the clocks of suites/gate_quality/evaluators, with events and activity records of the test."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from evaluators import clocks, kernelbench
from evaluators.clocks import ClockFailure, Launch, Work


def test_a_span_covers_everything_that_a_call_launched() -> None:
    launches = [Launch(5, 1), Launch(11, 2), Launch(12, 3), Launch(31, 4), Launch(33, 5)]
    work = [
        Work("flush", 6, 9, 1), Work("a", 2_000_000, 3_000_000, 2), Work("b", 3_500_000, 4_000_000, 3),
        Work("b", 7_000_000, 8_000_000, 5), Work("a", 6_000_000, 6_500_000, 4),
    ]  # fmt: skip
    assert clocks.spans_ms([(10, 20), (30, 40)], launches, work) == [2.0, 2.0]


def test_a_call_without_work_or_with_other_kernels_is_a_failure() -> None:
    with pytest.raises(ClockFailure, match="no work"):
        clocks.spans_ms([(0, 10)], [Launch(11, 1)], [Work("a", 0, 1, 1)])
    work = [Work("a", 0, 1, 1), Work("b", 2, 3, 2)]
    with pytest.raises(ClockFailure, match=r"\['b'\]"):
        clocks.spans_ms([(0, 10), (20, 30)], [Launch(1, 1), Launch(21, 2)], work)


class FakeCupti(types.ModuleType):
    """cupti.cupti as far as the clock uses it: time passes with every look, a kernel takes as many ns as set."""

    ActivityKind = types.SimpleNamespace(RUNTIME=5, DRIVER=4, CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2)

    class cuptiError(Exception):  # the library's own name
        pass

    def __init__(self, lengths: Iterator[int]) -> None:
        super().__init__("cupti.cupti")
        self.now, self.lengths, self.enabled, self.pending = 0, lengths, set[int](), list[Any]()

    def activity_register_callbacks(self, requested: Callable[[], tuple[int, int]], completed: Any) -> None:
        assert requested()[0] > 0
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def get_timestamp(self) -> int:
        self.now += 10
        return self.now

    def launch(self) -> None:
        if self.enabled:
            number, length = len(self.pending), next(self.lengths)
            self.pending += [
                types.SimpleNamespace(kind=5, start=self.now + 1, correlation_id=number),
                types.SimpleNamespace(kind=10, name="k", start=0, end=length, correlation_id=number),
                types.SimpleNamespace(kind=99),
            ]

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.pending)
        self.pending = []


def install_cupti(monkeypatch: pytest.MonkeyPatch, fake: FakeCupti) -> None:
    package = types.ModuleType("cupti")
    vars(package)["cupti"] = fake
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clocks, "flush_buffer", lambda: torch.empty(8))


def test_the_cupti_clock_gives_the_length_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupti(iter([1_000_000, 2_000_000, 3_000_000]))
    install_cupti(monkeypatch, fake)
    clock = clocks.CuptiClock()
    assert clock.samples(fake.launch, warmup=2, count=3) == [1.0, 2.0, 3.0]
    assert fake.enabled == set()


def test_without_cupti_the_clock_is_one_of_events_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cupti(monkeypatch, FakeCupti(iter([])))
    assert clocks.best_clock().name == "CUDA events (ClockFailure: a call launched no work that CUPTI saw)"
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert clocks.best_clock().name.startswith("CUDA events (ModuleNotFoundError")


class FakeEvent:
    """Counts what has been recorded; the time between two events is what was recorded between them."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = -1

    def record(self) -> None:
        self.at = FakeEvent.recorded = FakeEvent.recorded + 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.at - self.at)


def test_event_clocks_call_warm_ups_and_throw_one_away(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"run": 0, "clear": 0}

    def count(name: str) -> Callable[[], None]:
        def add() -> None:
            calls[name] += 1

        return add

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(kernelbench, "clear_l2", count("clear"))
    monkeypatch.setattr(clocks, "flush_buffer", lambda: torch.empty(8))
    assert kernelbench.EventClock().samples(count("run"), warmup=3, count=4) == [1.0] * 4
    assert calls == {"run": 8, "clear": 5}
    assert clocks.QueuedClock("test").samples(count("run"), warmup=3, count=4) == [1.0] * 4
    assert calls["run"] == 15
