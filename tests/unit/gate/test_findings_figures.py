"""Figures of findings: evidence in its units, numbers in messages, and every threshold just at its edge."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from pytest_klineage.gate import findings
from pytest_klineage.gate.findings import CLOCK_PAIRS, clean
from pytest_klineage.gate.timing.policy import LEAST_NOVEL, POLICIES, Measurement, Samples
from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.records import Code, Interval, KernelCase, Peaks, Reason
from pytest_klineage.records.messages import CaseOpened
from pytest_klineage.records.template_messages import WorkerExit

ACCEPTED = Reason(code=Code.ACCEPTED_FASTER, message="")
PAIRED = POLICIES["paired"]
NOVEL = [index % 2 == 0 for index in range(48)]


def figures(reason: Reason) -> set[float]:
    """All numbers in a message."""
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?", reason.message)}


def found(reason: Reason | None) -> Reason:
    assert reason is not None
    return reason


def with_gaps(candidate: Sequence[float], reference: Sequence[float], *, own: float = 4.0) -> Samples:
    """Calls of `own` ms by the worker's clocks, which the trusted clock saw by these gaps later."""
    return Samples(
        candidate=[own] * len(candidate), candidate_wall=[own + gap for gap in candidate],
        reference=[own] * len(reference), reference_wall=[own + gap for gap in reference],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "evidence"),
    [
        (WorkerExit(signal=signal.SIGSEGV), {"signal": 11}),
        (WorkerExit(exit_code=3), {"exit_code": 3}),
        (WorkerExit(exit_code=0), {}),
        (WorkerExit(signal=signal.SIGKILL), {}),
    ],
)
def test_an_end_carries_its_number(ended: WorkerExit, evidence: dict[str, int]) -> None:
    assert findings.how_it_ended(ended, flooded=False, printed=0).evidence == evidence


class TestClockEvidence:
    def test_hidden_time_is_in_ms_beyond_the_allowed_gap(self) -> None:
        reason = found(findings.clock_reason(with_gaps([1.125] * 20, [0.125] * 20)))
        assert reason.evidence == {"own_ms": 4.0, "hidden_ms": 1.0, "allowed_gap_ms": 0.125}
        assert figures(reason) == {4.0, 5.0}

    def test_new_inputs_hide_more_by_so_many_ms(self) -> None:
        samples = with_gaps([8.125, 0.125, 0.125, 0.125] * 8, [0.125] * 32)
        samples.novel = [True, False, False, False] * 8
        reason = found(findings.novel_clock_reason(samples))
        assert reason.evidence == {"own_ms": 4.0, "hidden_ms": 8.0, "novel_pairs": 8}
        assert figures(reason) == {8.0}

    def test_what_was_charged_does_not_change_the_rest(self) -> None:
        samples = with_gaps([1.125] * 4, [0.125] * 4)
        samples.candidate_waited, samples.novel = [0.5, 0.0, 0.0, 0.0], [True, False, True, False]
        samples.starts, samples.calls_per_sample, samples.one_block = [0, 2], 7, True
        paid = findings.overhead_corrected(samples)
        assert paid.candidate == [4.875] * 4, "one block: two gaps of the reference are allowed"
        paid.candidate = samples.candidate
        assert paid == samples


