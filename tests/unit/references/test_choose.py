"""Choosing the fastest variant, with a fake clock: order, flags, threads, failures, what is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_klineage.errors import HarnessError
from pytest_klineage.references import TrialTensors, Variant, choose, flags
from pytest_klineage.references.choose import WARMUP_CALLS, DeviceTimer
from pytest_klineage.references.device import chosen_variant
from pytest_klineage.references.refusals import UnsupportedCase


def trial() -> TrialTensors:
    return TrialTensors("sm90", {"x": torch.ones(2)}, {"y": torch.zeros(2)})


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
    assert log[warm : warm + 40] == ["a", "b"] * 20
    assert log[warm + 40 :] == ["a"] * WARMUP_CALLS, "the chosen one once more, in the thread that will call it"


def test_enough_repetitions_by_default(clock: Any) -> None:
    choose.choose({"a": recording([], "a")}, trial())
    assert clock.calls >= 20


def test_only_countable_variants_are_chosen(clock: Any) -> None:
    clock.times_ms = (1.0, 2.0)
    chosen = choose.choose({name: recording([], name) for name in "ab"}, trial(), countable=("b",))
    assert chosen.name == "b"
    assert chosen.medians_ms == {"a": 1.0, "b": 2.0}


def test_what_cannot_run_is_left_out_and_recorded(clock: Any) -> None:
    def refuse(inputs: Any, outputs: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution." + 500 * "!")

    chosen = choose.choose({"broken": Variant(refuse), "a": recording([], "a")}, trial())
    assert chosen.name == "a"
    assert chosen.facts()["variant_error.broken"].startswith("RuntimeError: No available kernel.")
    assert len(chosen.facts()["variant_error.broken"]) <= choose.CAUSE_LENGTH
    with pytest.raises(UnsupportedCase, match="broken: RuntimeError: No available kernel"):
        choose.choose({"broken": Variant(refuse)}, trial())
    with pytest.raises(UnsupportedCase, match="broken"):
        choose.choose({"broken": Variant(refuse), "a": recording([], "a")}, trial(), countable=("broken",))


@pytest.mark.parametrize(
    ("said", "countable", "kind"),
    [
        ({"a": "no kernel", "b": "CUDA error: an illegal memory access was encountered"}, None, HarnessError),
        ({"a": "no kernel", "b": "CUDA error: an illegal memory access was encountered"}, ("a",), UnsupportedCase),
        ({"a": "no kernel", "b": "CUDA out of memory. Tried to allocate 2 GiB"}, ("b",), HarnessError),
        ({"a": "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"}, None, UnsupportedCase),
        ({}, None, HarnessError),
        ({"a": "no kernel"}, (), HarnessError),
    ],
)
def test_a_refusal_needs_all_countable_variants(
    said: dict[str, str], countable: tuple[str, ...] | None, kind: type[Exception], clock: Any
) -> None:
    def refusing(why: str) -> Variant:
        def call(inputs: Any, outputs: Any) -> None:
            raise RuntimeError(why)

        return Variant(call)

    variants = {name: refusing(why) for name, why in said.items()}
    with pytest.raises(kind, match="no variant of the reference runs: ") as caught:
        choose.choose(variants, trial(), countable=countable)
    assert type(caught.value) is kind
    assert all(why[:20] in str(caught.value) for why in said.values())


def test_a_fault_of_ours_is_not_swallowed() -> None:
    def wrong(inputs: Any, outputs: Any) -> None:
        inputs["no such input"]

    with pytest.raises(KeyError):
        choose.choose({"wrong": Variant(wrong)}, trial())


def test_conversions_are_made_once_in_a_thread_and_not_timed(clock: Any) -> None:
    converted, called = [], []

    def convert(inputs: Any) -> Any:
        converted.append((threading.current_thread() is threading.main_thread(), clock.calls))
        return {"x": inputs["x"] + 1}

    choose.choose({"a": Variant(lambda inputs, outputs: called.append(inputs["x"][0].item()), convert)}, trial())
    assert converted == [(False, 0), (True, clock.calls)]
    assert set(called) == {2.0}


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The values of two switches of the process, in place of torch's."""
    value: dict[str, Any] = {"knob": "as it was", "other": 1}
    table = {
        name: ((lambda name=name: value[name]), (lambda new, name=name: value.update({name: new}))) for name in value
    }
    monkeypatch.setattr(flags, "switches", lambda: table)
    return value


