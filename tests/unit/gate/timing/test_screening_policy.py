"""When a screening ends: the best so far is excluded, the interval is narrow, or time is up. A scripted sampler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.gate.settings import GateSettings, for_screening
from pytest_klineage.gate.timing.policy import (
    LEAST_PAIRS,
    POLICIES,
    SCREEN_LIMIT_S,
    Measurement,
    Samples,
    TimeLimit,
    screening,
)


def screened(
    candidate_ms: Callable[[int], float], best: float, *, precision: float = 0.01, limit: int = 10**6
) -> Measurement:
    """A screening of a kernel whose n-th call takes so long, against a reference of 1 ms; out of time after `limit`."""
    calls = 0

    def sample(order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
        nonlocal calls
        samples = Samples()
        for role in order * reps:
            calls += role == "candidate"
            own = samples.candidate if role == "candidate" else samples.reference
            own.append(candidate_ms(calls) if role == "candidate" else 1.0)
            samples.novel += [calls == 1] * (role == "candidate")  # whether it remembers is not asked
        return samples

    return screening(POLICIES["paired"], best).measure(
        sample, lambda samples: samples, precision=precision, confidence=0.95,
        limit=TimeLimit(spent=lambda: 2.0 * (calls >= limit)), report=lambda done, total, interval: None,
    )  # fmt: skip


@pytest.mark.parametrize("best", [0.5, 2.0])
def test_it_ends_once_the_best_is_excluded(best: float) -> None:
    """On either side, at the first look: here no pair scatters."""
    outcome = screened(lambda call: 1.0, best)
    assert (outcome.stopped, len(outcome.samples.candidate)) == ("excluded", LEAST_PAIRS)


def test_a_noisy_kernel_is_excluded_later() -> None:
    outcome = screened(lambda call: (0.8, 1.0, 1.25)[call % 3], 1.1, precision=0.001)
    assert outcome.stopped == "excluded"
    assert len(outcome.samples.candidate) > LEAST_PAIRS


def test_a_narrow_interval_around_the_best_ends_it() -> None:
    assert screened(lambda call: 1.0, 1.0).stopped == "precise"


def test_a_wide_interval_around_the_best_ends_with_the_time() -> None:
    outcome = screened(lambda call: (0.5, 2.0)[call % 2], 1.0, limit=40)
    assert outcome.stopped == "time limit"
    assert outcome.interval.low < 1.0 < outcome.interval.high


def test_it_is_the_policy_itself_without_a_best() -> None:
    assert screening(POLICIES["paper"], None) is POLICIES["paper"]


@pytest.mark.parametrize("name", ["paired", "cudagraph"])
def test_a_sample_is_what_it_is_in_full(name: str) -> None:
    assert screening(POLICIES[name], 1.0).mode == POLICIES[name].mode


def test_its_settings_change_the_timing_only() -> None:
    full = GateSettings(also_policies=("paper",), precision=0.02, seeds=5)
    short = for_screening(full)
    assert (short.time_limit_s, short.also_policies) == (SCREEN_LIMIT_S, ())
    assert (short.precision, short.seeds, short.defences) == (0.02, 5, full.defences)
    assert for_screening(GateSettings(time_limit_s=0.3)).time_limit_s == 0.3
