"""Which verdict is a trial's first shot, and what counts as a success."""

from __future__ import annotations

import math

import pytest

from pytest_klineage.lab.studies.shots import first_shots, is_success, speeds, successes
from pytest_klineage.records import (
    Code,
    Interval,
    KernelCase,
    Reason,
    Status,
    Surface,
    Timing,
    Verdict,
)


def verdict(speedup: float | None, at: str = "2026-11-21T10:00:00Z", label: str = "klineage 1") -> Verdict:
    case = KernelCase(operator="gemm", shape={"M": 8, "N": 8, "K": 8}, dtype="fp32", reference="torch")
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired", reference_ms=1.0, candidate_ms=1 / speedup,
            speedup=Interval(speedup, speedup, speedup, 0.95), reference_samples_ms=(1.0,),
            candidate_samples_ms=(1 / speedup,), warmup=1, flush_bytes=0, statistic="made for a test",
        )  # fmt: skip
    status = Status.ACCEPTED if timing else Status.WRONG_VALUE
    code = Code.ACCEPTED_FASTER if timing else Code.MISMATCH
    return Verdict(
        case=case, status=status, reasons=(Reason(code=code, message="made for a test"),), surface=Surface.CPP,
        source_digest="0" * 64, label=label, timing=timing, judged_at=at,
    )  # fmt: skip


def test_the_first_shot_is_the_earliest_that_is_not_the_root() -> None:
    late, early = verdict(2.0, "2026-11-21T10:02:00Z"), verdict(1.0, "2026-11-21T10:01:00Z")
    root = verdict(0.01, "2026-11-21T10:00:00Z", label="naive")
    test = "suites/ablations/test_x.py::test_x[generated-only-gdn_cumsum-12]"
    assert first_shots([(test, late), (test, root), (test, early)]) == {("gdn_cumsum", 12): early}


@pytest.mark.parametrize(("speedup", "succeeds"), [(0.5, True), (0.49, False), (None, False), (3.0, True)])
def test_a_success_is_right_and_half_as_fast(speedup: float | None, succeeds: bool) -> None:
    assert is_success(verdict(speedup)) is succeeds


def test_only_trials_of_both_arms_are_paired() -> None:
    cards = {("gemm", 1): verdict(1.0), ("gemm", 2): verdict(4.0), ("topk", 1): verdict(1.0)}
    none = {("gemm", 1): verdict(None), ("gemm", 2): verdict(2.0), ("fmha", 1): verdict(1.0)}
    assert [(pair.first, pair.second) for pair in successes(cards, none)] == [(1.0, 0.0), (1.0, 1.0)]
    assert [pair.difference for pair in speeds(cards, none)] == [pytest.approx(math.log(2))]
