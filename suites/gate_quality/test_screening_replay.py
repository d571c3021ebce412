"""What screening saves and costs a search: its stopping rule over recorded stages. Nothing is measured.

pytest suites/gate_quality/test_screening_replay.py [--trials 20]      searches of each case and order

A search submits the recorded stages of one lineage, in their order (every step is a gain: the dearest case) or in a
random one. The pairs of a stage are of one start and a second, as those of a screening; a screening gets them in their
order, off by what the medians of A/A starts are off. A full judgement gets pairs of A/A starts around the stage's
speedup, as many as the gate would take.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

import msgspec
import pytest
from recorded_pairs import (
    Costs,
    Design,
    Replayed,
    Start,
    a_a_trials,
    gemm_costs,
    log_ratios,
    measured,
    pairs_of,
    pool_of,
    stage_records,
    under,
)

from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.gate.timing.policy import POLICIES, screening
from pytest_klineage.gate.timing.restarts import GPU_LONG, GPU_SHORT, SHORT_MS, RestartPlan

CASES = ("gemm", "fmha", "gdn", "topk", "conv2d", "conv2d-nhwc")
TRIALS = 20
SEED = 20261123
PRECISION = GateSettings().precision
ORDERS = ("lineage", "random")


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded stage, and what its judgements are drawn from."""

    speedup: float
    pairs: Start
    """Of its one start, in their order."""
    seconds: float
    around: list[Start]
    """A/A starts with its speedup."""
    off: list[float]
    """What the medians of A/A starts are off, as logarithms."""
    plan: RestartPlan


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """One search, with and without screening."""

    case: str
    order: str
    kernels: int
    full_s: float
    """With full judgements alone: timed blocks and what lies beside them."""
    screened_s: float
    """With screening, the full judgements of what seemed better included."""
    judged_in_full: int
    excluded: int
    """Screenings that ended before their second."""
    kept: int
    """Number of the stage that was kept, and that full judgements alone keep."""
    kept_in_full: int
    loss: float
    """Recorded speedup of the one over that of the other; 1 where both are the same."""
    in_order: int
    """Pairs of kernels whose screenings and full judgements are in the same order."""
    compared: int


def kernels_of(case: str, trials: Sequence[Sequence[Start]]) -> list[Kernel]:
    """The stages of a case; A/A trials are those of its operator."""
    found = []
    for record in stage_records(case):
        timing = record.verdict.timing
        assert timing is not None
        plan = GPU_SHORT if min(timing.reference_ms, timing.candidate_ms) < SHORT_MS else GPU_LONG
        starts, speedup = pool_of(trials, plan.pairs), math.exp(median(log_ratios(pairs_of(timing))))
        around: list[Start] = [[(reference, candidate / speedup) for reference, candidate in start] for start in starts]
        found.append(
            Kernel(
                speedup=speedup, pairs=pairs_of(timing), seconds=timing.seconds, around=around,
                off=[median(log_ratios(start)) for start in starts], plan=plan,
            )
        )  # fmt: skip
    return found


def screen(kernel: Kernel, best: float, draw: random.Random, costs: Costs) -> tuple[float, bool, float]:
    """A screening: its estimate, whether the best was excluded, and its seconds."""
    shift = math.exp(draw.choice(kernel.off))
    start = [(reference * shift, candidate) for reference, candidate in kernel.pairs]
    outcome = measured(screening(POLICIES["paired"], best), Replayed([start], draw, in_order=True), precision=PRECISION)
    seconds = kernel.seconds * len(outcome.samples.candidate) / len(start) + costs.beside_s
    return outcome.interval.estimate, outcome.stopped == "excluded", seconds


def judge(kernel: Kernel, draw: random.Random, costs: Costs) -> tuple[float, float]:
    """A full judgement: its estimate and its seconds."""
    outcome = under(Design(plan=kernel.plan, precision=PRECISION), kernel.around, draw)
    own = msgspec.structs.replace(costs, pair_s=kernel.seconds / len(kernel.pairs))
    timed = own.timing_s(len(outcome.samples.candidate), len(outcome.samples.starts))
    return outcome.interval.estimate, timed + costs.beside_s


