"""Choosing the fastest variant, with a fake clock: order, flags, failures, what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_klineage.errors import HarnessError
from pytest_klineage.references import Trial, Variant, choose, flags
from pytest_klineage.references.choose import WARMUP_CALLS, DeviceTimer


def trial() -> Trial:
    return Trial("sm90", {"x": torch.ones(2)}, {"y": torch.zeros(2)})


def recording(log: list[str], name: str) -> Variant:
    """A variant that says when it is called."""
    return Variant(lambda inputs, outputs: log.append(name))


class ByCall:
    """A clock for which a call takes as long as its variant's list says, one after the other."""

    def __init__(self, log: list[str], times: dict[str, list[float]]) -> None:
        self.log, self.times = log, times

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        taken = self.times[self.log[-1]]
        taken.append(taken.pop(0))
        return taken[-1]


def test_the_smallest_median_wins_not_the_smallest_time() -> None:
    log: list[str] = []
    timer = ByCall(log, {"steady": [2.0], "lucky": [1.0, 3.0, 3.0]})
    chosen = choose.choose({name: recording(log, name) for name in ("lucky", "steady")}, trial(), timer=timer, reps=21)
    assert chosen.name == "steady"
    assert chosen.facts() == {"variant": "steady", "variant_ms.lucky": "3.00000", "variant_ms.steady": "2.00000"}


def test_variants_take_turns_after_all_are_warm() -> None:
    log: list[str] = []
    timer = ByCall(log, {"a": [1.0], "b": [1.0]})
    choose.choose({name: recording(log, name) for name in "ab"}, trial(), timer=timer, reps=20)
    warm = 2 * WARMUP_CALLS
    assert log[:warm] == ["a"] * WARMUP_CALLS + ["b"] * WARMUP_CALLS
    assert log[warm:] == ["a", "b"] * 20


def test_enough_repetitions_by_default(clock: Any) -> None:
    choose.choose({"a": recording([], "a")}, trial())
    assert clock.calls >= 20


def test_only_what_may_be_charged_is_chosen(clock: Any) -> None:
    clock.times_ms = (1.0, 2.0)
    chosen = choose.choose({name: recording([], name) for name in "ab"}, trial(), chargeable=("b",))
    assert chosen.name == "b"
    assert chosen.medians_ms == {"a": 1.0, "b": 2.0}


def test_what_cannot_run_is_left_out_and_recorded(clock: Any) -> None:
    def refuse(inputs: Any, outputs: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution." + 500 * "!")

    chosen = choose.choose({"broken": Variant(refuse), "a": recording([], "a")}, trial())
    assert chosen.name == "a"
    assert chosen.facts()["variant_error.broken"].startswith("RuntimeError: No available kernel.")
    assert len(chosen.facts()["variant_error.broken"]) <= choose.CAUSE_LENGTH
    with pytest.raises(HarnessError, match="broken: RuntimeError: No available kernel"):
        choose.choose({"broken": Variant(refuse)}, trial())
    with pytest.raises(HarnessError, match="broken"):
        choose.choose({"broken": Variant(refuse), "a": recording([], "a")}, trial(), chargeable=("broken",))


def test_a_fault_of_ours_is_not_swallowed() -> None:
    def wrong(inputs: Any, outputs: Any) -> None:
        inputs["no such input"]

    with pytest.raises(KeyError):
        choose.choose({"wrong": Variant(wrong)}, trial())


def test_conversions_are_made_once_and_not_timed(clock: Any) -> None:
    converted, called = [], []

    def convert(inputs: Any) -> Any:
        converted.append(1)
        return {"x": inputs["x"] + 1}

    choose.choose({"a": Variant(lambda inputs, outputs: called.append(inputs["x"][0].item()), convert)}, trial())
    assert len(converted) == 1
    assert set(called) == {2.0}


def test_every_variant_runs_under_its_flags_and_the_best_keeps_them(
    monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    value: dict[str, Any] = {"knob": "as it was", "other": 1}
    table = {
        name: ((lambda name=name: value[name]), (lambda new, name=name: value.update({name: new}))) for name in value
    }
    monkeypatch.setattr(flags, "switches", lambda: table)
    seen: dict[str, set[Any]] = {}

    def watching(name: str, **own: Any) -> Variant:
        return Variant(lambda i, o: seen.setdefault(name, set()).add((value["knob"], value["other"])), flags=own)

    variants = {
        "plain": watching("plain"),
        "turned": watching("turned", knob=11),
        "both": watching("both", knob=7, other=2),
    }
    clock.times_ms = (2.0, 1.0, 3.0)
    assert choose.choose(variants, trial()).name == "turned"
    assert seen == {"plain": {("as it was", 1)}, "turned": {(11, 1)}, "both": {(7, 2)}}
    assert value == {"knob": 11, "other": 1}


def test_the_clock_flushes_waits_and_then_times_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 0.25

    class Buffer:
        def zero_(self) -> None:
            log.append("flush")

    def empty(size: int, **_kind: Any) -> Buffer:
        log.append(size)
        return Buffer()

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=50))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("spin"))
    monkeypatch.setattr(torch, "empty", empty)
    timer = DeviceTimer()
    assert timer(lambda: log.append("call")) == 0.25
    assert log == [100, "spin", "flush", "event", "call", "event", "wait"], "a flush of twice the L2, outside of events"
