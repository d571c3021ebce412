"""Times of two populations allow no hard verdict, unless the kernel fails whichever of them is true."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pytest_klineage.gate.findings import busy_reason, timing_reason
from pytest_klineage.gate.host.neighbours import busy_gpu_reason
from pytest_klineage.gate.timing.policy import Measurement, Samples
from pytest_klineage.gate.timing.stability import is_unstable, own_slow_calls, steady_reason, two_groups, what_was_seen
from pytest_klineage.records import Code, Interval, KernelCase, KernelSource, Neighbours, Reason, Status, Verdict
from pytest_klineage.records.device import GpuProcess
from pytest_klineage.results.packed import read_packed

RECORDED = Path(__file__).parents[4] / "results" / "gate_quality" / "a_a.jsonl"
STEADY = [1.0 + 0.01 * (n % 9) for n in range(60)]
TORN = [0.2] * 36 + [4.1] * 24
"""What a kernel of 0.2 ms takes when its two threads share a processor for a time slice in two calls of five."""


def judged(
    low: float, high: float, *, at_least: float = 1.0, reference: Sequence[float] = STEADY,
    candidate: Sequence[float] = STEADY, stopped: str = "time limit",
) -> Reason:  # fmt: skip
    case = KernelCase(operator="gemm", shape={"M": 1}, dtype="fp32", reference="torch", at_least=at_least)
    samples = Samples(reference=list(reference), candidate=list(candidate))
    interval = Interval((low * high) ** 0.5, low, high)
    outcome = Measurement(samples=samples, interval=interval, warmup=3, statistic="", stopped=stopped)
    timed = timing_reason(case, outcome, margin=0.05)
    return steady_reason(timed, samples, at_least=at_least, line=0.95 * at_least, limit=2.0)


def test_quartiles_that_differ_by_more_than_two_are_unstable() -> None:
    assert is_unstable(TORN, 2.0)
    assert not is_unstable(STEADY, 2.0)
    assert not is_unstable([1.0, 1.0, 2.0, 2.0] * 10, 2.0)
    assert is_unstable([1.0, 1.0, 2.01, 2.01] * 10, 2.0)
    assert not is_unstable(TORN, 30.0)


def test_a_few_slow_calls_are_not_a_second_population() -> None:
    assert not is_unstable([0.2] * 50 + [9.0] * 10, 2.0)


def test_two_populations_are_named_with_sizes_and_medians() -> None:
    shuffled = [value * random.Random(1).uniform(0.97, 1.03) for value in TORN]
    groups = two_groups(shuffled)
    assert groups is not None
    assert (groups.low_count, groups.high_count) == (36, 24)
    assert groups.low_ms == pytest.approx(0.2, rel=0.05)
    assert groups.high_ms == pytest.approx(4.1, rel=0.05)
    assert what_was_seen("candidate", TORN) == (
        "the candidate's times are two populations, 36 samples around 0.2 ms and 24 around 4.1 ms"
    )


def test_one_population_has_no_groups() -> None:
    assert two_groups(STEADY) is None
    assert two_groups([1.0]) is None


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize(("low", "high"), [(0.60, 0.70), (0.97, 1.03), (1.5, 1.6), (0.8, 1.2)])
def test_no_hard_verdict_on_two_populations_of_either_side(side: str, low: float, high: float) -> None:
    assert judged(low, high).code is not Code.INCONCLUSIVE_UNSTABLE
    reason = judged(low, high, **{side: TORN})  # type: ignore[arg-type]  # a side's name
    assert reason.code is Code.INCONCLUSIVE_UNSTABLE
    assert f"the {side}'s times are two populations" in reason.message
    assert reason.evidence["unstable"] == side
    assert "measured: " in reason.message


def test_both_sides_are_named_where_both_are_torn() -> None:
    reason = judged(0.94, 1.37, at_least=3.0, reference=TORN, candidate=TORN)
    assert reason.code is Code.INCONCLUSIVE_UNSTABLE
    assert reason.evidence["unstable"] == "reference, candidate"


def test_a_wide_interval_is_not_called_slower() -> None:
    reason = judged(0.40, 0.85)
    assert reason.code is Code.INCONCLUSIVE_UNSTABLE
    assert "differ by a factor of 2.1" in reason.message
    assert judged(0.45, 0.85).code is Code.SLOWER_THAN_REQUIRED


def test_a_wide_high_interval_is_accepted_as_asked() -> None:
    reason = judged(0.059, 1.406, at_least=0.05)
    assert reason.code is Code.ACCEPTED_MEETS_TARGET
    assert reason.message.startswith("reaches the required 0.05x")


class TestClearFailures:
    SLOW = tuple(15 * value for value in STEADY)

    def test_a_kernel_that_is_far_too_slow_fails_on_a_busy_machine(self) -> None:
        timed = judged(0.06, 0.07, candidate=self.SLOW)
        assert timed.code is Code.SLOWER_THAN_REQUIRED
        assert busy_reason(timed, 0.9, 0.25) is timed

    def test_and_beside_others_on_a_gpu(self) -> None:
        timed, others = judged(0.06, 0.07, candidate=self.SLOW), Neighbours(processes=(GpuProcess(pid=1),))
        assert busy_gpu_reason(timed, others, allow=False) is timed
        mild = judged(0.6, 0.7, candidate=[1.5 * value for value in STEADY])
        assert busy_gpu_reason(mild, others, allow=False).code is Code.INCONCLUSIVE_BUSY

    def test_and_with_a_wide_interval(self) -> None:
        assert judged(0.03, 0.09, candidate=self.SLOW).code is Code.SLOWER_THAN_REQUIRED

    def test_and_with_torn_times_that_are_all_too_slow(self) -> None:
        torn = [15.0] * 30 + [40.0] * 30
        assert judged(0.03, 0.07, candidate=torn).code is Code.SLOWER_THAN_REQUIRED

    def test_but_not_where_its_fast_quarter_would_do(self) -> None:
        assert judged(0.06, 0.3, candidate=[0.9] * 20 + [15.0] * 40).code is Code.INCONCLUSIVE_UNSTABLE

    def test_and_not_half_of_what_is_asked_and_more(self) -> None:
        timed = judged(0.55, 0.6, candidate=[1.8 * value for value in STEADY])
        assert busy_reason(timed, 0.9, 0.25).code is Code.INCONCLUSIVE_BUSY


class TestItsOwnNoise:
    """A kernel that alone scatters is slower where even its fast quarter is, however near to what is asked."""

    NOISY = (1.2,) * 30 + (3.0,) * 30

    def test_where_its_fast_quarter_is_too_slow_it_is_slower(self) -> None:
        assert judged(0.4, 0.8, candidate=self.NOISY).code is Code.SLOWER_THAN_REQUIRED

    def test_where_the_interval_is_wide_as_well(self) -> None:
        assert judged(0.3, 0.9, candidate=self.NOISY).code is Code.SLOWER_THAN_REQUIRED

    def test_not_where_its_fast_quarter_reaches_the_line(self) -> None:
        fast = [1.1] * 30 + [3.0] * 30
        assert judged(0.4, 0.8, candidate=fast).code is Code.INCONCLUSIVE_UNSTABLE
        assert judged(0.4, 0.8, candidate=fast, at_least=1.1).code is Code.SLOWER_THAN_REQUIRED

    def test_not_where_the_reference_scatters_as_well(self) -> None:
        torn = [1.0] * 30 + [2.1] * 30
        slow = [3.0] * 30 + [7.0] * 30
        assert judged(0.4, 0.8, reference=torn, candidate=slow).code is Code.INCONCLUSIVE_UNSTABLE

    def test_an_accepted_one_is_open_all_the_same(self) -> None:
        assert judged(1.2, 1.3, candidate=self.NOISY).code is Code.INCONCLUSIVE_UNSTABLE


class TestRareSlowCalls:
    """Neither the median nor the quartiles see them: they count where they are the candidate's own."""

    FAST = tuple(0.4 + 0.001 * (n % 9) for n in range(240))
    RARE = tuple(60.0 if n % 12 == 5 else value for n, value in enumerate(FAST))
    STEADY = tuple(1.0 + 0.01 * (n % 9) for n in range(240))

    def test_an_accepted_kernel_slower_by_its_sums_is_unstable(self) -> None:
        reason = judged(2.2, 2.4, reference=self.STEADY, candidate=self.RARE)
        assert reason.code is Code.INCONCLUSIVE_UNSTABLE
        assert "20 of 240 samples of the candidate took over 30 times its median" in reason.message
        assert "0.194x by the means of all samples, below 0.95" in reason.message
        assert reason.evidence["slow_calls"] == 20
        assert reason.evidence["by_sums"] == pytest.approx(0.193, abs=0.001)

    def test_one_that_is_slower_already_stays_so(self) -> None:
        assert judged(0.5, 0.6, reference=self.STEADY, candidate=self.RARE).code is Code.SLOWER_THAN_REQUIRED

    def test_slow_calls_that_leave_it_fast_enough_do_not_matter(self) -> None:
        rare = [8 * value if n % 12 == 5 else value for n, value in enumerate(self.FAST)]
        assert judged(2.2, 2.4, reference=self.STEADY, candidate=rare).code is Code.ACCEPTED_FASTER
        assert judged(2.2, 2.4, at_least=2.0, reference=self.STEADY, candidate=rare).code is Code.INCONCLUSIVE_UNSTABLE

    def test_so_do_calls_of_less_than_three_medians(self) -> None:
        later = [2.7 * value if n % 8 == 5 else value for n, value in enumerate(self.FAST)]
        assert judged(2.2, 2.4, at_least=2.3, reference=self.STEADY, candidate=later).code is Code.INCONCLUSIVE_UNSTABLE
        assert judged(2.2, 2.4, at_least=1.9, reference=self.STEADY, candidate=later).code is Code.ACCEPTED_FASTER

    def test_nor_do_so_few_that_they_may_be_chance(self) -> None:
        few = [600.0 if n in (7, 90, 200) else value for n, value in enumerate(self.FAST)]
        assert judged(2.2, 2.4, reference=self.STEADY, candidate=few).code is Code.ACCEPTED_FASTER

    def test_a_machine_that_disturbs_both_sides_accuses_nobody(self) -> None:
        draw = random.Random(5)
        for _ in range(60):
            share, lost = draw.uniform(0.02, 0.2), draw.uniform(0.5, 60.0)
            reference, candidate = (
                [value + (lost if draw.random() < share else 0.0) for value in side]
                for side in (self.STEADY, self.FAST)
            )
            assert own_slow_calls(Samples(reference=reference, candidate=candidate)) is None

    def test_nor_is_any_in_recorded_timings_of_equal_kernels(self) -> None:
        records = [json.loads(line) for line in read_packed(RECORDED).splitlines()]
        assert records
        for record in records:
            sides = record["reference_samples_ms"], record["candidate_samples_ms"]
            for reference, candidate in (sides, sides[::-1]):
                assert own_slow_calls(Samples(reference=reference, candidate=candidate)) is None

    def test_nor_hides_calls_that_are_far_slower_than_what_it_adds(self) -> None:
        draw = random.Random(7)
        reference, candidate = (
            [value + (draw.uniform(1.5, 4.0) if draw.random() < 0.35 else 0.0) for value in side]
            for side in (self.STEADY, self.FAST)
        )
        rare = [40 + value if n % 5 == 4 else value for n, value in enumerate(candidate)]
        slow = own_slow_calls(Samples(reference=reference, candidate=rare))
        assert slow is not None
        assert slow.medians > 3
        assert slow.count == len(rare) // 5

    def test_nor_one_whose_disturbance_is_short_beside_the_reference(self) -> None:
        """0.5 ms more are two medians of a call of 0.2 ms, and little beside one of 5 ms: both have them as often."""
        draw = random.Random(6)
        long = [5.0 + (0.5 if draw.random() < 0.2 else 0.0) for _ in range(240)]
        short = [0.2 + (0.5 if draw.random() < 0.2 else 0.0) for _ in range(240)]
        assert own_slow_calls(Samples(reference=long, candidate=short)) is None

    def test_without_slow_calls_there_is_nothing_to_say(self) -> None:
        assert own_slow_calls(Samples(reference=[*self.STEADY], candidate=[*self.FAST])) is None

    def test_sides_of_unequal_counts_compare_by_their_means(self) -> None:
        """do_bench takes more samples of the shorter side: sums of those would make a fast kernel slow."""
        reference, rare = self.STEADY[:100], [2.0 if n % 12 == 5 else value for n, value in enumerate(self.FAST)]
        slow = own_slow_calls(Samples(reference=[*reference], candidate=rare))
        assert slow is not None
        assert slow.by_sums == pytest.approx(sum(reference) / 100 / (sum(rare) / 240))
        assert judged(2.2, 2.4, reference=reference, candidate=rare).code is Code.ACCEPTED_FASTER


