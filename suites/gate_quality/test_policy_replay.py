"""How many starts and pairs a timing on a GPU needs: the stopping rule over recorded A/A pairs. Nothing is measured.

pytest suites/gate_quality/test_policy_replay.py [--trials 300]      trials of each operator and design

A trial draws recorded starts, with replacement, and lets the gate's own policy decide when to stop. Both sides are one
kernel, so the interval should hold 1.0. What a timing takes follows from records of GEMM.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import pytest
from recorded_pairs import LONG, Costs, Design, Start, a_a_trials, gemm_costs, pool_of, under

from pytest_klineage.gate.timing.policy import Measurement
from pytest_klineage.gate.timing.restarts import GPU_LONG, RestartPlan
from pytest_klineage.gate.timing.statistics import quantile, start_factor

TRIALS = 300
SEED = 20261123
EARLIER = RestartPlan(starts=4, pairs=6, most=8)
"""Until 2026-11-23, without the widening for few starts."""
PLANS = (EARLIER, RestartPlan(3, 6, 8), RestartPlan(3, 4, 8), RestartPlan(2, 6, 8))
PRECISIONS = (0.005, 0.01)
COVERAGE = 0.95
TARGET_S, HALF_WIDTH = 2.5, 0.005


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Replayed trials of one operator under one design."""

    operator: str
    design: Design
    trials: int
    held: int
    """Trials whose interval holds 1.0."""
    held_unwidened: int
    """The same without the widening for few starts, where sampling stopped."""
    half_widths: tuple[float, ...]
    estimates: tuple[float, ...]
    starts: tuple[int, ...]
    pairs: tuple[int, ...]
    recorded: int
    """Recorded trials that were replayed in their own order, each pair once."""
    recorded_held: int

    @property
    def coverage(self) -> float:
        return self.held / self.trials


def holds(outcome: Measurement) -> bool:
    return outcome.interval.low <= 1 <= outcome.interval.high


def holds_unwidened(outcome: Measurement) -> bool:
    """Whether the interval would hold 1.0 without its widening for few starts."""
    interval, factor = outcome.interval, start_factor(len(outcome.samples.starts))
    ends = (interval.estimate * (end / interval.estimate) ** (1 / factor) for end in (interval.low, interval.high))
    low, high = ends
    return low <= 1 <= high


def row_of(operator: str, trials: Sequence[Sequence[Start]], design: Design, count: int) -> Row:
    """One operator under one design; the same starts are drawn whatever the design is."""
    pool, draw = pool_of(trials, design.plan.pairs), random.Random(f"{SEED} {operator}")
    outcomes = [under(design, pool, draw) for _ in range(count)]
    long_enough = [trial for trial in (pool_of([trial], design.plan.pairs) for trial in trials)
                   if len(trial) >= design.plan.starts]  # fmt: skip
    in_order = [under(design, trial, draw, in_order=True) for trial in long_enough]
    return Row(
        operator=operator, design=design, trials=count, held=sum(map(holds, outcomes)),
        held_unwidened=sum(map(holds_unwidened, outcomes)),
        half_widths=tuple(outcome.interval.half_width for outcome in outcomes),
        estimates=tuple(outcome.interval.estimate for outcome in outcomes),
        starts=tuple(len(outcome.samples.starts) for outcome in outcomes),
        pairs=tuple(len(outcome.samples.candidate) for outcome in outcomes), recorded=len(in_order),
        recorded_held=sum(map(holds, in_order)),
    )  # fmt: skip


def seconds_of(row: Row, costs: Costs) -> list[float]:
    """What every trial would take in its timed blocks."""
    return [costs.timing_s(pairs, starts) for pairs, starts in zip(row.pairs, row.starts, strict=True)]


def table_of(rows: Sequence[Row], costs: Costs) -> str:
    """A row for each design, the operators pooled; seconds are of GEMM's trials."""
    lines = [
        "| precision | starts x pairs, at most | interval holds 1.0: all | not widened | least operator | "
        "in recorded order | "
        "median half-width | 90 % of estimates within | mean starts | GEMM, timed: median (90 %) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    designs = list(dict.fromkeys(row.design for row in rows))
    for design in designs:
        own = [row for row in rows if row.design == design]
        gemm = sorted(second for row in own if row.operator == "gemm" for second in seconds_of(row, costs))
        least = min(own, key=lambda row: row.coverage)
        held, trials = sum(row.held for row in own), sum(row.trials for row in own)
        away = sorted(abs(estimate - 1) for row in own for estimate in row.estimates)
        plan = design.plan
        starts = [number for row in own for number in row.starts]
        cells = (
            f"{100 * design.precision:g} %",
            f"{plan.starts} x {plan.pairs}, {plan.most}{' (default)' if plan == GPU_LONG else ''}",
            f"{100 * held / trials:.1f} %",
            f"{100 * sum(row.held_unwidened for row in own) / trials:.1f} %",
            f"{least.operator} {100 * least.coverage:.1f} %",
            f"{sum(row.recorded_held for row in own)} of {sum(row.recorded for row in own)}",
            f"{100 * median([width for row in own for width in row.half_widths]):.2f} %",
            f"+-{100 * quantile(away, 0.9):.2f} %",
            f"{sum(starts) / len(starts):.2f}",
            f"{median(gemm):.2f} s ({quantile(gemm, 0.9):.2f} s)",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report_of(rows: Sequence[Row], costs: Costs) -> str:
    """The page."""
    return "\n".join([
        "# Starts and pairs of a timing on a GPU, replayed\n",
        f"A replay of recorded A/A pairs (`a_a-sm90.jsonl`, H200s; {', '.join(LONG)}, kernels over 0.1 ms), no new "
        f"measurement: {rows[0].trials} trials of each operator and design, each from starts drawn with replacement, "
        "under the gate's own stopping rule and interval at 95 %; \"not widened\" leaves out "
        "its widening for few starts. \"In recorded order\" replays each recorded trial "
        "once, as far as its starts go. Records do not say which pairs had new inputs, so the wait for eight of each "
        "kind is left out: where it applies, a timing has a start more.\n",
        f"Seconds are a model of GEMM 4096^3: {1000 * costs.pair_s:.1f} ms a pair (stages-sm90), {costs.renewal_s:.2f} "
        "s a renewal with its warm-up (main_tier-sm90).\n",
        table_of(rows, costs),
        "\nRaw figures: `policy-replay-sm90.jsonl`.",
    ])  # fmt: skip


def test_policy_replay(request: pytest.FixtureRequest, publish: Callable[[str, str, list[Row]], None]) -> None:
    """Under the default design intervals hold 1.0 in 95 % of all trials, and GEMM is timed in 2.5 s."""
    count = request.config.getoption("--trials") or TRIALS
    trials, costs = a_a_trials(), gemm_costs()
    designs = [Design(plan=plan, precision=precision) for precision in PRECISIONS for plan in PLANS]
    rows = [row_of(operator, trials[operator], design, count) for design in designs for operator in LONG]
    publish("policy-replay-sm90", report_of(rows, costs), rows)
    chosen = [row for row in rows if row.design.plan == GPU_LONG]
    assert sum(row.held for row in chosen) >= COVERAGE * sum(row.trials for row in chosen)
    gemm = next(row for row in chosen if row.operator == "gemm" and row.design.precision == max(PRECISIONS))
    assert median(seconds_of(gemm, costs)) <= TARGET_S
    assert median(gemm.half_widths) <= HALF_WIDTH
