"""From facts to reasons: floors, how a process ended, where an interval lies, and harmless text."""

from __future__ import annotations

import math
import re
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.gate.findings import (
    Peaks,
    busy_reason,
    clean,
    compared_reason,
    floor_of,
    floor_reason,
    how_it_ended,
    library_reason,
    timing_reason,
)
from pytest_klineage.gate.host.cpu import PEAK_BYTES_PER_CORE, peak_flops_per_core
from pytest_klineage.gate.timing.policy import Measurement, Samples
from pytest_klineage.records import Code, Floor, Interval, KernelCase
from pytest_klineage.records.messages import CaseOpened
from pytest_klineage.records.template_messages import WorkerExit


def opened(flops: float, min_bytes: float) -> CaseOpened:
    return CaseOpened(checks=(), findings=(), flops=flops, min_bytes=min_bytes, settings={})


FLOPS_PER_CORE = peak_flops_per_core((), "fp32")


def peaks(cores: int) -> Peaks:
    return Peaks(flops=FLOPS_PER_CORE * cores, bytes=PEAK_BYTES_PER_CORE * cores)


class TestFloor:
    def test_the_longer_of_both_is_the_floor(self) -> None:
        machine = Peaks(flops=1e12, bytes=1e9)
        assert floor_of(2e9, 1e6, machine, "NVIDIA H200") == Floor(ms=2.0, limit="flops", product="NVIDIA H200")
        assert floor_of(0.0, 3e6, machine) == Floor(ms=3.0, limit="bytes")
        assert floor_of(1e18, 3e6, Peaks(flops=math.inf, bytes=1e9)).limit == "bytes"

    def test_a_possible_time_gives_no_reason(self) -> None:
        assert floor_reason(opened(1e9, 1e6), 10.0, peaks(2)) is None

    def test_more_arithmetic_than_the_cores_can_do_is_too_fast(self) -> None:
        flops = FLOPS_PER_CORE * 2 * 1e-3
        assert floor_reason(opened(flops, 0.0), 1.001, peaks(2)) is None
        reason = floor_reason(opened(flops, 0.0), 0.999, peaks(2))
        assert reason is not None
        assert reason.code is Code.TOO_FAST

    def test_more_bytes_than_the_cores_can_move_is_too_fast(self) -> None:
        reason = floor_reason(opened(0.0, 1e12), 1.0, peaks(4))
        assert reason is not None
        assert reason.evidence["floor_bytes_ms"] > reason.evidence["floor_flops_ms"]

    def test_a_kernel_as_fast_as_a_trusted_reference_is_not_too_fast(self) -> None:
        flops = FLOPS_PER_CORE * 2 * 1e-3
        assert floor_reason(opened(flops, 0.0), 0.5, peaks(2), trusted_ms=0.75) is None
        assert floor_reason(opened(flops, 0.0), 0.5, peaks(2), trusted_ms=0.76) is not None

    @given(st.floats(0, 1e15), st.floats(0, 1e12), st.floats(1e-6, 1e6), st.integers(1, 128))
    def test_more_cores_never_raise_the_floor(self, flops: float, size: float, time_ms: float, cores: int) -> None:
        if floor_reason(opened(flops, size), time_ms, peaks(cores)) is None:
            assert floor_reason(opened(flops, size), time_ms, peaks(cores + 1)) is None