def test_variants_run_under_their_flags_and_the_best_keeps_them(knobs: dict[str, Any], clock: Any) -> None:
    seen: dict[str, list[Any]] = {}

    def watching(name: str, **own: Any) -> Variant:
        return Variant(lambda i, o: seen.setdefault(name, []).append((knobs["knob"], knobs["other"])), flags=own)

    variants = {
        "plain": watching("plain"),
        "turned": watching("turned", knob=11),
        "both": watching("both", knob=7, other=2),
    }
    clock.times_ms = (2.0, 1.0, 3.0)
    assert choose.choose(variants, trial(), reps=20).name == "turned"
    calls = WARMUP_CALLS + 20
    assert seen.pop("turned") == [(11, 1)] * (calls + WARMUP_CALLS)
    assert seen == {"plain": [("as it was", 1)] * calls, "both": [(7, 2)] * calls}
    assert knobs == {"knob": 11, "other": 1}


# --- threads ----------------------------------------------------------------------------------------------------------


class Library:
    """As PyTorch does with cuDNN's convolutions: a plan is kept by thread, and a switch decides how one is made.

    A plan is found by the shape alone: one that was made without a search serves a call that asks for one.
    """

    def __init__(self, knobs: dict[str, Any]) -> None:
        self._plans, self._knobs = threading.local(), knobs
        self.made: list[tuple[str, str]] = []
        """By which thread, and how."""
        self.used: list[str] = []

    def __call__(self, inputs: Any, outputs: Any) -> None:
        plans = vars(self._plans)
        key = str(tuple(inputs["x"].shape))
        if key not in plans:
            plans[key] = "searched" if self._knobs["knob"] == "search" else "by rules"
            self.made.append((threading.current_thread().name, plans[key]))
        self.used.append(plans[key])

    def time_ms(self, run: Callable[[], object]) -> float:
        """A clock: a plan that was searched for is the faster one."""
        run()
        return {"searched": 1.0, "by rules": 2.0}[self.used[-1]]


def searching(library: Library) -> dict[str, Variant]:
    """One without a search, then one with."""
    plain, search = Variant(library, flags={"knob": "no"}), Variant(library, flags={"knob": "search"})
    return {"plain": plain, "plain+search": search}


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("klineage-variant")]


def test_a_searching_variant_does_not_share_plans(knobs: dict[str, Any]) -> None:
    library = Library(knobs)
    chosen = choose.choose(searching(library), trial(), timer=library.time_ms)
    assert chosen.medians_ms == {"plain": 2.0, "plain+search": 1.0}
    assert chosen.name == "plain+search"
    here = threading.current_thread().name
    assert [how for name, how in library.made if name != here] == ["by rules", "searched"]


def test_the_chosen_one_is_warm_in_the_thread_that_will_call_it(knobs: dict[str, Any]) -> None:
    library = Library(knobs)
    chosen = choose.choose(searching(library), trial(), timer=library.time_ms)
    here = threading.current_thread().name
    assert [how for name, how in library.made if name == here] == ["searched"], "its own plan, and no other's"
    made = len(library.made)
    made_here = trial()
    chosen.variant(made_here.inputs, made_here.outputs)
    assert len(library.made) == made, "nothing is left to be planned"
    assert library.used[-1] == "searched"
    assert no_thread_is_left()