def search(case: str, order: str, kernels: Sequence[Kernel], draw: random.Random, costs: Costs) -> Search:
    """One search over all kernels of a case, by both ways; both see the same full judgements."""
    numbers = list(range(len(kernels)))
    if order == "random":
        draw.shuffle(numbers)
    full = {number: judge(kernels[number], draw, costs) for number in numbers}
    first = numbers[0]
    best, kept, spent, again, excluded = full[first][0], first, full[first][1], 1, 0
    seen: dict[int, float] = {}
    for number in numbers[1:]:
        seen[number], is_excluded, seconds = screen(kernels[number], best, draw, costs)
        spent, excluded = spent + seconds, excluded + is_excluded
        if seen[number] > best:
            spent, again = spent + full[number][1], again + 1
            if full[number][0] > best:
                best, kept = full[number][0], number
    winner = max(full, key=lambda number: full[number][0])
    pairs = list(combinations(seen, 2))
    agree = sum((seen[one] > seen[other]) == (full[one][0] > full[other][0]) for one, other in pairs)
    return Search(
        case=case, order=order, kernels=len(kernels), full_s=sum(seconds for _, seconds in full.values()),
        screened_s=spent, judged_in_full=again, excluded=excluded, kept=kept, kept_in_full=winner,
        loss=kernels[kept].speedup / kernels[winner].speedup, in_order=agree, compared=len(pairs),
    )  # fmt: skip


def table_of(searches: Sequence[Search]) -> str:
    """A row for each case and order, and one for each order in all."""
    lines = [
        "| case | order | kernels | judged in full as well | screenings ended early | seconds a kernel: in full, "
        "screened | verdicts a minute: in full, screened | same order | another kernel kept | its speed, worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for order in ORDERS:
        for case in (*CASES, "all"):
            own = [one for one in searches if one.order == order and case in (one.case, "all")]
            kernels = sum(one.kernels for one in own)
            full, screened = (sum(getattr(one, name) for one in own) / kernels for name in ("full_s", "screened_s"))
            others = [one.loss for one in own if one.kept != one.kept_in_full]
            screenings = kernels - len(own)
            cells = (
                case, order, f"{kernels / len(own):.0f}" if case != "all" else str(kernels // len(own) * len(CASES)),
                f"{100 * (sum(one.judged_in_full for one in own) - len(own)) / screenings:.0f} %",
                f"{100 * sum(one.excluded for one in own) / screenings:.0f} %", f"{full:.2f}, {screened:.2f}",
                f"{60 / full:.1f}, {60 / screened:.1f}",
                f"{100 * sum(one.in_order for one in own) / sum(one.compared for one in own):.1f} %",
                f"{len(others)} of {len(own)}", f"{min(others, default=1):.3f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report_of(searches: Sequence[Search], costs: Costs) -> str:
    """The page."""
    return "\n".join([
        "# What screening saves and costs, replayed on sm90\n",
        "A replay of recorded pairs (`stages-sm90`, `a_a-sm90.jsonl`, H200s), no new measurement: searches over the "
        "stages of each lineage, in its order and in random ones, under the gate's own stopping rules. \"Same order\" "
        "is the share of pairs of kernels that screenings and full judgements put in the same order; \"its speed\" the "
        "recorded speedup of what was kept over that of what full judgements keep.\n",
        f"Seconds are a model: pairs as recorded, {costs.renewal_s:.2f} s a renewal (main_tier-sm90), "
        f"{costs.beside_s:.2f} s beside the timed blocks of each judgement (verdict-time-sm90); builds are left out.\n",
        table_of(searches),
        "\nRaw figures: `screening-sm90.jsonl`.",
    ])  # fmt: skip


def test_screening_replay(request: pytest.FixtureRequest, publish: Callable[[str, str, list[Search]], None]) -> None:
    """A search in random order keeps, in 19 of 20, a kernel within 1 % of what full judgements keep."""
    trials, costs = a_a_trials(), gemm_costs()
    searches = []
    for case in CASES:
        kernels, draw = kernels_of(case, trials[case.partition("-")[0]]), random.Random(f"{SEED} {case}")
        for order in ORDERS * (request.config.getoption("--trials") or TRIALS):
            searches.append(search(case, order, kernels, draw, costs))
    publish("screening-sm90", report_of(searches, costs), searches)
    shuffled = [one for one in searches if one.order == "random"]
    assert sum(one.loss >= 0.99 for one in shuffled) >= 0.95 * len(shuffled)
    assert sum(one.screened_s for one in shuffled) < sum(one.full_s for one in shuffled)
