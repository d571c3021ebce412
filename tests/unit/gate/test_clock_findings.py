"""From samples to reasons: what clocks leave out, and a kernel that is faster on inputs it has met."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.gate import findings
from pytest_klineage.gate.findings import (
    CLOCK_FLOOR_MS,
    CLOCK_SHARE,
    clock_reason,
    clocks_of,
    overhead_corrected,
    overheads_ms,
)
from pytest_klineage.gate.timing.policy import POLICIES, Samples, shows_memory
from pytest_klineage.records import Code, Reason

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
    def test_a_correct_worker_gives_no_reason(self) -> None:
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

    def test_hiding_time_in_60_percent_of_calls_is_corrected(self) -> None:
        samples = measured(hidden_ms=4.0, share=0.6)
        assert median(samples.candidate) < 0.3 * TRUE_MS
        assert clock_reason(samples) is None
        assert median(overhead_corrected(samples).candidate) == pytest.approx(TRUE_MS, abs=0.2)

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
        assert median(overhead_corrected(samples).candidate) == pytest.approx(TRUE_MS, abs=0.2), "it is still charged"

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
    def test_correction_never_exceeds_the_trusted_clock(self, calls: list[tuple[float, float, float, float]]) -> None:
        samples = Samples(
            reference=[call[0] for call in calls],
            candidate=[call[1] for call in calls],
            reference_wall=[call[0] + call[2] for call in calls],
            candidate_wall=[call[1] + call[3] for call in calls],
        )
        result = overhead_corrected(samples)
        for own, paid, wall in (
            (samples.reference, result.reference, samples.reference_wall),
            (samples.candidate, result.candidate, samples.candidate_wall),
        ):
            for before, after, seen in zip(own, paid, wall, strict=True):
                assert before <= after <= seen + 1e-9

    def test_one_gap_per_side_says_nothing_about_spread(self) -> None:
        """The figures, in ms, are those of one convolution under do_bench on an H200: 1500 calls, one block a side."""
        one = Samples(
            reference=[0.0341], candidate=[0.0137], reference_wall=[0.0341 + 0.0098], candidate_wall=[0.0137 + 0.0161]
        )
        assert overhead_corrected(one).candidate == pytest.approx([0.0137 + 0.0161 - 0.0098])
        one.one_block = True
        assert overhead_corrected(one).candidate == pytest.approx([0.0137])
        one.candidate_wall = [0.0137 + 3 * 0.0098]
        assert overhead_corrected(one).candidate == pytest.approx([0.0137 + 0.0098]), (
            "beyond twice the reference's it is charged"
        )

    def test_correction_keeps_a_correct_measurement(self) -> None:
        samples = Samples(
            reference=[1.0, 2.0], candidate=[3.0, 4.0], reference_wall=[1.5, 2.5], candidate_wall=[3.5, 4.5]
        )
        assert overhead_corrected(samples) == samples

    @pytest.mark.parametrize("pairs", [6, 12, 32])
    def test_equal_sides_are_corrected_equally(self, pairs: int) -> None:
        """A side that is compared with itself is charged less: at six pairs half as much."""
        draw, paid = random.Random(1), {"reference": 0.0, "candidate": 0.0}
        for _ in range(2000):
            gaps = [[draw.lognormvariate(-3, 0.5) for _ in range(pairs)] for _ in paid]
            samples = Samples(reference=[1.0] * pairs, candidate=[1.0] * pairs)
            samples.reference_wall, samples.candidate_wall = ([1 + gap for gap in side] for side in gaps)
            result = overhead_corrected(samples)
            paid["reference"] += sum(result.reference) - pairs
            paid["candidate"] += sum(result.candidate) - pairs
        assert 0.85 < paid["candidate"] / paid["reference"] < 1.15

    def test_overheads_are_recorded_sample_by_sample(self) -> None:
        samples = measured(hidden_ms=2.0)
        paid = overhead_corrected(samples)
        added = overheads_ms(samples.candidate, paid.candidate)
        assert len(added) == PAIRS
        assert median(added) == pytest.approx(2.0, abs=0.1)
        assert [after - extra for after, extra in zip(paid.candidate, added, strict=True)] == pytest.approx(
            samples.candidate
        )
        assert overheads_ms(samples.candidate, samples.candidate) == ()

    def test_charging_does_not_change_the_raw_samples(self) -> None:
        samples = measured(hidden_ms=2.0)
        before = list(samples.candidate)
        overhead_corrected(samples)
        assert samples.candidate == before


def scattered(known_ms: float, novel_ms: float, late: float, seed: int) -> Samples:
    """Twelve pairs of each kind and more on a machine with other work: so many calls are late by milliseconds."""
    draw, samples = random.Random(seed), Samples()
    while not shows_memory(samples):
        novel = draw.random() < 0.45
        delays = [draw.choice((2, 4, 4, 8)) * 1.5 * draw.random() if draw.random() < late else 0.0 for _ in range(2)]
        samples.novel.append(novel)
        samples.reference.append(0.09 + delays[0])
        samples.candidate.append((novel_ms if novel else known_ms) + delays[1])
    return samples


@pytest.mark.parametrize("late", [0.3, 0.5, 0.7, 0.9])
class TestMemoryOnABusyMachine:
    """The reference's time is a fraction of a time slice, so it seems two or ten times as fast on either kind."""

    def test_a_memory_shows_all_the_same(self, late: float) -> None:
        assert all(findings.memory_reason(scattered(0.06, 30.4, late, seed)) for seed in range(20))

    @pytest.mark.parametrize("own_ms", [0.06, 3.0])
    def test_an_honest_kernel_is_left_alone(self, late: float, own_ms: float) -> None:
        assert not any(findings.memory_reason(scattered(own_ms, own_ms, late, seed)) for seed in range(20))


