"""Geometric mean and coverage."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import Code, Interval, Verdict
from pytest_klineage.records.verdict import DISTURBED, WIDEST
from pytest_klineage.report.aggregate import by_kernel, geometric_mean, summarise, uncertain

MakeVerdict = Callable[..., Verdict]
POSITIVE = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


@given(POSITIVE)
def test_the_mean_lies_between_the_extremes(values: list[float]) -> None:
    mean = geometric_mean(values)
    assert mean is not None
    assert min(values) * (1 - 1e-12) <= mean <= max(values) * (1 + 1e-12)


@given(POSITIVE)
def test_inverting_every_ratio_inverts_the_mean(values: list[float]) -> None:
    mean, inverse = geometric_mean(values), geometric_mean([1 / value for value in values])
    assert mean is not None
    assert inverse is not None
    assert math.isclose(mean * inverse, 1.0, rel_tol=1e-9)


def test_no_values_have_no_mean() -> None:
    assert geometric_mean([]) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_values_that_are_no_ratio_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        geometric_mean([1.0, value])


def test_a_failure_lowers_the_coverage_and_leaves_the_mean_alone(make_verdict: MakeVerdict) -> None:
    good = [make_verdict(speedup=2.0), make_verdict(speedup=8.0)]
    bad = [make_verdict(Code.MISMATCH, None), make_verdict(Code.REPLAY, 50.0)]
    summary = summarise([*good, *bad])
    assert summary.geomean == pytest.approx(4.0)
    assert (summary.scored, summary.judged, summary.skipped) == (2, 4, 0)


def test_slower_and_inconclusive_kernels_count(make_verdict: MakeVerdict) -> None:
    summary = summarise([make_verdict(Code.SLOWER_THAN_REQUIRED, 0.25), make_verdict(Code.INCONCLUSIVE_INTERVAL, 1.0)])
    assert summary.geomean == pytest.approx(0.5)
    assert summary.scored == 2


def test_a_skip_is_not_judged(make_verdict: MakeVerdict) -> None:
    summary = summarise([make_verdict(Code.SKIPPED_PLATFORM, None)])
    assert (summary.geomean, summary.scored, summary.judged, summary.skipped) == (None, 0, 0, 1)


def test_what_follows_a_skip_counts(make_verdict: MakeVerdict) -> None:
    skip = make_verdict(Code.SKIPPED_PLATFORM, None)
    summary = summarise([skip, skip, make_verdict(Code.MISMATCH, None), make_verdict(speedup=2.0)])
    assert (summary.geomean, summary.scored, summary.judged, summary.skipped) == (pytest.approx(2.0), 1, 2, 2)


@pytest.mark.parametrize("code", sorted(DISTURBED))
def test_a_disturbed_timing_is_uncertain(make_verdict: MakeVerdict, code: Code) -> None:
    assert uncertain(make_verdict(code, 2.0))


@pytest.mark.parametrize(("high", "wide"), [(WIDEST, False), (1.01 * WIDEST, True)])
def test_an_interval_may_be_just_so_wide(make_verdict: MakeVerdict, high: float, wide: bool) -> None:
    verdict = make_verdict(speedup=1.5)
    assert not uncertain(verdict)
    timing = msgspec.structs.replace(verdict.timing, speedup=Interval(1.5, 1.0, high))
    assert uncertain(msgspec.structs.replace(verdict, timing=timing)) is wide


def test_what_is_not_scored_is_not_uncertain(make_verdict: MakeVerdict) -> None:
    replay = make_verdict(Code.REPLAY, 50.0)
    timing = msgspec.structs.replace(replay.timing, speedup=Interval(50.0, 1.0, 99.0))
    assert not uncertain(msgspec.structs.replace(replay, timing=timing))
    assert not uncertain(make_verdict(Code.INCONCLUSIVE_BUSY, None))


def test_methods_over_several_cases_are_distinguished(make_verdict: MakeVerdict) -> None:
    verdicts = [make_verdict(operator=name, label=label) for name in ("gemm", "topk") for label in ("naive", "expert")]
    assert {label: len(group) for label, group in by_kernel(verdicts).items()} == {"naive": 2, "expert": 2}


def test_single_kernels_are_one_group(make_verdict: MakeVerdict) -> None:
    assert list(by_kernel([make_verdict(label="a"), make_verdict(label="b", operator="topk")])) == [""]
    assert by_kernel([]) == {}


def test_one_label_is_one_group_under_no_name(make_verdict: MakeVerdict) -> None:
    verdicts = [make_verdict(operator=name, label="only") for name in ("gemm", "topk")]
    assert by_kernel(verdicts) == {"": verdicts}


def test_a_method_was_judged_on_two_cases_or_more(make_verdict: MakeVerdict) -> None:
    method = [make_verdict(operator=name, label="naive") for name in ("gemm", "topk")]
    again = [make_verdict(label="twice"), make_verdict(label="twice")]
    assert list(by_kernel([*method, *again])) == [""]
