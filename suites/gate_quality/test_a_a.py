"""A/A: the same kernel on both sides of the gate, many times over. What the interval claims, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.statistics import Standing, median, quantile, standing
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Interval, KernelSource, Machine, Verdict, speedup

MARGIN = 0.05
OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One A/A trial: the gate's verdict, and what one side after the other would have said."""

    operator: str
    number: int
    low: float
    estimate: float
    high: float
    pairs: int
    seconds: float
    sequential: float
    """Ratio of two medians timed one after the other in the same trial."""
    half_width: float
    reference_samples_ms: tuple[float, ...]
    candidate_samples_ms: tuple[float, ...]
    machine: Machine | None
    judged_at: str


def trial_of(verdict: Verdict, number: int) -> Trial:
    timing, (sequential,) = verdict.timing, verdict.other_timings
    assert timing is not None
    return Trial(
        operator=verdict.case.operator,
        number=number,
        low=timing.speedup.low,
        estimate=timing.speedup.estimate,
        high=timing.speedup.high,
        pairs=len(timing.candidate_samples_ms),
        seconds=timing.seconds,
        sequential=speedup(sequential.reference_ms, sequential.candidate_ms),
        half_width=timing.speedup.half_width,
        reference_samples_ms=timing.reference_samples_ms,
        candidate_samples_ms=timing.candidate_samples_ms,
        machine=verdict.machine,
        judged_at=verdict.judged_at,
    )


def table_of(trials: list[Trial]) -> str:
    """One row per operator and one for all."""
    lines = [
        "| operator | trials | interval holds 1.0 | false slower | median half-width | median pairs | "
        "paired: 90 % of estimates within | sequential medians: 90 % within |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (*OPERATORS, "all"):
        chosen = [trial for trial in trials if name in ("all", trial.operator)]
        if not chosen:
            continue
        holds = sum(trial.low <= 1 <= trial.high for trial in chosen)
        cells = (
            name,
            len(chosen),
            f"{holds} ({100 * holds / len(chosen):.1f} %)",
            false_slower(chosen),
            f"{100 * median([trial.half_width for trial in chosen]):.2f} %",
            f"{median([trial.pairs for trial in chosen]):.0f}",
            f"+-{100 * spread([trial.estimate for trial in chosen]):.2f} %",
            f"+-{100 * spread([trial.sequential for trial in chosen]):.2f} %",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def report_of(trials: list[Trial]) -> str:
    """The page with its table."""
    machine = trials[-1].machine
    heading = "# A/A on the CPU: the same expert kernel as candidate and as reference\n"
    where = f"{machine.device}, {machine.cores} cores, {trials[-1].judged_at}" if machine else ""
    how = (
        "Policy `paired` (stops at +-1 % or 2.5 s). Beside it, one side after the other: `do_bench` "
        "(25 + 100 ms), for Top-K `paper` (25 + 100 calls)."
    )
    return f"{heading}\n{where}. {how}\n\n{table_of(trials)}\n\nRaw samples: `a_a.jsonl`."


def spread(ratios: list[float]) -> float:
    """The distance from 1 that 90 % of the ratios keep."""
    return quantile(sorted(abs(ratio - 1) for ratio in ratios), 0.9)


def false_slower(trials: list[Trial]) -> int:
    """Trials that the gate would have called slower at the margin."""
    found = (standing(Interval(t.estimate, t.low, t.high), at_least=1.0, margin=MARGIN) for t in trials)
    return sum(place is Standing.SLOWER for place in found)


def test_a_a(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Trial]], None],
    expert_source: Callable[[str], KernelSource],
) -> None:
    """95 % of the intervals hold 1.0, no trial is called slower, the median half-width is 2 % at most."""
    count = request.config.getoption("--trials") // len(OPERATORS)
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    trials: list[Trial] = []
    for operator in OPERATORS:
        source, case = expert_source(operator), paper_case(operator, "cpu", "torch")
        # 125 ms of a kernel of 0.2 ms are 800 calls of each side; counts do there.
        sequential = "paper" if operator == "topk" else "do_bench"
        with Gate("cpu", GateSettings(also_policies=(sequential,), time_limit_s=2.5, margin=MARGIN)) as gate:
            for number in range(count):
                verdict = gate.judge(case, source, reference_source=source)
                assert verdict.timing is not None, f"{operator}: {verdict.code}: {verdict.reasons[0].message}"
                trials.append(trial_of(verdict, number))
        reporter.write_line(f"A/A {operator}: {count} trials")
        publish("a_a", report_of(trials), list(trials))
    holds = sum(trial.low <= 1 <= trial.high for trial in trials)
    assert holds >= 0.95 * len(trials)
    assert false_slower(trials) == 0
    assert median([trial.half_width for trial in trials]) <= 0.02