def test_what_slows_the_reference_too_is_no_memory() -> None:
    """New problems cost both sides more, the candidate by the square at most: that is the machine's doing."""
    novel = [number % 2 == 0 for number in range(40)]
    times = [[1.0 * factor**new + 0.001 * (n % 7) for n, new in enumerate(novel)] for factor in (2.0, 4.4, 5.6)]
    assert findings.asked_alone(times[0], novel) == pytest.approx(4.8, rel=0.01)
    assert findings.asked_alone([1.0] * 40, novel) == findings.MEMORY_GAIN
    alone = [1.0] * 40
    assert not findings.faster_when_known(alone, times[1], novel, findings.asked_alone(times[0], novel))
    assert findings.faster_when_known(alone, times[2], novel, findings.asked_alone(times[0], novel))


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

    def test_equal_speed_on_both_inputs_is_accepted(self) -> None:
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

    def test_a_reference_slower_on_new_inputs_clears_the_candidate(self) -> None:
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

    def test_common_gaps_say_nothing_about_new_inputs(self) -> None:
        assert findings.novel_clock_reason(self.samples(20.0, everywhere=True)) is None
        assert findings.novel_clock_reason(self.samples(0.3)) is None

    def test_a_few_new_inputs_prove_nothing(self) -> None:
        assert findings.novel_clock_reason(self.samples(20.0, pairs=28)) is None

    def test_hidden_time_shows_in_the_corrected_samples(self) -> None:
        assert findings.memory_reason(self.samples(20.0)) is None
        assert findings.memory_reason(findings.overhead_corrected(self.samples(20.0))) is not None


class TestUnheard:
    """What a clock may leave out within the allowed gap decides nothing in the kernel's favour."""

    def samples(self, hidden_ms: float, own_ms: float = 0.02, pairs: int = 60) -> Samples:
        draw = random.Random(3)
        samples = Samples()
        for _ in range(pairs):
            conditions = draw.uniform(0.2, 0.4)
            samples.reference.append(0.05 * draw.uniform(0.95, 1.05))
            samples.reference_wall.append(samples.reference[-1] + conditions + draw.uniform(0, 0.02))
            samples.candidate.append(own_ms * draw.uniform(0.95, 1.05))
            samples.candidate_wall.append(samples.candidate[-1] + conditions + draw.uniform(0, 0.02) + hidden_ms)
        return samples

    def resolved(
        self, samples: Samples, line: float = 1.9, code: Code = Code.ACCEPTED_FASTER, policy: str = "paired"
    ) -> Reason:
        return findings.resolved_reason(Reason(code=code, message="2.5x"), samples, line, POLICIES[policy])

    def test_what_is_hidden_in_the_gap_is_found_in_pairs(self) -> None:
        samples = self.samples(hidden_ms=0.05)
        assert clock_reason(samples) is None
        assert overhead_corrected(samples).candidate[0] == pytest.approx(samples.candidate[0], abs=0.03)
        assert 0.045 < findings.unheard_ms(samples) < 0.06

    def test_fast_enough_by_its_own_clock_alone_is_inconclusive(self) -> None:
        reason = self.resolved(self.samples(hidden_ms=0.05))
        assert reason.code is Code.INCONCLUSIVE_INTERVAL
        assert reason.evidence["speedup_with_it"] < 1

    @pytest.mark.parametrize("hidden_ms", [-0.05, 0.0])
    def test_an_honest_clock_changes_nothing(self, hidden_ms: float) -> None:
        assert self.resolved(self.samples(hidden_ms)).code is Code.ACCEPTED_FASTER

    def test_fast_enough_with_all_of_it_stays_accepted(self) -> None:
        assert self.resolved(self.samples(hidden_ms=0.005, own_ms=0.01)).code is Code.ACCEPTED_FASTER

    def test_few_pairs_leave_more_room(self) -> None:
        few, many = (findings.unheard_ms(self.samples(0.0, pairs=pairs)) for pairs in (12, 400))
        assert many < few

    def test_another_verdict_is_left_as_it_is(self) -> None:
        slower = self.resolved(self.samples(hidden_ms=0.05), code=Code.SLOWER_THAN_REQUIRED)
        assert slower.code is Code.SLOWER_THAN_REQUIRED

    @pytest.mark.parametrize("policy", ["paper", "do_bench"])
    def test_sides_that_are_no_pairs_compare_by_their_medians(self, policy: str) -> None:
        """do_bench has more samples of the shorter side."""
        samples = self.samples(hidden_ms=0.05)
        more = self.samples(hidden_ms=0.05, pairs=90)
        samples.candidate, samples.candidate_wall = more.candidate, more.candidate_wall
        unheard, paid = findings.unheard_ms(samples), overhead_corrected(samples)
        reason = self.resolved(samples, policy=policy)
        assert reason.code is Code.INCONCLUSIVE_INTERVAL
        expected = median(paid.reference) / (median(paid.candidate) + unheard)
        assert reason.evidence["speedup_with_it"] == pytest.approx(expected)

    def test_what_is_charged_already_is_not_counted_twice(self) -> None:
        samples = self.samples(hidden_ms=30.0)
        assert findings.unheard_ms(samples) <= clocks_of(samples).allowed_ms