def test_a_known_choice_is_warmed_up_in_this_thread_alone(knobs: dict[str, Any]) -> None:
    library = Library(knobs)
    choose.choose(searching(library), replace(trial(), only="plain+search"))
    assert library.made == [(threading.current_thread().name, "searched")]


class Lottery(Library):
    """A library whose searches find plans that take so long, one after the other, for every caller."""

    def __init__(self, knobs: dict[str, Any], *times_ms: float) -> None:
        super().__init__(knobs)
        self._drawn = iter(times_ms)

    def __call__(self, inputs: Any, outputs: Any) -> None:
        plans = vars(self._plans)
        if "plan" not in plans:
            plans["plan"] = next(self._drawn) if self._knobs["knob"] == "search" else 2.0
            self.made.append((threading.current_thread().name, plans["plan"]))
        self.used.append(plans["plan"])

    def forget(self, inputs: Any) -> None:
        vars(self._plans).clear()

    def time_ms(self, run: Callable[[], object]) -> float:
        run()
        return self.used[-1]

    def variants(self) -> dict[str, Variant]:
        plain = Variant(self, flags={"knob": "no"})
        return {"plain": plain, "search": Variant(self, flags={"knob": "search"}, forget=self.forget)}


def test_the_best_of_several_searches_counts(knobs: dict[str, Any]) -> None:
    library = Lottery(knobs, 1.9, 2.4, 1.5, 1.6, 2.4, 1.6, 1.52, 0.1)
    chosen = choose.choose(library.variants(), trial(), timer=library.time_ms)
    assert choose.DRAWS == 4, "1.9 to 1.6 are compared; 2.4 and 1.6 are too slow to be charged"
    assert (chosen.name, chosen.medians_ms) == ("search", {"plain": 2.0, "search": 1.5})
    assert chosen.counted_ms == 1.52
    assert chosen.facts()["variant_ms.charged"] == "1.52000"
    chosen.variant({}, {})
    assert library.used[-1] == 1.52


def test_a_search_that_never_finds_it_again_ends(knobs: dict[str, Any]) -> None:
    library = Lottery(knobs, 1.0, *[1.5] * 100)
    chosen = choose.choose(library.variants(), trial(), timer=library.time_ms)
    assert chosen.counted_ms == 1.5
    assert len(library.made) == 1 + choose.DRAWS + choose.MOST_DRAWS


def test_empty_searches_leave_the_librarys_choice(knobs: dict[str, Any]) -> None:
    library = Lottery(knobs, *[2.1] * choose.DRAWS)
    chosen = choose.choose(library.variants(), trial(), timer=library.time_ms)
    assert (chosen.name, chosen.counted_ms) == ("plain", 0.0)
    assert "variant_ms.charged" not in chosen.facts()
    assert library.made[-1] == (threading.current_thread().name, 2.0)


@pytest.mark.parametrize(("target_ms", "counted_ms"), [(1.5, 1.51), (0.0, 1.9)])
def test_a_later_process_searches_until_as_fast(target_ms: float, counted_ms: float, knobs: dict[str, Any]) -> None:
    library = Lottery(knobs, 1.9, 1.6, 1.51, 0.1)
    before = replace(trial(), only="search", only_ms=target_ms)
    chosen = choose.choose(library.variants(), before, timer=library.time_ms)
    assert chosen.counted_ms == counted_ms
    assert {name for name, _ms in library.made} == {threading.current_thread().name}


def test_a_later_process_gets_what_was_compared() -> None:
    facts = {"variant": "a+benchmark", "variant_ms.a": "2.00000", "variant_ms.a+benchmark": "1.50000"}
    assert chosen_variant(facts) == {"variant": "a+benchmark", "variant_ms": 1.5}
    assert chosen_variant({"torch": "2.11"}) == {"variant": "", "variant_ms": 0.0}