class TestMemoryEvidence:
    def test_both_intervals_have_a_confidence_of_99_percent(self) -> None:
        reference = [10.0 + 0.1 * (index % 11) for index in range(48)]
        candidate = [(8.0 if new else 2.0) + 0.1 * (index % 7) for index, new in enumerate(NOVEL)]
        new, known = (
            paired_interval(reference[start::2], candidate[start::2], confidence=findings.MEMORY_CONFIDENCE)
            for start in (0, 1)
        )
        reason = found(findings.faster_when_known(reference, candidate, NOVEL))
        assert reason.evidence == {"known_low": known.low, "novel_high": new.high, "novel_pairs": 24}

    def test_the_message_says_how_many_times_as_fast(self) -> None:
        candidate = [8.0 if new else 2.0 for new in NOVEL]
        assert 4.0 in figures(found(findings.faster_when_known([16.0] * 48, candidate, NOVEL)))

    def test_times_alone_are_held_against_1_ms(self) -> None:
        samples = Samples(
            reference=[10.0 ** (index * 7 % 5 - 2) for index in range(48)],
            candidate=[8.0 if new else 2.0 for new in NOVEL], novel=NOVEL,
        )  # fmt: skip
        evidence = found(findings.memory_reason(samples)).evidence
        assert (evidence["known_low"], evidence["novel_high"]) == pytest.approx((0.5, 0.125))

    def test_pairs_show_what_times_alone_do_not(self) -> None:
        """Both sides slow down together, by far more than what memory gains."""
        slow = [10.0 ** (index // 2 * 7 % 5 - 2) for index in range(48)]
        samples = Samples(
            reference=slow, novel=NOVEL,
            candidate=[ms * (2.0 if new else 1.0) for ms, new in zip(slow, NOVEL, strict=True)],
        )  # fmt: skip
        assert findings.faster_when_known([1.0] * 48, samples.candidate, NOVEL) is None
        assert found(findings.memory_reason(samples)).evidence["novel_high"] == pytest.approx(0.5)

    def test_alone_it_must_gain_the_square_of_the_others(self) -> None:
        assert findings.asked_alone([3.0 if new else 1.0 for new in NOVEL], NOVEL) == pytest.approx(10.8)


def test_a_floor_is_given_in_ms_for_both_limits() -> None:
    opened = CaseOpened(checks=(), findings=(), flops=2e9, min_bytes=3e6, settings={})
    reason = found(findings.floor_reason(opened, 1.5, Peaks(flops=1e12, bytes=1e9)))
    assert reason.evidence == pytest.approx({"floor_flops_ms": 2.0, "floor_bytes_ms": 3.0})
    assert figures(reason) == {1.5, 3.0}


def timed(
    low: float, high: float, *, stopped: str = "", samples: Samples | None = None, at_least: float = 1.0
) -> Reason:
    case = KernelCase(operator="gemm", shape={"M": 1}, dtype="fp32", reference="torch", at_least=at_least)
    samples = samples or Samples(reference=[1.0] * 30, candidate=[1.0] * 30)
    outcome = Measurement(
        samples=samples, interval=Interval((low + high) / 2, low, high), warmup=3, statistic="", stopped=stopped
    )
    return findings.timing_reason(case, outcome, margin=0.05)


class TestTimingEvidence:
    def test_every_verdict_carries_the_interval_and_the_best(self) -> None:
        samples = Samples(reference=[2.0, 4.0, 6.0, 8.0, 10.0], candidate=[1.0, 2.0, 3.0, 4.0, 5.0])
        assert timed(1.5, 2.5, samples=samples).evidence == {
            "speedup": 2.0, "low": 1.5, "high": 2.5, "at_least": 1.0, "at_best": 4.0,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("stopped", "option"), [("precise", "--klineage-precision"), ("time limit", "--klineage-time-limit")]
    )
    def test_the_option_that_narrows_depends_on_the_stop(self, stopped: str, option: str) -> None:
        reason = timed(0.8, 1.2, stopped=stopped)
        assert re.findall("--[a-z-]+", reason.message) == [option]

    @pytest.mark.parametrize(
        ("low", "high", "at_least", "message"),
        [
            (1.44, 1.48, 1.5, "faster than the reference, within 5 % of the required 1.5x: 1.460x [1.440, 1.480]"),
            (1.5, 1.5, 1.5, "faster than the reference: 1.500x [1.500, 1.500]"),
            (1.44, 1.64, 1.5, "faster than the reference: 1.540x [1.440, 1.640]"),
            (0.48, 0.5, 0.5, "within 5 % of the required 0.5x: 0.490x [0.480, 0.500]"),
            (0.5, 0.5, 0.5, "reaches the required 0.5x: 0.500x [0.500, 0.500]"),
            (0.98, 1.0, 1.0, "as fast as the reference: 0.990x [0.980, 1.000]"),
        ],
    )
    def test_the_margin_is_named_where_it_was_used(
        self, low: float, high: float, at_least: float, message: str
    ) -> None:
        assert timed(low, high, at_least=at_least).message == message

    def test_too_few_pairs_are_counted_by_kind(self) -> None:
        samples = Samples(novel=[True] * 11 + [False] * 100)
        outcome = Measurement(
            samples=samples, interval=Interval(2.0, 1.5, 2.5), warmup=3, statistic="", stopped="time limit"
        )
        before = timed(1.5, 2.5)
        reason = findings.compared_reason(before, outcome)
        assert reason.evidence == {**before.evidence, "novel_pairs": 11}
        assert figures(reason) >= {11.0, 100.0, 12.0}

    def test_a_busy_machine_is_given_in_percent(self) -> None:
        before = timed(1.5, 2.5)
        reason = findings.busy_reason(before, 0.9, 0.8)
        assert reason.evidence == {**before.evidence, "foreign_load": 0.9}
        assert figures(reason) >= {90.0, 80.0}


class TestUnheardEvidence:
    @staticmethod
    def one_block(candidate_ms: float, gap: float) -> Samples:
        """A reference of 4 ms whose gap is 1 ms: 2 ms are allowed, and charged is what is beyond."""
        samples = with_gaps([gap], [1.0])
        samples.candidate, samples.candidate_wall = [candidate_ms], [candidate_ms + gap]
        samples.one_block = True
        return samples

    def test_it_is_the_difference_of_the_gaps_in_ms(self) -> None:
        assert findings.unheard_ms(self.one_block(1.5, 1.5)) == 0.5
        assert findings.unheard_ms(self.one_block(1.5, 1.0)) == 0.0
        assert findings.unheard_ms(self.one_block(1.5, 0.25)) == 0.0

    @pytest.mark.parametrize(("pairs", "rank"), [(2, 2), (16, 12), (25, 18)])
    def test_it_is_the_upper_end_by_ranks(self, pairs: int, rank: int) -> None:
        """A sign test: of 16 ordered differences, the 12th ends a 95 % interval of their median."""
        samples = with_gaps([1.0 + number / 32 for number in range(pairs)], [1.0] * pairs)
        samples.one_block = True
        assert findings.unheard_ms(samples) == (rank - 1) / 32

    def test_sides_of_unequal_length_pair_up_as_far_as_they_go(self) -> None:
        samples = with_gaps([1.5, 1.5, 2.0], [1.0, 1.0])
        samples.one_block = True
        assert findings.unheard_ms(samples) == 0.5

    def test_the_speedup_with_it_stands_in_the_evidence(self) -> None:
        accepted = Reason(code=Code.ACCEPTED_FASTER, message="", evidence={"speedup": 2.5})
        reason = findings.resolved_reason(accepted, self.one_block(1.5, 1.5), line=2.01, policy=PAIRED)
        assert reason.code is Code.INCONCLUSIVE_INTERVAL
        assert reason.evidence == pytest.approx({"speedup": 2.5, "unheard_ms": 0.5, "speedup_with_it": 2.0})
        assert figures(reason) == {500.0, 2.0}

    def test_what_is_charged_counts_as_well(self) -> None:
        accepted = Reason(code=Code.ACCEPTED_FASTER, message="")
        reason = findings.resolved_reason(accepted, self.one_block(1.0, 4.0), line=1.5, policy=PAIRED)
        assert reason.evidence == pytest.approx({"unheard_ms": 1.0, "speedup_with_it": 1.0})
        assert figures(reason) == {1000.0, 1.0}


class TestClean:
    def test_4000_characters_are_kept_by_default(self) -> None:
        assert clean("x" * 4000) == "x" * 4000
        assert clean("x" * 4001).startswith("x" * 4000 + "\n")

    def test_a_text_of_just_the_limit_is_kept(self) -> None:
        assert clean("x" * 10, 10) == "x" * 10

    @pytest.mark.parametrize("text", ["::error::x", "##[error]x"])
    def test_a_command_is_broken_by_spaces_only(self, text: str) -> None:
        assert clean(text).replace(" ", "") == text


class TestClockEdges:
    """A reference's gap of 1/8 ms is allowed; the floor of 0.5 ms, then a share of the time, then gaps decide."""

    @pytest.mark.parametrize(
        ("reference_gap", "own", "excess", "hides"),
        [
            (0.125, 4.0, 0.5, False),
            (0.125, 4.0, 0.5625, True),
            (1.0, 4.0, 2.0, False),
            (1.0, 4.0, 2.0625, True),
            (4.0, 4.0, 7.0, False),
            (0.125, 100.0, 9.0, False),
            (0.125, 100.0, 11.0, True),
        ],
    )
    def test_a_gap_may_exceed_the_allowed_by_so_much(
        self, reference_gap: float, own: float, excess: float, hides: bool
    ) -> None:
        always = with_gaps([reference_gap + excess] * 20, [reference_gap] * 20, own=own)
        assert (findings.clock_reason(always) is not None) is hides
        when_new = with_gaps([excess + 0.25, 0.25] * 20, [reference_gap] * 40, own=own)
        when_new.novel = [True, False] * 20
        assert (findings.novel_clock_reason(when_new) is not None) is hides

    @pytest.mark.parametrize(("pairs", "hides"), [(CLOCK_PAIRS, True), (CLOCK_PAIRS - 1, False)])
    def test_three_honest_calls_clear_few_pairs_only(self, pairs: int, hides: bool) -> None:
        samples = with_gaps([0.125] * 3 + [4.125] * (pairs - 3), [0.125] * pairs)
        assert (findings.clock_reason(samples) is not None) is hides

    @pytest.mark.parametrize(("new", "hides"), [(LEAST_NOVEL, True), (LEAST_NOVEL - 1, False)])
    def test_so_many_new_inputs_are_enough(self, new: int, hides: bool) -> None:
        samples = with_gaps([8.125] * new + [0.125] * 20, [0.125] * (new + 20))
        samples.novel = [True] * new + [False] * 20
        assert (findings.novel_clock_reason(samples) is not None) is hides

    def test_waiting_on_new_inputs_is_no_lie(self) -> None:
        samples = with_gaps([8.125, 0.125] * 20, [0.125] * 40)
        samples.novel = [True, False] * 20
        assert findings.novel_clock_reason(samples) is not None
        samples.candidate_waited = [8.0, 0.0] * 20
        assert findings.novel_clock_reason(samples) is None


@pytest.mark.parametrize("judge", [findings.novel_clock_reason, findings.memory_reason])
def test_samples_of_one_kind_give_no_reason(judge: Callable[[Samples], Reason | None]) -> None:
    """Where no problem is new, `novel` is empty."""
    assert judge(with_gaps([4.125] * 20, [0.125] * 20)) is None


class TestUnequalLengths:
    @pytest.mark.parametrize("side", ["candidate_wall", "reference_wall"])
    def test_every_sample_has_both_clocks(self, side: str) -> None:
        samples = with_gaps([0.125] * 20, [0.125] * 20)
        getattr(samples, side).pop()
        with pytest.raises(ValueError, match="zip"):
            findings.clocks_of(samples)

    @pytest.mark.parametrize("judge", [findings.clock_reason, findings.novel_clock_reason])
    def test_waiting_is_known_for_every_call_or_none(self, judge: Callable[[Samples], Reason | None]) -> None:
        samples = with_gaps([0.125] * 20, [0.125] * 20)
        samples.candidate_waited = [0.0] * 19
        with pytest.raises(ValueError, match="zip"):
            judge(samples)

    def test_every_sample_has_its_overhead(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            findings.overheads_ms([1.0, 2.0], [1.5])


class TestMemoryEdges:
    @pytest.mark.parametrize(("asked", "faster"), [(2.0, False), (1.99, True)])
    def test_just_the_factor_is_not_more_than_it(self, asked: float, faster: bool) -> None:
        candidate = [2.0 if new else 1.0 for new in NOVEL]
        assert (findings.faster_when_known([1.0] * 48, candidate, NOVEL, asked) is not None) is faster

    @pytest.mark.parametrize(("gain", "asked"), [(1.19, findings.MEMORY_GAIN), (1.2, findings.NOISY_GAIN)])
    def test_a_reference_that_gains_just_that_raises_it(self, gain: float, asked: float) -> None:
        assert findings.asked_alone([gain if new else 1.0 for new in NOVEL], NOVEL) == asked


class TestFloorEdges:
    OPENED = CaseOpened(checks=(), findings=(), flops=2e9, min_bytes=2e6, settings={})
    PEAKS = Peaks(flops=1e12, bytes=1e9)

    def test_a_time_of_just_the_floor_is_possible(self) -> None:
        assert findings.floor_reason(self.OPENED, 2.0, self.PEAKS) is None
        assert findings.floor_reason(self.OPENED, 1.999, self.PEAKS) is not None

    def test_memory_is_the_limit_where_both_are_one(self) -> None:
        assert findings.floor_of(2e9, 2e6, self.PEAKS).limit == "bytes"


class TestBusyEdges:
    CLEAR: ClassVar = {"high": 0.2, "at_best": 0.3, "at_least": 1.0}

    @staticmethod
    def code(evidence: dict[str, float], code: Code = Code.SLOWER_THAN_REQUIRED) -> Code:
        return findings.busy_reason(Reason(code=code, message="", evidence={**evidence}), 0.9, 0.25).code

    def test_just_the_limit_is_allowed(self) -> None:
        assert findings.busy_reason(ACCEPTED, 0.25, 0.25) is ACCEPTED
        assert findings.busy_reason(ACCEPTED, 0.26, 0.25).code is Code.INCONCLUSIVE_BUSY

    def test_a_kernel_that_clearly_fails_stays_slower(self) -> None:
        assert self.code(self.CLEAR) is Code.SLOWER_THAN_REQUIRED

    def test_only_slower_can_be_that_clear(self) -> None:
        assert self.code(self.CLEAR, Code.ACCEPTED_FASTER) is Code.INCONCLUSIVE_BUSY

    @pytest.mark.parametrize("nearer", ["high", "at_best"])
    def test_half_of_what_is_asked_is_not_clear(self, nearer: str) -> None:
        assert self.code({**self.CLEAR, nearer: 0.5}) is Code.INCONCLUSIVE_BUSY

    @pytest.mark.parametrize("missing", ["high", "at_best", "at_least"])
    def test_without_its_figures_no_failure_is_clear(self, missing: str) -> None:
        figures = {name: value for name, value in self.CLEAR.items() if name != missing}
        assert self.code(figures) is Code.INCONCLUSIVE_BUSY


class TestResolvedEdges:
    def test_just_the_line_is_accepted(self) -> None:
        samples = Samples(reference=[4.0], reference_wall=[5.0], candidate=[1.5], candidate_wall=[3.0], one_block=True)
        assert findings.resolved_reason(ACCEPTED, samples, line=2.0, policy=PAIRED) is ACCEPTED
        assert findings.resolved_reason(ACCEPTED, samples, line=2.001, policy=PAIRED) is not ACCEPTED


FRAMES = """Traceback (most recent call last):
  File "/opt/x/pytest_klineage/worker/runtime.py", line 10, in load
    call()
  File "/home/me/refs.py", line 7, in fast
    return helper(a)
   File "/home/me/lib/helper.py", line 31, in helper
    raise
  File "/opt/x/pytest_klineage/operators/base.py", line 5, in run
    pass
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FRAMES + "ValueError: no rows\n", "helper.py:31: ValueError: no rows"),
        (FRAMES + "pytest_klineage.errors.UsageError: y has 3 rows \n\n", "helper.py:31: y has 3 rows"),
        ("ValueError: no rows", "ValueError: no rows"),
        ('  File "/opt/x/pytest_klineage/a.py", line 1, in f\nKeyError: 1', "KeyError: 1"),
        ('  File "/home/me/refs.py", line 7, in fast\nKeyError: 1', "refs.py:7: KeyError: 1"),
    ],
)
def test_a_users_failure_is_at_their_own_last_line(text: str, said: str) -> None:
    assert findings.raised_at(text) == said
