"""The PR gate by pair on a CPU: kernels with a busy loop of 3 to 20 % against themselves without, margin 3 %.

pytest suites/gate_quality/test_detection.py --platform cpu --for 2.5      2.5 minutes more of what is planned
pytest suites/gate_quality/test_detection.py --publish --reuse results/runs/gate_quality/detection-cpu.jsonl

Planned before anything was measured: ROUNDS rounds of every kernel, which are 20 trials of each slowdown and 100 of the
unchanged kernels; found must be what TARGETS says, over the five kernels together, and no unchanged one. A judgement
during which others used the machine is kept and made once more; it is in no trial. No other is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import pytest
from detection import UNCHANGED, Judged, bare, found_of, short_of, slowed_on_cpu, table, was_disturbed
from on_gpu import kept_rows, results_file

from pytest_klineage import GateSettings
from pytest_klineage.gate import Gate
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Code, KernelCase, KernelSource, Verdict
from pytest_klineage.records.baseline import ComparisonOutcome
from pytest_klineage.report.compare import MARGIN, compare_base, precision_for
from pytest_klineage.results.packed import unpack

OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
LEVELS = (0.03, 0.05, 0.1, 0.2)
TARGETS = (0.0, 0.5, 0.95, 1.0)
ROUND = (UNCHANGED, 0.03, UNCHANGED, 0.05, UNCHANGED, 0.1, UNCHANGED, 0.2, UNCHANGED)
ROUNDS = 4
LEAST_UNCHANGED = 100
TIME_LIMIT_S = 4.0
ATTEMPTS = 3
"""Judgements on a busy machine, one after the other, after which a run ends: the same command goes on later."""
NAME = "detection-cpu"


def planned(rounds: int = ROUNDS) -> list[tuple[int, str, float]]:
    """Number of the round, kernel and slowdown of every judgement."""
    return [(number, operator, by) for number in range(rounds) for operator in OPERATORS for by in ROUND]


def in_peace(judged: list[Judged]) -> list[Judged]:
    """The judgements during which others left the machine alone."""
    return [one for one in judged if one.verdict.code is not Code.INCONCLUSIVE_BUSY]


def report_of(judged: list[Judged]) -> str:
    """The page with its table."""
    machine = judged[-1].verdict.machine
    where = f"{machine.device}, {machine.cores} cores" if machine else ""
    days = " and ".join(sorted({one.verdict.judged_at[:10] for one in judged}))
    alone = in_peace(judged)
    false = found_of(alone, UNCHANGED, MARGIN)
    return "\n".join(
        [
            f"# The PR gate by pair on a CPU: what it finds at a margin of {100 * MARGIN:g} %",
            "",
            f"{where}, {days}. An expert kernel with a busy loop behind its work against the same kernel with one "
            f"of 0 ns, as `--klineage-base` judges, `--klineage-time-limit={TIME_LIMIT_S:g}`; a change that one "
            "judgement finds has to be confirmed by the next one of the same kernels. The loop is a share of the "
            "median time of the unchanged kernel's judgements before it. False alarms: "
            f"{false.slower} slower, {false.changed - false.slower} faster in {false.trials}. "
            f"{len(judged) - len(alone)} of {len(judged)} judgements were made once more because others used the "
            f"machine; with unstable times were {was_disturbed(alone)} of the {len(alone)} that count, and a trial "
            "with one of them is `unclear`.",
            "",
            f"{len(alone)} of {len(planned())} planned judgements. Slower by one of them, unconfirmed: "
            f"{'; '.join(first_look(alone, by) for by in (UNCHANGED, *LEVELS))}.",
            "",
            *table(alone, LEVELS, TARGETS, MARGIN, OPERATORS),
            "",
            f"Raw samples: `{NAME}.jsonl.gz`.",
        ]
    )


def first_look(judged: list[Judged], by: float) -> str:
    """What the judgements of one slowdown say, each by itself."""
    outcomes = [
        compare_base("detection", one.verdict, one.verdict, margin=MARGIN).outcome
        for one in judged
        if one.slower_by == by
    ]
    return f"{outcomes.count(ComparisonOutcome.SLOWER)} of {len(outcomes)} with a loop of {100 * by:g} %"


def base_ms(judged: list[Judged], operator: str) -> float:
    """Median time of an unchanged kernel so far, of which a busy loop is a share; 0 before its first judgement."""
    times = [
        one.verdict.timing.candidate_ms
        for one in judged
        if one.operator == operator and one.slower_by == UNCHANGED and one.verdict.timing is not None
    ]
    return median(times) if times else 0.0


def measure(todo: list[tuple[int, str, float]], until: float, judged: list[Judged], keep: Callable[[Judged], None],
            expert_source: Callable[[str], KernelSource]) -> None:  # fmt: skip
    """What is planned, in its order, as long as there is time and others leave the machine alone."""
    with Gate("cpu", GateSettings(time_limit_s=TIME_LIMIT_S)) as gate:
        for number, operator, by in todo:
            for _ in range(ATTEMPTS):
                if time.monotonic() > until:
                    return
                loop_ms = by * base_ms(in_peace(judged), operator)
                verdict = judgement(gate, operator, loop_ms, expert_source(operator))
                keep(Judged(operator=operator, slower_by=by, number=number, verdict=bare(verdict)))
                if verdict.code is not Code.INCONCLUSIVE_BUSY:
                    break
            else:
                return


def judgement(gate: Gate, operator: str, loop_ms: float, source: KernelSource) -> Verdict:
    """One kernel with its busy loop against itself with one of 0 ns. Raises AssertionError where it is not timed."""
    case: KernelCase = msgspec.structs.replace(paper_case(operator, "cpu", "torch"), at_least=1.0)
    base, head = slowed_on_cpu(source, 0), slowed_on_cpu(source, 1e6 * loop_ms)
    verdict = gate.judge(case, head, reference_source=base, precision=precision_for(MARGIN))
    assert verdict.scored, f"{operator} slowed by {loop_ms:g} ms: {verdict.code}: {verdict.reasons[0].message}"
    return verdict


def test_detection(
    request: pytest.FixtureRequest, expert_source: Callable[[str], KernelSource],
    publish: Callable[[str, str, list[Judged]], None],
) -> None:  # fmt: skip
    """Kernels slowed by 5, 10 and 20 % are found in 50, 95 and 100 %; none of 100 unchanged ones is accused."""
    reuse, minutes = request.config.getoption("--reuse"), request.config.getoption("--for")
    path = Path(reuse) if reuse else results_file(request.config, NAME)
    judged = kept_rows(path, Judged, without=lambda row: False)
    plan = planned(request.config.getoption("--trials") or ROUNDS)
    if not reuse:
        path.parent.mkdir(parents=True, exist_ok=True)
        unpack(path)

        def keep(one: Judged) -> None:
            judged.append(one)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")

        until = time.monotonic() + 60 * minutes if minutes else float("inf")
        measure(plan[len(in_peace(judged)) :], until, judged, keep, expert_source)
    publish(NAME, report_of(judged), judged)
    if len(alone := in_peace(judged)) < len(plan):
        pytest.skip(f"{len(alone)} of {len(plan)} judgements: the same command goes on")
    assert not short_of(alone, LEVELS, TARGETS, MARGIN)
    assert found_of(alone, UNCHANGED, MARGIN).trials >= LEAST_UNCHANGED
