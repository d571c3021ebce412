"""From facts to reasons: clocks, floors, how a process ended, where an interval lies, and harmless text."""

from __future__ import annotations

import random
import re
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.gate import findings
from pytest_klineage.gate.findings import (
    CLOCK_FLOOR_MS,
    CLOCK_SHARE,
    Peaks,
    busy_reason,
    charged,
    charges,
    clean,
    clock_reason,
    clocks_of,
    floor_reason,
    how_it_ended,
    library_reason,
    timing_reason,
)
from pytest_klineage.gate.host.cpu import PEAK_BYTES_PER_CORE, peak_flops_per_core
from pytest_klineage.gate.timing.policy import Outcome, Samples
from pytest_klineage.gate.timing.statistics import median
from pytest_klineage.records import Code, Interval, KernelCase
from pytest_klineage.records.messages import Ended, Opened

PAIRS = 60
TRUE_MS = 5.0


def measured(*, hidden_ms: float = 0.0, share: float = 1.0, contention: float = 0.0, seed: int = 1) -> Samples:
    """Samples of two equally fast sides. `share` of the candidate's calls leave `hidden_ms` out of their own clock;
    `contention` of all answers come up to 4 ms late, on both sides."""
    draw = random.Random(seed)

    def late() -> float:
        return draw.uniform(0, 4) if draw.random() < contention else 0.0

    samples = Samples()
    for index in range(PAIRS):
        samples.reference.append(TRUE_MS + draw.uniform(0, 0.1))
        samples.reference_wall.append(samples.reference[-1] + draw.uniform(0.04, 0.08) + late())
        true_ms = TRUE_MS + draw.uniform(0, 0.1)
        hidden = hidden_ms if (index * 7) % PAIRS < share * PAIRS else 0.0
        samples.candidate.append(true_ms - hidden)
        samples.candidate_wall.append(true_ms + draw.uniform(0.04, 0.08) + late())
    return samples