def test_a_variant_keeps_one_thread_and_calls_follow_one_another(clock: Any) -> None:
    threads: dict[str, set[int]] = {"a": set(), "b": set()}
    busy = threading.Lock()

    def running(name: str) -> Variant:
        def call(inputs: Any, outputs: Any) -> None:
            assert busy.acquire(blocking=False), "another variant is running"
            threads[name].add(threading.get_ident())
            busy.release()

        return Variant(call)

    clock.times_ms = (1.0, 2.0)
    choose.choose({name: running(name) for name in threads}, trial())
    assert len(threads["b"]) == 1
    assert len(threads["a"]) == 2, "its own, and this one, as it is the chosen one"
    assert threads["a"] - {threading.get_ident()} != threads["b"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError, KeyError, SystemExit])
def test_no_thread_is_left_when_a_variant_fails(error: type[BaseException], clock: Any) -> None:
    def refuse(inputs: Any, outputs: Any) -> None:
        raise error("it is not supported")

    chosen_beside = {"a": recording([], "a"), "broken": Variant(refuse)}
    if error in (RuntimeError, ValueError, AssertionError):
        assert choose.choose(chosen_beside, trial()).name == "a"
        assert no_thread_is_left()
        with pytest.raises(UnsupportedCase, match="broken"):
            choose.choose(chosen_beside, trial(), countable=("broken",))
    else:
        with pytest.raises(error):
            choose.choose(chosen_beside, trial())
    assert no_thread_is_left()


def test_no_thread_is_left_when_the_clock_fails() -> None:
    def clock(run: Callable[[], object]) -> float:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        choose.choose({"a": recording([], "a"), "b": recording([], "b")}, trial(), timer=clock)
    assert no_thread_is_left()


MARK: ContextVar[str] = ContextVar("MARK", default="unset")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (torch.enable_grad, (True, False)),
        (torch.no_grad, (False, False)),
        (torch.inference_mode, (False, True)),
    ],
)
def test_modes_and_context_variables_are_those_of_the_caller(
    mode: Any, expected: tuple[bool, bool], clock: Any
) -> None:
    seen: set[Any] = set()

    def call(inputs: Any, outputs: Any) -> None:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), MARK.get()))

    token = MARK.set("by an import, as fla does with Triton's allocator")
    try:
        with mode():
            choose.choose({"a": Variant(call)}, trial())
    finally:
        MARK.reset(token)
    assert seen == {(*expected, "by an import, as fla does with Triton's allocator")}


def test_threads_are_on_the_gpu_and_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    """torch keeps both by thread; here without CUDA."""
    state = threading.local()
    ours = SimpleNamespace(device=torch.device("cuda", 1))
    seen: set[Any] = set()

    @contextmanager
    def stream(wanted: Any) -> Iterator[None]:
        before, state.stream = getattr(state, "stream", None), wanted
        yield
        state.stream = before

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(state, "device", device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: state.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    state.device, state.stream = ours.device, ours
    on_gpu: Any = {"x": SimpleNamespace(device=torch.device("cuda", 1))}
    watching = Variant(lambda i, o: seen.add((state.device, id(state.stream))))
    choose.choose({"a": watching, "b": watching}, TrialTensors("sm90", on_gpu, {}))
    assert seen == {(ours.device, id(ours))}


def test_torchs_switches_are_those_of_the_process() -> None:
    """Written by the thread of a variant, read by whatever thread calls the library, and by the record."""
    # The other two cannot be set in a build without CUDA.
    kept = flags.read_flags(("cudnn_benchmark", "cudnn_sdp", "flash_sdp", "mem_efficient_sdp", "math_sdp"))
    turned = {name: not value for name, value in kept.items()}
    try:
        writer = threading.Thread(target=flags.write_flags, args=(turned,))
        writer.start()
        writer.join()
        assert flags.read_flags(turned) == turned
    finally:
        flags.write_flags(kept)


# --- the clock --------------------------------------------------------------------------------------------------------


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
