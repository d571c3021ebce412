"""When both sides are restarted: by time on a CPU, by count on a GPU."""

from __future__ import annotations

import pytest

from pytest_klineage.gate.timing import restarts
from pytest_klineage.gate.timing.policy import Samples
from pytest_klineage.gate.timing.restarts import CountedRestarts, TimedRestarts, restart_policy_for


def pairs(count: int, milliseconds: float, starts: list[int]) -> Samples:
    """So many pairs of that length."""
    return Samples(reference=[milliseconds] * count, candidate=[milliseconds] * count, starts=starts)


@pytest.mark.parametrize(("milliseconds", "plan"), [(0.02, restarts.GPU_SHORT), (1.0, restarts.GPU_LONG)])
def test_on_a_gpu_starts_are_counted(milliseconds: float, plan: restarts.RestartPlan) -> None:
    begun: list[int] = []
    chosen = CountedRestarts(lambda: begun.append(1))
    samples = pairs(0, milliseconds, [0])
    starts, every, most = plan
    for count in range(2, 200, 2):
        samples = pairs(count, milliseconds, samples.starts)
        full = count - samples.starts[-1] >= every
        assert chosen.full(samples) == full
        assert chosen.enough(samples) == (full and len(samples.starts) >= starts)
        assert chosen.exhausted(samples) == (full and len(samples.starts) == most)
        if chosen.restart(samples):
            samples.starts.append(count)
    assert len(begun) == most - 1
    assert samples.starts == [every * index for index in range(most)]


def test_on_a_cpu_starts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock["now"])
    begun: list[float] = []
    chosen = TimedRestarts(0.5, lambda: begun.append(clock["now"]), lambda: clock["now"] > 9)
    samples = pairs(2, 1.0, [0])
    assert not chosen.restart(samples)
    clock["now"] = 0.6
    assert chosen.restart(samples)
    clock["now"] = 2.6
    chosen.warmed()
    clock["now"] = 3.0
    assert not chosen.restart(samples)
    clock["now"] = 9.5
    assert not chosen.restart(samples)
    assert begun == [0.6]
    assert not chosen.enough(samples)
    assert not chosen.full(samples)
    assert not chosen.exhausted(samples)
    assert chosen.enough(pairs(8, 1.0, [0, 2, 4, 6]))


def test_a_short_time_limit_has_no_restarts() -> None:
    assert restart_policy_for("cpu", 0.5, 0.01, lambda: None, lambda: False) is None
    assert restart_policy_for("cuda", 0.5, 0.01, lambda: None, lambda: False) is None
    assert isinstance(restart_policy_for("cpu", 10.0, 0.01, lambda: None, lambda: False), TimedRestarts)
    assert isinstance(restart_policy_for("cuda", 10.0, 0.01, lambda: None, lambda: False), CountedRestarts)


@pytest.mark.parametrize(("precision", "plan"), [(0.019, restarts.GPU_SHORT), (0.02, restarts.GPU_LONG)])
def test_a_coarse_interval_needs_fewer_starts(precision: float, plan: restarts.RestartPlan) -> None:
    chosen = restart_policy_for("cuda", 10.0, precision, lambda: None, lambda: False)
    assert chosen is not None
    enough = pairs(plan.starts * plan.pairs, 0.02, [plan.pairs * index for index in range(plan.starts)])
    assert chosen.enough(enough)
    enough.starts.pop()
    assert not chosen.enough(enough)