class TestClocks:
    def test_an_honest_worker_gives_no_reason(self) -> None:
        assert clock_reason(measured()) is None

    @pytest.mark.parametrize("hidden_ms", [1.5, 2.0, 4.9])
    def test_a_worker_that_hides_time_in_every_call_is_caught(self, hidden_ms: float) -> None:
        reason = clock_reason(measured(hidden_ms=hidden_ms))
        assert reason is not None
        assert reason.code is Code.CLOCK
        assert reason.evidence["hidden_ms"] == pytest.approx(hidden_ms, abs=0.1)

    @pytest.mark.parametrize("share", [0.8, 0.9])
    def test_one_that_hides_time_in_most_calls_is_caught(self, share: float) -> None:
        assert clock_reason(measured(hidden_ms=2.0, share=share)) is not None

    def test_one_that_hides_time_in_60_percent_of_the_calls_is_charged_for_it(self) -> None:
        samples = measured(hidden_ms=4.0, share=0.6)
        assert median(samples.candidate) < 0.3 * TRUE_MS
        assert clock_reason(samples) is None
        assert median(charged(samples).candidate) == pytest.approx(TRUE_MS, abs=0.2)

    @pytest.mark.parametrize("contention", [0.1, 0.3, 0.5, 0.9])
    @pytest.mark.parametrize("seed", range(5))
    def test_a_busy_machine_gives_no_reason(self, contention: float, seed: int) -> None:
        assert clock_reason(measured(contention=contention, seed=seed)) is None

    def test_a_busy_machine_does_not_hide_a_liar(self) -> None:
        assert clock_reason(measured(hidden_ms=4.0, contention=0.05)) is not None

    @pytest.mark.parametrize("pairs", [6, PAIRS])
    def test_what_no_free_processor_explains_is_no_lie(self, pairs: int) -> None:
        samples = measured(hidden_ms=4.0).without_first(PAIRS - pairs)
        assert clock_reason(samples) is not None
        samples.candidate_waited = [4.0] * pairs
        assert clock_reason(samples) is None
        assert median(charged(samples).candidate) == pytest.approx(TRUE_MS, abs=0.2), "it is still charged"

    def test_waiting_excuses_no_more_than_was_waited(self) -> None:
        samples = measured(hidden_ms=4.0)
        samples.candidate_waited = [1.0] * PAIRS
        reason = clock_reason(samples)
        assert reason is not None
        assert reason.evidence["hidden_ms"] == pytest.approx(3.0, abs=0.1)

    def test_waiting_in_a_few_calls_excuses_no_others(self) -> None:
        samples = measured(hidden_ms=4.0)
        samples.candidate_waited = [4.0 if index % 8 == 0 else 0.0 for index in range(PAIRS)]
        assert clock_reason(samples) is not None

    def test_a_short_kernel_may_be_late_by_the_floor(self) -> None:
        samples = Samples(reference=[0.01] * 9, candidate=[0.01] * 9, reference_wall=[0.05] * 9)
        samples.candidate_wall = [0.05 + 0.99 * CLOCK_FLOOR_MS] * 9
        assert clock_reason(samples) is None
        samples.candidate_wall = [0.05 + 1.01 * CLOCK_FLOOR_MS] * 9
        assert clock_reason(samples) is not None

    def test_a_long_kernel_may_be_late_by_a_share_of_its_time(self) -> None:
        own = 20 * CLOCK_FLOOR_MS / CLOCK_SHARE
        samples = Samples(reference=[own] * 9, candidate=[own] * 9, reference_wall=[own + 1.0] * 9)
        samples.candidate_wall = [own + 1.0 + 0.99 * CLOCK_SHARE * own] * 9
        assert clock_reason(samples) is None
        samples.candidate_wall = [own + 1.0 + 1.01 * CLOCK_SHARE * own] * 9
        assert clock_reason(samples) is not None

    def test_the_gap_is_the_trusted_clock_minus_the_workers(self) -> None:
        samples = Samples(reference=[1.0], candidate=[2.0], reference_wall=[1.5], candidate_wall=[4.0])
        clocks = clocks_of(samples)
        assert (clocks.reference_gaps, clocks.candidate_gaps) == ((0.5,), (2.0,))

    @given(
        st.lists(st.tuples(*[st.floats(0.01, 100)] * 2, *[st.floats(0, 10)] * 2), min_size=1, max_size=30),
    )
    def test_charging_adds_time_and_never_more_than_the_trusted_clock_saw(
        self, calls: list[tuple[float, float, float, float]]
    ) -> None:
        samples = Samples(
            reference=[call[0] for call in calls],
            candidate=[call[1] for call in calls],
            reference_wall=[call[0] + call[2] for call in calls],
            candidate_wall=[call[1] + call[3] for call in calls],
        )
        result = charged(samples)
        for own, paid, wall in (
            (samples.reference, result.reference, samples.reference_wall),
            (samples.candidate, result.candidate, samples.candidate_wall),
        ):
            for before, after, seen in zip(own, paid, wall, strict=True):
                assert before <= after <= seen + 1e-9

    def test_one_gap_of_each_side_says_nothing_of_how_much_gaps_differ(self) -> None:
        """The figures, in ms, are those of one convolution under do_bench on an H200: 1500 calls, one block a side."""
        one = Samples(
            reference=[0.0341], candidate=[0.0137], reference_wall=[0.0341 + 0.0098], candidate_wall=[0.0137 + 0.0161]
        )
        assert charged(one).candidate == pytest.approx([0.0137 + 0.0161 - 0.0098])
        one.one_block = True
        assert charged(one).candidate == pytest.approx([0.0137])
        one.candidate_wall = [0.0137 + 3 * 0.0098]
        assert charged(one).candidate == pytest.approx([0.0137 + 0.0098]), "beyond twice the reference's it is charged"

    def test_charging_leaves_an_honest_measurement_as_it_is(self) -> None:
        samples = Samples(
            reference=[1.0, 2.0], candidate=[3.0, 4.0], reference_wall=[1.5, 2.5], candidate_wall=[3.5, 4.5]
        )
        assert charged(samples) == samples

    @pytest.mark.parametrize("pairs", [6, 12, 32])
    def test_two_sides_that_are_alike_are_charged_alike(self, pairs: int) -> None:
        """A side that is compared with itself is charged less: at six pairs half as much."""
        draw, paid = random.Random(1), {"reference": 0.0, "candidate": 0.0}
        for _ in range(2000):
            gaps = [[draw.lognormvariate(-3, 0.5) for _ in range(pairs)] for _ in paid]
            samples = Samples(reference=[1.0] * pairs, candidate=[1.0] * pairs)
            samples.reference_wall, samples.candidate_wall = ([1 + gap for gap in side] for side in gaps)
            result = charged(samples)
            paid["reference"] += sum(result.reference) - pairs
            paid["candidate"] += sum(result.candidate) - pairs
        assert 0.85 < paid["candidate"] / paid["reference"] < 1.15

    def test_what_was_charged_is_written_down_sample_by_sample(self) -> None:
        samples = measured(hidden_ms=2.0)
        paid = charged(samples)
        added = charges(samples.candidate, paid.candidate)
        assert len(added) == PAIRS
        assert median(added) == pytest.approx(2.0, abs=0.1)
        assert [after - extra for after, extra in zip(paid.candidate, added, strict=True)] == pytest.approx(
            samples.candidate
        )
        assert charges(samples.candidate, samples.candidate) == ()

    def test_charging_does_not_change_the_raw_samples(self) -> None:
        samples = measured(hidden_ms=2.0)
        before = list(samples.candidate)
        charged(samples)
        assert samples.candidate == before