class TestEnds:
    @pytest.mark.parametrize(
        ("ended", "code", "says"),
        [
            (WorkerExit(signal=signal.SIGSEGV), Code.CRASH, "SIGSEGV"),
            (WorkerExit(signal=signal.SIGABRT), Code.CRASH, "SIGABRT"),
            (WorkerExit(signal=signal.SIGXFSZ), Code.CRASH, "SIGXFSZ"),
            (WorkerExit(signal=45), Code.CRASH, "45"),
            (WorkerExit(signal=signal.SIGKILL), Code.OUT_OF_MEMORY, "memory"),
            (WorkerExit(exit_code=0), Code.EARLY_EXIT, "status 0"),
            (WorkerExit(exit_code=3), Code.EXITED, "status 3"),
            (WorkerExit(exit_code=255), Code.EXITED, "status 255"),
            (WorkerExit(), Code.FORGED_REPLY, "closed the channel"),
        ],
    )
    def test_every_way_to_end_has_its_reason(self, ended: WorkerExit, code: Code, says: str) -> None:
        reason = how_it_ended(ended, flooded=False, printed=0)
        assert reason.code is code
        assert says in reason.message

    @pytest.mark.parametrize("ended", [WorkerExit(exit_code=0), WorkerExit(signal=signal.SIGSEGV), WorkerExit()])
    def test_a_flood_explains_any_end(self, ended: WorkerExit) -> None:
        reason = how_it_ended(ended, flooded=True, printed=123456)
        assert reason.code is Code.LOG_FLOOD
        assert "123456 bytes" in reason.message

    @given(st.one_of(st.none(), st.integers(0, 255)), st.one_of(st.none(), st.integers(1, 64)))
    def test_no_end_is_a_success(self, exit_code: int | None, number: int | None) -> None:
        ended = WorkerExit(exit_code=exit_code, signal=number)
        assert how_it_ended(ended, flooded=False, printed=0).code.status in ("runtime_error", "cheat")


def starts_a_command(line: str) -> bool:
    """Whether GitHub's runner would obey a line: "::name::" after leading space, or "##[name]" anywhere."""
    return line.lstrip().startswith("::") or "##[" in line


class TestCleanText:
    def test_plain_text_stays_as_it_is(self) -> None:
        text = "error: 3 tiles\n\tstd::vector at ## 5 [x]\nÜnïcödé :: ok\n"
        assert clean(text) == text

    @pytest.mark.parametrize(
        "text",
        ["\x1b[31mred\x1b[0m", "\x1b[2J\x1b[1;1H", "\x1b]0;title\x07", "\x9b31mred", "a\rb", "\x00", "\x08", "\x7f"],
    )
    def test_no_control_character_is_left(self, text: str) -> None:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", clean(text))

    def test_colours_vanish_and_words_stay(self) -> None:
        assert clean("\x1b[1;31mfailed\x1b[0m").strip() == "failed"

    @pytest.mark.parametrize(
        "text",
        [
            "::error::x",
            "fine\n::error::x",
            "  ::error::x",
            "\t::set-output name=a::b",
            "\x1b[0m::error::x",
            "fine\r::error::x",
            "\r\n::add-mask::x",
            "\u2028::error::x",
            "##[error]x",
            "some words ##[add-mask]x",
            "##\x00[error]x",
            "###[error]x",
        ],
    )
    def test_no_line_is_a_command_to_the_ci_system(self, text: str) -> None:
        assert not any(starts_a_command(line) for line in clean(text).splitlines())

    @given(st.text(alphabet=":#[ \n\r\t\x1b\x00\x85\u2028\u2029ax0;m", max_size=30))
    def test_no_text_becomes_a_command_or_a_control_sequence(self, text: str) -> None:
        result = clean(text)
        assert not any(starts_a_command(line) for line in result.splitlines())
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", result)

    @given(st.text(max_size=300), st.integers(1, 100))
    def test_the_length_is_bounded_and_what_is_left_out_is_said(self, text: str, limit: int) -> None:
        result = clean(text, limit)
        assert len(result) <= limit + 40
        assert ("more characters" in result) or result == clean(text, 10**6)

    def test_the_beginning_is_kept(self) -> None:
        assert clean("x" * 50, 10) == "x" * 10 + "\n... 40 more characters"


def judged(low: float, high: float, *, at_least: float = 1.0, pairs: int = 30) -> Any:
    case = KernelCase(operator="gemm", shape={"M": 1}, dtype="fp32", reference="torch", at_least=at_least)
    samples = Samples(reference=[1.0] * pairs, candidate=[1.0] * pairs)
    interval = Interval((low + high) / 2, low, high)
    outcome = Measurement(samples=samples, interval=interval, warmup=3, statistic="", stopped="")
    return timing_reason(case, outcome, margin=0.05)


