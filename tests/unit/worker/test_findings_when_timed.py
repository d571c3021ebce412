"""What is wrong in a timed call was not computed, unless it is rounding that went a little too far."""

from __future__ import annotations

import pytest

from pytest_klineage.records import Code, Reason, is_at_the_edge
from pytest_klineage.worker.oracle import as_timed


def mismatch(error: float, bound: float = 12.0) -> Reason:
    evidence = {"input_distribution": "r", "error": error, "bound": bound}
    return Reason(code=Code.MISMATCH, message="y is off", evidence=evidence)


@pytest.mark.parametrize(("error", "is_cheat"), [(12.1, False), (24.0, False), (24.1, True), (4e6, True)])
def test_rounding_that_goes_a_little_too_far_is_no_cheat(error: float, is_cheat: bool) -> None:
    found = as_timed(mismatch(error))
    assert found.code is (Code.REPLAY if is_cheat else Code.MISMATCH)
    assert "when timed" in found.message
    assert found.message.endswith("y is off")
    assert found.evidence["error"] == error


@pytest.mark.parametrize("code", [Code.UNWRITTEN, Code.NON_FINITE])
def test_what_is_missing_when_timed_was_not_computed(code: Code) -> None:
    assert as_timed(Reason(code=code, message="y")).code is Code.REPLAY
    edge = Reason(code=code, message="y", evidence={"error": 13.0, "bound": 12.0})
    assert as_timed(edge).code is Code.REPLAY, "only values can be at the edge"


def test_other_findings_stay() -> None:
    late = Reason(code=Code.LATE_WORK, message="late")
    assert as_timed(late) is late


def test_the_edge_needs_figures() -> None:
    assert not is_at_the_edge(Reason(code=Code.MISMATCH, message="y"))
    assert not is_at_the_edge(mismatch(11.9))
    assert not is_at_the_edge(Reason(code=Code.MISMATCH, message="y", evidence={"error": "large", "bound": 12.0}))