def opened(flops: float, min_bytes: float) -> Opened:
    return Opened(checks=(), findings=(), flops=flops, min_bytes=min_bytes, seconds=0.0, settings={})


FLOPS_PER_CORE = peak_flops_per_core((), "fp32")


def peaks(cores: int) -> Peaks:
    return Peaks(flops=FLOPS_PER_CORE * cores, bytes=PEAK_BYTES_PER_CORE * cores)


class TestFloor:
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

    def test_nobody_who_keeps_up_with_a_trusted_reference_is_too_fast(self) -> None:
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
            (Ended(signal=signal.SIGSEGV), Code.CRASH, "SIGSEGV"),
            (Ended(signal=signal.SIGABRT), Code.CRASH, "SIGABRT"),
            (Ended(signal=signal.SIGXFSZ), Code.CRASH, "SIGXFSZ"),
            (Ended(signal=45), Code.CRASH, "45"),
            (Ended(signal=signal.SIGKILL), Code.OUT_OF_MEMORY, "memory"),
            (Ended(exit_code=0), Code.EARLY_EXIT, "status 0"),
            (Ended(exit_code=3), Code.EXITED, "status 3"),
            (Ended(exit_code=255), Code.EXITED, "status 255"),
            (Ended(killed=True), Code.FORGED_REPLY, "closed the channel"),
            (Ended(), Code.FORGED_REPLY, "closed the channel"),
        ],
    )
    def test_every_way_to_end_has_its_reason(self, ended: Ended, code: Code, says: str) -> None:
        reason = how_it_ended(ended, flooded=False, printed=0)
        assert reason.code is code
        assert says in reason.message

    @pytest.mark.parametrize("ended", [Ended(exit_code=0), Ended(signal=signal.SIGSEGV), Ended(killed=True)])
    def test_a_flood_explains_any_end(self, ended: Ended) -> None:
        reason = how_it_ended(ended, flooded=True, printed=123456)
        assert reason.code is Code.LOG_FLOOD
        assert "123456 bytes" in reason.message

    @given(st.one_of(st.none(), st.integers(0, 255)), st.one_of(st.none(), st.integers(1, 64)), st.booleans())
    def test_no_end_is_a_success(self, exit_code: int | None, number: int | None, killed: bool) -> None:
        ended = Ended(exit_code=exit_code, signal=number, killed=killed)
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
    outcome = Outcome(samples=samples, interval=interval, warmup=3, statistic="", stopped="")
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

    def test_what_is_inconclusive_anyway_keeps_its_reason(self) -> None:
        timed = judged(0.8, 1.2)
        assert busy_reason(timed, 1.0, 0.25) is timed

    def test_the_figures_stand_in_message_and_evidence(self) -> None:
        reason = judged(0.6, 0.7, at_least=1.25)
        assert "1.25x" in reason.message
        assert "[0.600, 0.700]" in reason.message
        assert (reason.evidence["low"], reason.evidence["high"], reason.evidence["at_least"]) == (0.6, 0.7, 1.25)

    def test_an_inconclusive_verdict_says_what_helps(self) -> None:
        assert "--klineage-time-limit" in judged(0.8, 1.2).message


