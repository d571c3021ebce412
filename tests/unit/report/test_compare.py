"""What the ratio of two runs says: properties of its interval, its classes, and every reason not to compare."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UsageError
from pytest_klineage.gate.timing.policy import POLICIES, Paired
from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.records import Code, Definition, Interval, Machine, Timing, Verdict
from pytest_klineage.records.baseline import Baseline, ComparisonOutcome, Pin, samples_digest
from pytest_klineage.report.compare import (
    UNPAIRED,
    change_interval,
    classify,
    compare,
    compare_with,
    confirmed,
    missing,
    read_tolerance,
    reference_differences,
)

Make = Callable[..., Verdict]
RESAMPLES = 200

positive = st.floats(0.01, 100)
margins = st.floats(0.005, 0.5)
intervals = st.tuples(positive, positive, positive).map(sorted).map(lambda ends: Interval(ends[1], ends[0], ends[2]))
pairs = st.lists(st.tuples(positive, positive), min_size=1, max_size=40)


def timing_of(samples: list[tuple[float, float]], policy: str = "paired", starts: tuple[int, ...] = (0,)) -> Timing:
    reference, candidate = zip(*samples, strict=True)
    return Timing(
        policy=policy, reference_ms=1.0, candidate_ms=1.0, speedup=Interval(1.0, 0.9, 1.1), warmup=3, flush_bytes=0,
        reference_samples_ms=reference, candidate_samples_ms=candidate, statistic="", starts=starts,
    )  # fmt: skip


def noisy(speedup: float, draw: random.Random, *, starts: int = 6, each: int = 20) -> Timing:
    """A run as they are: 2 % between pairs, 1 % between starts, and a machine that drifts under both sides."""
    samples, begins = [], []
    for start in range(starts):
        begins.append(start * each)
        luck = draw.gauss(0, 0.01)
        for number in range(each):
            drift = 1 + 0.3 * math.sin(number / 7) + draw.uniform(0, 0.2)
            samples.append((drift, drift / speedup * math.exp(luck + draw.gauss(0, 0.02))))
    return timing_of(samples, starts=tuple(begins))


@given(old=pairs, new=pairs, policy=st.sampled_from(["paired", "do_bench"]))
@settings(max_examples=60, deadline=None)
def test_the_interval_holds_its_estimate(
    old: list[tuple[float, float]], new: list[tuple[float, float]], policy: str
) -> None:
    change = change_interval(timing_of(old, policy), timing_of(new, policy), resamples=RESAMPLES)
    assert 0 < change.low <= change.estimate <= change.high < math.inf


@given(old=pairs, new=pairs, factor=positive)
@settings(max_examples=60, deadline=None)
def test_k_times_the_time_is_one_kth_of_the_ratio(
    old: list[tuple[float, float]], new: list[tuple[float, float]], factor: float
) -> None:
    plain = change_interval(timing_of(old), timing_of(new), resamples=RESAMPLES)
    slower = [(reference, candidate * factor) for reference, candidate in new]
    changed = change_interval(timing_of(old), timing_of(slower), resamples=RESAMPLES)
    for end in ("low", "estimate", "high"):
        assert getattr(changed, end) == pytest.approx(getattr(plain, end) / factor, rel=1e-9)


@given(old=pairs, new=pairs, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_what_slows_reference_and_kernel_alike_cancels(
    old: list[tuple[float, float]], new: list[tuple[float, float]], seed: int
) -> None:
    draw = random.Random(seed)
    drifted = [(reference * d, candidate * d) for reference, candidate in new if (d := draw.uniform(0.5, 2))]
    plain = change_interval(timing_of(old), timing_of(new), resamples=RESAMPLES)
    changed = change_interval(timing_of(old), timing_of(drifted), resamples=RESAMPLES)
    for end in ("low", "estimate", "high"):
        assert getattr(changed, end) == pytest.approx(getattr(plain, end), rel=1e-9)


@given(samples=pairs)
@settings(max_examples=60, deadline=None)
def test_a_run_compared_with_itself_is_never_a_change(samples: list[tuple[float, float]]) -> None:
    change = change_interval(timing_of(samples), timing_of(samples), resamples=RESAMPLES)
    assert change.estimate == 1.0
    assert classify(change, 0.001) not in (ComparisonOutcome.SLOWER, ComparisonOutcome.FASTER)


@given(old=pairs, new=pairs, confidences=st.tuples(st.floats(0.5, 0.99), st.floats(0.5, 0.99)).map(sorted))
@settings(max_examples=60, deadline=None)
def test_more_confidence_is_a_wider_interval(
    old: list[tuple[float, float]], new: list[tuple[float, float]], confidences: list[float]
) -> None:
    narrow, wide = (
        change_interval(timing_of(old), timing_of(new), resamples=RESAMPLES, confidence=confidence)
        for confidence in confidences
    )
    assert wide.low <= narrow.low <= narrow.high <= wide.high


@given(change=intervals, margin=margins)
def test_the_classes_are_symmetric(change: Interval, margin: float) -> None:
    exchanged = Interval(1 / change.estimate, 1 / change.high, 1 / change.low)
    mirror = {ComparisonOutcome.SLOWER: ComparisonOutcome.FASTER, ComparisonOutcome.FASTER: ComparisonOutcome.SLOWER}
    found = classify(change, margin)
    ends = (change.low, change.high, 1 / change.low, 1 / change.high)
    if all(abs(end * factor - 1) > 1e-9 for end in ends for factor in (1 - margin, 1 / (1 - margin))):
        assert classify(exchanged, margin) is mirror.get(found, found)


@given(change=intervals, some=margins, more=margins)
def test_a_wider_margin_never_makes_a_kernel_slower(change: Interval, some: float, more: float) -> None:
    narrow, wide = sorted((some, more))
    if classify(change, wide) is ComparisonOutcome.SLOWER:
        assert classify(change, narrow) is ComparisonOutcome.SLOWER
    if classify(change, narrow) is ComparisonOutcome.SAME:
        assert classify(change, wide) is ComparisonOutcome.SAME


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.90, 0.969, ComparisonOutcome.SLOWER),
        (0.90, 0.971, ComparisonOutcome.UNCLEAR),
        (0.98, 1.02, ComparisonOutcome.SAME),
        (1.02, 1.05, ComparisonOutcome.UNCLEAR),
        (1.04, 1.05, ComparisonOutcome.FASTER),
        (0.5, 2.0, ComparisonOutcome.UNCLEAR),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, outcome: ComparisonOutcome) -> None:
    assert classify(Interval((low + high) / 2, low, high), 0.03) is outcome


def test_simulated_runs_alarm_only_on_a_tenth_less_speed() -> None:
    draw = random.Random(20261121)
    same = [change_interval(noisy(1.3, draw), noisy(1.3, draw), resamples=RESAMPLES) for _ in range(100)]
    worse = [change_interval(noisy(1.3, draw), noisy(1.17, draw), resamples=RESAMPLES) for _ in range(100)]
    assert not [
        change for change in same if classify(change, 0.03) in (ComparisonOutcome.SLOWER, ComparisonOutcome.FASTER)
    ]
    assert sum(change.low <= 1 <= change.high for change in same) >= 95
    assert sum(classify(change, 0.03) is ComparisonOutcome.SLOWER for change in worse) >= 95


def test_starts_widen_the_interval() -> None:
    """Pairs of one start are alike; an interval over pairs alone would not say so."""
    samples = [(1.0, 1.0 + 0.01 * (number // 40) + 0.0001 * (number % 7)) for number in range(400)]
    alike = timing_of(samples)
    renewed = timing_of(samples, starts=tuple(range(0, 400, 40)))
    assert change_interval(renewed, renewed).half_width > 1.5 * change_interval(alike, alike).half_width > 0


@pytest.mark.parametrize(("starts", "each"), [(1, 20), (2, 12), (6, 20)])
def test_the_interval_is_that_of_the_gate(starts: int, each: int) -> None:
    """Against a run without any spread: the same resamples, as much wider for few pairs and few starts."""
    run = noisy(1.2, random.Random(3), starts=starts, each=each)
    mine = change_interval(run, timing_of([(1.0, 1.0)] * starts * each), confidence=0.99)
    gates = paired_interval(run.reference_samples_ms, run.candidate_samples_ms, confidence=0.99, starts=run.starts)
    found = (1 / mine.high, 1 / mine.estimate, 1 / mine.low)
    assert found == pytest.approx((gates.low, gates.estimate, gates.high), rel=1e-9)


def test_unpaired_policies_are_those_of_the_gate() -> None:
    assert {name for name, policy in POLICIES.items() if not isinstance(policy, Paired)} == UNPAIRED


# --- verdicts ---------------------------------------------------------------------------------------------------------


def pin_of(verdict: Verdict) -> Pin:
    assert verdict.timing is not None
    assert verdict.machine is not None
    return Pin(
        nodeid="test_a.py::test_a", case=verdict.case, label=verdict.label, status=verdict.status,
        timing=verdict.timing, reference=verdict.reference, machine=verdict.machine,
        samples_digest=samples_digest(verdict.timing),
    )  # fmt: skip


def baseline_of(*verdicts: Verdict) -> Baseline:
    return Baseline(name="main", platform="cpu", device="Test CPU", pins=tuple(pin_of(verdict) for verdict in verdicts))


@pytest.mark.parametrize(
    ("speedup", "outcome"),
    [
        (1.8, ComparisonOutcome.SLOWER),
        (2.0, ComparisonOutcome.SAME),
        (2.2, ComparisonOutcome.FASTER),
        (1.96, ComparisonOutcome.SAME),
    ],
)
def test_a_kernel_is_compared_with_its_pin(make_verdict: Make, speedup: float, outcome: ComparisonOutcome) -> None:
    found = compare(pin_of(make_verdict()), make_verdict(speedup=speedup), against="main", margin=0.03)
    change = found.ratio
    # Three pairs: the interval is the range of what they allow.
    assert change is not None
    assert change.estimate == pytest.approx(speedup / 2)
    assert found.outcome is outcome
    assert found.old == Interval(2.0, 1.98, 2.02)
    assert found.new is not None
    assert found.new.estimate == speedup
    assert "0.97 to 1.03" in found.message


@given(speeds=st.lists(st.sampled_from([1.5, 1.9, 2.0, 2.1, 2.6]), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_change_is_one_only_if_every_judgement_says_so(make_verdict: Make, speeds: list[float]) -> None:
    first, second, now, again = (make_verdict(speedup=speed) for speed in speeds)
    pin = msgspec.structs.replace(pin_of(first), again=second.timing)
    found = compare(pin, now, against="main", margin=0.03)
    if found.outcome.change:
        found = confirmed(found, compare(pin, again, against="main", margin=0.03), again)
    changes = [today / then for then in speeds[:2] for today in speeds[2:]]
    assert (found.outcome is ComparisonOutcome.SLOWER) == all(change < 0.97 for change in changes)
    assert (found.outcome is ComparisonOutcome.FASTER) == all(change > 1 / 0.97 for change in changes)
    assert found.outcome in (
        ComparisonOutcome.SLOWER,
        ComparisonOutcome.FASTER,
        ComparisonOutcome.SAME,
        ComparisonOutcome.UNCLEAR,
    )


def test_figures_of_all_judgements_are_kept(make_verdict: Make) -> None:
    pin = msgspec.structs.replace(pin_of(make_verdict()), again=make_verdict(speedup=2.1).timing)
    first, again = compare(pin, make_verdict(speedup=1.0), against="main", margin=0.03), make_verdict(speedup=1.1)
    found = confirmed(first, compare(pin, again, against="main", margin=0.03), again)
    assert [round(ratio.estimate, 3) for ratio in found.ratios] == [0.5, 0.476, 0.55, 0.524]
    assert found.ratio == found.ratios[0]
    assert found.again == again
    assert found.outcome is ComparisonOutcome.SLOWER


def test_an_unconfirmed_change_says_why_with_its_figures(make_verdict: Make) -> None:
    pin = msgspec.structs.replace(pin_of(make_verdict()), again=make_verdict(speedup=1.9).timing)
    first, again = compare(pin, make_verdict(speedup=1.5), against="main", margin=0.03), make_verdict(speedup=1.9)
    found = confirmed(first, compare(pin, again, against="main", margin=0.03), again)
    assert found.outcome is ComparisonOutcome.UNCLEAR
    assert found.message.startswith("0.750x")
    assert "1.000x [1.000, 1.000] of the second judgement that was pinned" in found.message
    assert (len(found.ratios), found.again) == (4, again)
    assert "quieten" in found.advice


def test_an_outdated_baseline_is_said_to_be(make_verdict: Make) -> None:
    found = compare(pin_of(make_verdict()), make_verdict(speedup=4.0), against="main", margin=0.03)
    assert "outdated" in found.advice
    assert "--klineage-save=main" in found.advice


def test_a_busy_machine_says_nothing(make_verdict: Make) -> None:
    found = compare(pin_of(make_verdict()), make_verdict(Code.INCONCLUSIVE_BUSY, 1.0), against="main", margin=0.03)
    assert found.outcome is ComparisonOutcome.UNCLEAR
    assert not found.outcome.bad


def test_a_wrong_kernel_is_broken_and_a_skipped_one_is_not(make_verdict: Make) -> None:
    wrong = compare(pin_of(make_verdict()), make_verdict(Code.MISMATCH, None), against="main", margin=0.03)
    skipped = compare(pin_of(make_verdict()), make_verdict(Code.SKIPPED_PLATFORM, None), against="main", margin=0.03)
    assert (wrong.outcome, skipped.outcome) == (ComparisonOutcome.BROKEN, ComparisonOutcome.SKIPPED)
    assert wrong.outcome.bad
    assert not skipped.outcome.bad
    assert "wrong_value.mismatch" in wrong.message


def test_another_reference_is_refused_without_times(make_verdict: Make) -> None:
    then = make_verdict(reference={"torch": "2.11", "threads": "2", "variant_ms.eager": "1.5", "old": "x"})
    same = make_verdict(reference={"torch": "2.11", "threads": "2", "variant_ms.eager": "1.7"})
    newer = make_verdict(reference={"torch": "2.13", "threads": "4"})
    assert compare(pin_of(then), same, against="main", margin=0.03).outcome is ComparisonOutcome.SAME
    found = compare(pin_of(then), newer, against="main", margin=0.03)
    assert found.outcome is ComparisonOutcome.OTHER_REFERENCE
    assert found.outcome.bad
    assert found.message == "torch 2.11 then, 2.13 now; threads 2 then, 4 now"
    assert found.ratio is None
    other = msgspec.structs.replace(then, case=msgspec.structs.replace(then.case, reference="cublas"))
    assert "reference torch then, cublas now" in compare(pin_of(then), other, against="main", margin=0.03).message
    many = {str(number): "1" for number in range(9)}
    assert len(reference_differences(many, dict.fromkeys(many, "2"))) == 9


def test_another_device_and_another_policy_are_refused(make_verdict: Make) -> None:
    then = make_verdict()
    assert then.timing is not None
    moved = msgspec.structs.replace(then, machine=Machine(platform="cpu", device="Other CPU"))
    graph = msgspec.structs.replace(then, timing=msgspec.structs.replace(then.timing, policy="cudagraph"))
    found = compare(pin_of(then), moved, against="main", margin=0.03)
    assert found.outcome is ComparisonOutcome.OTHER_DEVICE
    assert "Test CPU @ 3 GHz; this is Other CPU" in found.message
    found = compare(pin_of(then), graph, against="main", margin=0.03)
    assert found.outcome is ComparisonOutcome.OTHER_POLICY
    assert "--klineage-policy=paired" in found.advice


def test_another_flush_and_another_binding_are_refused(make_verdict: Make) -> None:
    then = make_verdict()
    assert then.timing is not None
    for fields, says in (
        ({"flush_bytes": 64 << 20}, "flush 32 MiB then, 64 MiB now"),
        ({"binding": "by core"}, "binding not recorded then, by core now"),
        ({"threads": 8}, "threads not recorded then, 8 now"),
    ):
        now = msgspec.structs.replace(then, timing=msgspec.structs.replace(then.timing, **fields))
        found = compare(pin_of(then), now, against="main", margin=0.03)
        assert (found.outcome, found.outcome.bad) == (ComparisonOutcome.OTHER_SETUP, True)
        assert says in found.message
        assert "--klineage-save=main" in found.advice


def test_a_kernel_without_a_pin_is_new_and_fails_nothing(make_verdict: Make) -> None:
    baseline = baseline_of(make_verdict())
    same = compare_with(baseline, "test_a.py::test_a", make_verdict(), margin=0.03)
    other = compare_with(baseline, "test_a.py::test_b", make_verdict(), margin=0.03)
    again = compare_with(baseline, "test_a.py::test_a", make_verdict(), number=1, margin=0.03)
    skipped = compare_with(baseline, "test_a.py::test_b", make_verdict(Code.SKIPPED_PLATFORM, None), margin=0.03)
    assert [found.outcome for found in (same, other, again, skipped)] == [
        ComparisonOutcome.SAME, ComparisonOutcome.NEW, ComparisonOutcome.NEW, ComparisonOutcome.SKIPPED,
    ]  # fmt: skip
    assert not other.outcome.bad
    assert "--klineage-save=main" in other.advice


def test_a_missing_baseline_names_the_command_and_devices(make_verdict: Make) -> None:
    none = missing("a", make_verdict(), "main", [], margin=0.03)
    assert none.outcome is ComparisonOutcome.NO_BASELINE
    assert "pytest --klineage-save=main" in none.advice
    elsewhere = missing("a", make_verdict(), "main", [baseline_of()], margin=0.03)
    assert elsewhere.outcome is ComparisonOutcome.OTHER_DEVICE
    assert "pinned on Test CPU (cpu); this is Test CPU @ 3 GHz (cpu)" in elsewhere.message
    assert none.outcome.bad
    assert elsewhere.outcome.bad


@pytest.mark.parametrize(("text", "margin"), [("slower:3%", 0.03), ("slower:0.5%", 0.005), (" slower:10% ", 0.1)])
def test_a_tolerance_is_read(text: str, margin: float) -> None:
    assert read_tolerance(text) == pytest.approx(margin)


@pytest.mark.parametrize(
    "text", ["", "3%", "slower", "slower:3", "faster:3%", "slower:0%", "slower:100%", "slower:-1%"]
)
def test_an_invalid_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="slower:3%"):
        read_tolerance(text)


def test_a_pin_of_another_definition_is_refused(make_verdict: Make) -> None:
    plain = make_verdict()
    old, new = (
        msgspec.structs.replace(
            plain,
            case=msgspec.structs.replace(
                plain.case, definition=Definition(source="test_own.py:softmax", digest=str(digit) * 64)
            ),
        )
        for digit in (0, 1)
    )
    found = compare(pin_of(old), new, against="main", margin=0.03)
    assert found.outcome is ComparisonOutcome.OTHER_DEFINITION
    assert found.outcome.bad
    assert found.message == "the definition of its operator has changed since it was pinned"
    assert compare(pin_of(old), old, against="main", margin=0.03).outcome is not ComparisonOutcome.OTHER_DEFINITION