def test_a_precise_interval_at_the_limit_needs_no_more_time() -> None:
    assert "just about at what is required" in judged(0.94, 0.96, stopped="precise").message
    assert "--klineage-time-limit" in judged(0.8, 1.2).message


SLEEPS = "static int number = 0; if (++number % 7 < 3) usleep(60000); else usleep(6000);"
STEADILY = "usleep(6000);"
LIMIT = 5.0
"""More than what another program on the machine does to a kernel of 6 ms, less than the factor between both sleeps."""


def test_a_kernel_of_two_speeds_is_unstable(
    change: Callable[..., None], judge: Callable[..., Verdict], cpp: Callable[..., KernelSource]
) -> None:
    change(spread_limit=LIMIT)
    verdict = judge(cpp(before=SLEEPS), reference_source=cpp(before=STEADILY))
    assert verdict.code is Code.INCONCLUSIVE_UNSTABLE, verdict.reasons
    assert "the candidate's times are two populations" in verdict.reasons[0].message
    assert verdict.reasons[0].evidence["unstable"] == "candidate"
    assert verdict.ok
    assert verdict.scored


def test_its_counterpart_of_one_speed_is_accepted(
    change: Callable[..., None], judge: Callable[..., Verdict], cpp: Callable[..., KernelSource]
) -> None:
    change(spread_limit=LIMIT)
    source = cpp(before=STEADILY)
    verdict = judge(source, reference_source=source)
    assert verdict.status is Status.ACCEPTED, verdict.reasons


def test_the_limit_on_the_spread_can_be_lifted(
    change: Callable[..., None], judge: Callable[..., Verdict], cpp: Callable[..., KernelSource]
) -> None:
    change(spread_limit=1e6, time_limit_s=2.0)
    verdict = judge(cpp(before=SLEEPS), reference_source=cpp(before=STEADILY))
    assert verdict.status is Status.ACCEPTED, verdict.reasons