def test_a_library_that_does_the_work_is_named() -> None:
    reason = library_reason(("libmkl_rt.so.2", "libopenblas.so"))
    assert reason is not None
    assert reason.code is Code.WRAPPER_LIBRARY
    assert "libmkl_rt.so.2, libopenblas.so" in reason.message
    assert library_reason(()) is None


class TestMemory:
    @staticmethod
    def samples(novel_ms: float, known_ms: float, *, pairs: int = 32, every: int = 4) -> Samples:
        novel = [number % every == 0 for number in range(pairs)]
        jitter = random.Random(0)
        return Samples(
            reference=[10.0 * jitter.lognormvariate(0, 0.05) for _ in novel],
            candidate=[(novel_ms if new else known_ms) * jitter.lognormvariate(0, 0.05) for new in novel],
            novel=novel,
        )

    def test_faster_on_what_it_had_met_is_a_replay(self) -> None:
        reason = findings.memory_reason(self.samples(10.0, 5.0))
        assert reason is not None
        assert reason.code is Code.REPLAY
        assert reason.evidence["novel_pairs"] == 8

    def test_the_same_speed_on_both_is_honest(self) -> None:
        assert findings.memory_reason(self.samples(10.0, 10.0)) is None

    def test_slower_on_what_it_had_met_is_no_cheat(self) -> None:
        assert findings.memory_reason(self.samples(5.0, 10.0)) is None

    def test_a_few_new_inputs_prove_nothing(self) -> None:
        assert findings.memory_reason(self.samples(10.0, 1.0, pairs=28)) is None
        assert findings.memory_reason(self.samples(10.0, 1.0, pairs=32)) is not None

    def test_a_reference_that_is_noise_does_not_hide_memory(self) -> None:
        noisy = self.samples(10.0, 1.0, pairs=64)
        noisy.reference = [10.0 ** (index * 7 % 5 - 2) for index in range(64)]
        assert findings.memory_reason(noisy) is not None

    def test_a_reference_that_is_slower_on_new_inputs_too_clears_the_candidate(self) -> None:
        both = self.samples(10.0, 1.0, pairs=64)
        both.reference = [10.0 if new else 1.0 for new in both.novel]
        assert findings.memory_reason(both) is None


class TestNovelClock:
    """A clock that is bent on new inputs only."""

    def samples(self, hidden_ms: float, pairs: int = 40, everywhere: bool = False) -> Samples:
        novel = [index % 4 == 0 for index in range(pairs)]
        own = [1.0 + 0.01 * (index % 7) for index in range(pairs)]
        return Samples(
            reference=own[:], candidate=own[:], reference_wall=[ms + 0.1 for ms in own],
            candidate_wall=[
                ms + 0.1 + (hidden_ms if new or everywhere else 0) for ms, new in zip(own, novel, strict=True)
            ],
            novel=novel,
        )  # fmt: skip

    def test_time_that_only_new_inputs_hide_is_a_cheat(self) -> None:
        reason = findings.novel_clock_reason(self.samples(20.0))
        assert reason is not None
        assert reason.code is Code.CLOCK
        assert findings.clock_reason(self.samples(20.0)) is None, "it has another reason already"

    def test_gaps_that_all_calls_have_say_nothing_about_new_inputs(self) -> None:
        assert findings.novel_clock_reason(self.samples(20.0, everywhere=True)) is None
        assert findings.novel_clock_reason(self.samples(0.3)) is None

    def test_a_few_new_inputs_prove_nothing(self) -> None:
        assert findings.novel_clock_reason(self.samples(20.0, pairs=28)) is None

    def test_what_the_clock_hid_shows_in_the_charged_samples(self) -> None:
        assert findings.memory_reason(self.samples(20.0)) is None
        assert findings.memory_reason(findings.charged(self.samples(20.0))) is not None
