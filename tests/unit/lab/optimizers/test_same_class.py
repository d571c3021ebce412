"""Which verdicts of a replay agree with the recorded ones."""

from __future__ import annotations

import signal

import pytest

from pytest_klineage import paper_case
from pytest_klineage.lab.optimizers.recording import Rejudged, lacks_instructions, same_class
from pytest_klineage.records import Code, Interval, Reason, Timing, Verdict

EDGE = {"error": 13.0, "bound": 12.0}
FAR = {"error": 1300.0, "bound": 12.0}


def verdict(code: Code, evidence: dict[str, float] | None = None) -> Verdict:
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=1.0, speedup=Interval(1.0, 1.0, 1.0), warmup=1, flush_bytes=0,
        reference_samples_ms=(1.0,), candidate_samples_ms=(1.0,), statistic="",
    )  # fmt: skip
    reason = Reason(code=code, message="said", evidence=dict(evidence or {}))
    timed = timing if code.value.startswith(("accepted", "slower")) else None
    return Verdict(case=paper_case("gemm", "cpu", "torch"), status=code.status, reasons=(reason,), timing=timed)


@pytest.mark.parametrize(
    ("recorded", "fresh", "same"),
    [
        (verdict(Code.ACCEPTED_FASTER), verdict(Code.SLOWER_THAN_REQUIRED), True),
        (verdict(Code.MISMATCH, FAR), verdict(Code.NON_FINITE), True),
        (verdict(Code.ACCEPTED_FASTER), verdict(Code.MISMATCH, FAR), False),
        (verdict(Code.ACCEPTED_FASTER), verdict(Code.SKIPPED_PLATFORM), True),
        (verdict(Code.MISMATCH, EDGE), verdict(Code.ACCEPTED_FASTER), True),
        (verdict(Code.ACCEPTED_FASTER), verdict(Code.MISMATCH, EDGE), True),
        (verdict(Code.REPLAY, EDGE), verdict(Code.MISMATCH, EDGE), True),
        (verdict(Code.REPLAY, FAR), verdict(Code.ACCEPTED_FASTER), False),
        (verdict(Code.MISMATCH, EDGE), verdict(Code.CRASH), False),
    ],
)
def test_right_stays_right_and_wrong_stays_wrong_but_for_an_edge(recorded: Verdict, fresh: Verdict, same: bool) -> None:
    assert same_class(recorded, fresh) is same


@pytest.mark.parametrize(
    ("recorded", "number", "lacks"),
    [
        (Code.ACCEPTED_FASTER, signal.SIGILL, True),
        (Code.MISMATCH, signal.SIGILL, True),
        (Code.ACCEPTED_FASTER, signal.SIGSEGV, False),
        (Code.CRASH, signal.SIGILL, False),
    ],
)
def test_a_kernel_of_another_processor_is_no_disagreement(recorded: Code, number: int, lacks: bool) -> None:
    right = Rejudged(step=1, recorded=verdict(Code.ACCEPTED_SAME), verdict=verdict(Code.ACCEPTED_FASTER))
    ended = Rejudged(step=2, recorded=verdict(recorded), verdict=verdict(Code.CRASH, {"signal": number}))
    assert lacks_instructions([right, ended]).startswith("step 2") == lacks
    assert lacks_instructions([right]) == ""
