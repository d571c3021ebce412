"""The PR gate by pair on a CPU: kernels with a busy loop of 3 to 20 % against themselves without, margin 3 %.

F=results/runs/gate_quality/detection-cpu.jsonl
pytest suites/gate_quality/test_detection.py --platform cpu --for 2.4      2.4 minutes more of what is planned, into F
pytest suites/gate_quality/test_detection.py --publish --reuse $F          the page, once the plan is complete

Planned on 2026-11-30, before the measurement. 29 judgements that showed that the suite works (conv2d, fmha, gdn) are
thrown away; slowdowns, counts and analysis were written before them. That one judgement may contradict a change came
after them, from a reading of the rule.

Rule: that of the plugin. One interval of 99.5 % over the starts of all judgements of a trial, by the gate's bootstrap,
lies below 0.97, above 1/0.97 or between; where it does not, or a single judgement says that the speed has changed, or
one contradicts the change, the two kernels are judged again, three times at most. Sampling stops at a half-width of
0.75 % or at the default time limit of 10 s.
Slowdowns: a loop of 0, 3, 5, 10 and 20 % of the duration of the same call, which the kernel itself measures; the base
is the same kernel with a loop of 0 %. Their order is mixed, so that a drift of the machine reaches all of them.
Counts: ROUNDS rounds of five kernels, which are 20 trials of each slowdown and 100 of unchanged kernels. Every trial
has judgements of its own. A judgement during which others used the machine is kept and made once more; it is in no
trial. No other is left out, and the plan is not prolonged.
Analysis: trials found slower, over the five kernels together, against TARGETS; unchanged ones found slower or faster,
of which there shall be none.
Expected: by starts of 2026-11-28 (A/A, unchanged kernels), drawn into 1,575 trials under this rule, kernels that take
exactly 3, 4, 5, 10 and 20 % longer are found in 0.1, 35, 98, 100 and 100 % after 3.0, 2.8, 2.1, 2.0 and 2.0 judgements,
unchanged ones in none after 1.1.
Duration: 300 judgements of 5 to 12 s, 35 to 60 minutes, in 15 to 25 pieces.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from detection import (
    UNCHANGED,
    Judged,
    Trials,
    all_trials,
    bare,
    chosen,
    count,
    judgements,
    short_of,
    slowed_on_cpu,
    table,
    trial,
    was_disturbed,
)
from on_gpu import ROOT, kept_rows

from pytest_klineage import GateSettings
from pytest_klineage.gate import Gate
from pytest_klineage.operators import paper_case
from pytest_klineage.plugin.comparison.pooling import CONFIDENCE
from pytest_klineage.records import Code, KernelCase, KernelSource, Verdict
from pytest_klineage.report.compare import MARGIN
from pytest_klineage.report.compare_base import judge_again, precision_for
from pytest_klineage.results.packed import append_line

OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
LEVELS = (0.03, 0.05, 0.1, 0.2)
TARGETS = (0.0, 0.5, 0.95, 1.0)
ROUND = (UNCHANGED, 0.03, UNCHANGED, 0.05, UNCHANGED, 0.1, UNCHANGED, 0.2, UNCHANGED)
ROUNDS = 4
LEAST_UNCHANGED = 100
ATTEMPTS = 3
"""Judgements on a busy machine, one after the other, after which a run ends: the same command goes on later."""
NAME = "detection-cpu"
MEASURED = ROOT / "results" / "runs" / "gate_quality" / f"{NAME}.jsonl"
"""Never the published file, which may be of an earlier plan."""


def planned(rounds: int = ROUNDS) -> list[tuple[str, float]]:
    """Kernel and slowdown of every trial."""
    return [(operator, by) for _ in range(rounds) for operator in OPERATORS for by in ROUND]


def in_peace(judged: Sequence[Judged]) -> list[Judged]:
    """The judgements during which others left the machine alone."""
    return [one for one in judged if one.verdict.code is not Code.INCONCLUSIVE_BUSY]


def next_trial(judged: Sequence[Judged]) -> int:
    """The number of the trial that the next judgement is of: the last one, unless that is decided."""
    alone = in_peace(judged)
    if not alone:
        return 0
    last = alone[-1].number
    return last if judge_again(trial([one for one in alone if one.number == last], MARGIN)) else last + 1


def report_of(judged: list[Judged], trials: Trials) -> str:
    """The page with its table."""
    machine = judged[-1].verdict.machine
    where = f"{machine.device}, {machine.cores} cores" if machine else ""
    days = " and ".join(sorted({one.verdict.judged_at[:10] for one in judged}))
    alone, false = in_peace(judged), count(chosen(trials, UNCHANGED))
    unchanged = judgements(chosen(trials, UNCHANGED)) / max(1, false.trials)
    made = sum(count(found).trials for found in trials.values())
    return "\n".join(
        [
            f"# The PR gate by pair on a CPU: what it finds at a margin of {100 * MARGIN:g} %",
            "",
            f"{where}, {days}. An expert kernel with a busy loop behind its work against the same kernel with one of "
            f"0 %, as `--klineage-base` judges with its defaults: {100 * CONFIDENCE:g} % intervals over the starts of "
            "up to three judgements; a change of speed needs two. The loop is a share of the duration of the same "
            f"call. {made} trials of {len(planned())} planned, none of which shares a judgement with another. "
            f"False alarms: {false.slower} slower, {false.changed - false.slower} faster in {false.trials}, after "
            f"{unchanged:.2f} judgements each. {len(judged) - len(alone)} of {len(judged)} judgements were made once "
            f"more because others used the machine; {was_disturbed(alone)} of the other {len(alone)} had unstable "
            f"times. Sampling ended {endings(alone)}.",
            "",
            *table(trials, LEVELS, TARGETS, OPERATORS),
            "",
            f"Raw samples: `{NAME}.jsonl.gz`.",
        ]
    )


def endings(judged: Sequence[Judged]) -> str:
    """Why the sampling of some judgements ended, with counts."""
    found = Counter(one.verdict.timing.stopped for one in judged if one.verdict.timing)
    return ", ".join(f"by {why} {times} times" for why, times in found.most_common())


def measure(
    plan: Sequence[tuple[str, float]], judged: list[Judged], until: float, judge: Callable[[str, float], Verdict],
    keep: Callable[[Judged], None],
) -> None:  # fmt: skip
    """What is planned, in its order, as long as there is time and others leave the machine alone; `keep` extends
    `judged`."""
    busy = 0
    while (number := next_trial(judged)) < len(plan) and time.monotonic() < until and busy < ATTEMPTS:
        operator, by = plan[number]
        verdict = judge(operator, by)
        keep(Judged(operator=operator, slower_by=by, number=number, verdict=bare(verdict)))
        busy = busy + 1 if verdict.code is Code.INCONCLUSIVE_BUSY else 0


def judgement(gate: Gate, operator: str, by: float, source: KernelSource) -> Verdict:
    """One kernel with its busy loop against itself with one of 0 %. Raises AssertionError where it is not timed."""
    case: KernelCase = msgspec.structs.replace(paper_case(operator, "cpu", "torch"), at_least=1.0)
    base, head = slowed_on_cpu(source, UNCHANGED), slowed_on_cpu(source, by)
    verdict = gate.judge(case, head, reference_source=base, precision=precision_for(MARGIN))
    assert verdict.scored, f"{operator} slowed by {by:g}: {verdict.code}: {verdict.reasons[0].message}"
    return verdict


def test_detection(
    request: pytest.FixtureRequest, expert_source: Callable[[str], KernelSource],
    publish: Callable[[str, str, list[Judged]], None],
) -> None:  # fmt: skip
    """Kernels slowed by 5, 10 and 20 % are found in 50, 95 and 100 %; none of 100 unchanged ones is accused."""
    reuse, minutes = request.config.getoption("--reuse"), request.config.getoption("--for")
    path = Path(reuse) if reuse else MEASURED
    judged = kept_rows(path, Judged, without=lambda row: False)
    plan = planned(request.config.getoption("--trials") or ROUNDS)
    if not reuse:

        def keep(one: Judged) -> None:
            judged.append(one)
            append_line(path, one)

        until = time.monotonic() + 60 * minutes if minutes else float("inf")
        with Gate("cpu", GateSettings()) as gate:
            measure(plan, judged, until, lambda name, by: judgement(gate, name, by, expert_source(name)), keep)
    if (done := next_trial(judged)) < len(plan):
        pytest.skip(f"{done} of {len(plan)} trials by {len(judged)} judgements: the same command goes on")
    trials = all_trials(in_peace(judged), MARGIN)
    publish(NAME, report_of(judged, trials), judged)
    assert not short_of(trials, LEVELS, TARGETS)
    assert count(chosen(trials, UNCHANGED)).trials >= LEAST_UNCHANGED