class TestTiming:
    @pytest.mark.parametrize(
        ("low", "high", "at_least", "code"),
        [
            (1.5, 1.6, 1.0, Code.ACCEPTED_FASTER),
            (0.97, 1.03, 1.0, Code.ACCEPTED_SAME),
            (0.6, 0.7, 0.5, Code.ACCEPTED_MEETS_TARGET),
            (0.6, 0.7, 1.0, Code.SLOWER_THAN_REQUIRED),
            (1.1, 1.2, 2.0, Code.SLOWER_THAN_REQUIRED),
            (0.8, 1.2, 1.0, Code.INCONCLUSIVE_INTERVAL),
        ],
    )
    def test_every_standing_has_its_code(self, low: float, high: float, at_least: float, code: Code) -> None:
        assert judged(low, high, at_least=at_least).code is code

    def test_a_busy_machine_makes_a_clear_result_inconclusive(self) -> None:
        timed = judged(0.5, 0.6)
        assert timed.code is Code.SLOWER_THAN_REQUIRED
        assert busy_reason(timed, 0.2, 0.25) is timed
        busy = busy_reason(timed, 0.3, 0.25)
        assert busy.code is Code.INCONCLUSIVE_BUSY
        assert busy.evidence["foreign_load"] == 0.3
        assert "30 %" in busy.message

    def test_an_interval_across_the_line_was_disturbed_as_well(self) -> None:
        timed = judged(0.8, 1.2)
        busy = busy_reason(timed, 1.0, 0.25)
        assert busy.code is Code.INCONCLUSIVE_BUSY
        assert busy.message.endswith("or raise --klineage-busy-limit")
        assert timed.message in busy.message

    def test_the_figures_stand_in_message_and_evidence(self) -> None:
        reason = judged(0.6, 0.7, at_least=1.25)
        assert "1.25x" in reason.message
        assert "[0.600, 0.700]" in reason.message
        assert (reason.evidence["low"], reason.evidence["high"], reason.evidence["at_least"]) == (0.6, 0.7, 1.25)

    @pytest.mark.parametrize(
        ("new", "known", "stopped", "low", "code"),
        [
            (11, 100, "time limit", 1.5, Code.INCONCLUSIVE_FEW),
            (100, 11, "time limit", 1.5, Code.INCONCLUSIVE_FEW),
            (12, 12, "time limit", 1.5, Code.ACCEPTED_FASTER),
            (8, 12, "precise", 1.5, Code.ACCEPTED_FASTER),
            (0, 6, "time limit", 0.1, Code.SLOWER_THAN_REQUIRED),
            (0, 6, "time limit", 0.8, Code.INCONCLUSIVE_INTERVAL),
        ],
    )
    def test_without_pairs_to_compare_none_is_accepted(
        self, new: int, known: int, stopped: str, low: float, code: Code
    ) -> None:
        samples = Samples(novel=[True] * new + [False] * known)
        interval = Interval(low, low, 2 * low)
        outcome = Measurement(samples=samples, interval=interval, warmup=3, statistic="", stopped=stopped)
        reason = compared_reason(judged(low, 2 * low), outcome)
        assert reason.code is code
        if code is Code.INCONCLUSIVE_FEW:
            assert reason.evidence["novel_pairs"] == new

    def test_an_inconclusive_verdict_says_what_helps(self) -> None:
        assert "--klineage-time-limit" in judged(0.8, 1.2).message


def test_a_library_that_does_the_work_is_named() -> None:
    reason = library_reason(("libmkl_rt.so.2", "libopenblas.so"))
    assert reason is not None
    assert reason.code is Code.WRAPPER_LIBRARY
    assert "libmkl_rt.so.2, libopenblas.so" in reason.message
    assert library_reason(()) is None
