"""When both sides are started anew: by time on a CPU, by count on a GPU."""

from __future__ import annotations

import pytest

from pytest_klineage.gate.timing import restarts
from pytest_klineage.gate.timing.policy import Samples
from pytest_klineage.gate.timing.restarts import CountedRenewal, TimedRenewal, renewal_for


def pairs(count: int, milliseconds: float, starts: list[int]) -> Samples:
    """So many pairs of that length."""
    return Samples(reference=[milliseconds] * count, candidate=[milliseconds] * count, starts=starts)


@pytest.mark.parametrize(
    ("milliseconds", "every", "starts"),
    [(0.02, restarts.GPU_PAIRS_SHORT, restarts.GPU_STARTS_SHORT), (1.0, restarts.GPU_PAIRS, restarts.GPU_STARTS)],
)
def test_on_a_gpu_starts_are_counted(milliseconds: float, every: int, starts: int) -> None:
    begun: list[int] = []
    chosen = CountedRenewal(lambda: begun.append(1))
    samples = pairs(0, milliseconds, [0])
    most = restarts.GPU_MOST * starts
    for count in range(2, 200, 2):
        samples = pairs(count, milliseconds, samples.starts)
        full = count - samples.starts[-1] >= every
        assert chosen.full(samples) == full
        assert chosen.enough(samples) == (full and len(samples.starts) >= starts)
        assert chosen.exhausted(samples) == (full and len(samples.starts) == most)
        if chosen.renew(samples):
            samples.starts.append(count)
    assert len(begun) == most - 1
    assert samples.starts == [every * index for index in range(most)]


def test_on_a_cpu_starts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock["now"])
    begun: list[float] = []
    chosen = TimedRenewal(0.5, lambda: begun.append(clock["now"]))
    samples = pairs(2, 1.0, [0])
    assert not chosen.renew(samples)
    clock["now"] = 0.6
    assert chosen.renew(samples)
    assert not chosen.renew(samples)
    assert begun == [0.6]
    assert not chosen.enough(samples)
    assert not chosen.full(samples)
    assert not chosen.exhausted(samples)
    assert chosen.enough(pairs(8, 1.0, [0, 2, 4, 6]))


def test_a_time_limit_without_room_has_no_renewals() -> None:
    assert renewal_for("cpu", 0.5, lambda: None) is None
    assert renewal_for("cuda", 0.5, lambda: None) is None
    assert isinstance(renewal_for("cpu", 10.0, lambda: None), TimedRenewal)
    assert isinstance(renewal_for("cuda", 10.0, lambda: None), CountedRenewal)
