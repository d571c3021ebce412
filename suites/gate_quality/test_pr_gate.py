"""The comparison of two runs of unchanged kernels on the CPU tier: false alarms, and what slower kernels it finds.

Twenty-one runs of each expert kernel under a short time limit; every run is compared with the one before it, as
`--klineage-compare` does with `--klineage-compare-fail=slower:3%`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.statistics import median
from pytest_klineage.library.baselines import pins_of
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelSource, Verdict
from pytest_klineage.records.baseline import Comparison, Outcome
from pytest_klineage.report.compare import classify, compare

OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
RUNS = 21
"""Of each operator: twenty comparisons of neighbours."""
MARGIN = 0.03
TIME_LIMIT_S = 2.0
"""The shortest in which both sides are started anew several times; a fifth of the default."""
SLOWER_BY = (0.05, 0.1, 0.2)
ALARMS = (Outcome.SLOWER, Outcome.FASTER)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one kernel."""

    operator: str
    number: int
    verdict: Verdict


def neighbours(trials: list[Trial]) -> list[Comparison]:
    """Every run compared with the one before it."""
    return [compared(then, now) for then, now in pairwise(trials)]


def with_the_first(trials: list[Trial]) -> list[Comparison]:
    """Every run compared with the first, as with a baseline that was pinned once."""
    return [compared(trials[0], now) for now in trials[1:]]


def compared(then: Trial, now: Trial) -> Comparison:
    (pin,), _ = pins_of([("pr_gate", then.verdict)])
    return compare(pin, now.verdict, against="main", margin=MARGIN)


def noticed(found: list[Comparison], by: float) -> int:
    """How many would be called slower had the kernel taken so much longer: its ratio is that much smaller then."""
    count = 0
    for item in found:
        assert item.ratio is not None
        ends = (item.ratio.estimate, item.ratio.low, item.ratio.high)
        estimate, low, high = (end / (1 + by) for end in ends)
        slowed = msgspec.structs.replace(item.ratio, estimate=estimate, low=low, high=high)
        count += classify(slowed, MARGIN) is Outcome.SLOWER
    return count


def table_of(trials: list[Trial]) -> str:
    """One row per operator and one for all."""
    noticing = " | ".join(f"{100 * by:.0f} % slower is found" for by in SLOWER_BY)
    lines = [
        f"| operator | comparisons | false alarms | same | unclear | median half-width | {noticing} | "
        "false alarms against the first run |",
        "|---|---|---|---|---|---|" + "---|" * len(SLOWER_BY) + "---|",
    ]
    groups = {name: [trial for trial in trials if trial.operator == name] for name in OPERATORS}
    near = {name: neighbours(group) for name, group in groups.items() if group}
    far = {name: with_the_first(group) for name, group in groups.items() if group}
    near["all"], far["all"] = list(chain(*near.values())), list(chain(*far.values()))
    for name, found in near.items():
        seen = Counter(item.outcome for item in found)
        widths = [item.ratio.half_width for item in found if item.ratio is not None]
        cells = (
            name, len(found), sum(seen[outcome] for outcome in ALARMS), seen[Outcome.SAME], seen[Outcome.UNCLEAR],
            f"{100 * median(widths):.1f} %", *(noticed(found, by) for by in SLOWER_BY),
            f"{sum(item.outcome in ALARMS for item in far[name])} of {len(far[name])}",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def report_of(trials: list[Trial]) -> str:
    """The page with its table."""
    last = trials[-1].verdict
    where = f"{last.machine.device}, {last.machine.cores} cores, {last.judged_at}" if last.machine else ""
    return (
        "# Comparing runs of unchanged kernels on the CPU\n\n"
        f"{where}. Expert kernels against `torch`, `--klineage-time-limit={TIME_LIMIT_S:g}`; each run is compared with "
        f"the one before it, margin {100 * MARGIN:g} %, 99 % interval over the samples of both. A false alarm is "
        "`slower` or `faster`. What would be found is the same comparisons with the kernel's times made longer.\n\n"
        f"{table_of(trials)}\n\nRaw verdicts: `pr_gate.jsonl`."
    )


def measured(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Trial]], None],
    expert_source: Callable[[str], KernelSource],
) -> list[Trial]:
    """Run the trials, operator by operator, and publish them."""
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    trials: list[Trial] = []
    for operator in OPERATORS:
        source, case = expert_source(operator), paper_case(operator, "cpu", "torch")
        # The machine's own load is part of what is measured here; a busy one is not left out.
        with Gate("cpu", GateSettings(time_limit_s=TIME_LIMIT_S, busy_limit=1.0)) as gate:
            for number in range(RUNS):
                verdict = gate.judge(case, source)
                assert verdict.scored, f"{operator}: {verdict.code}: {verdict.reasons[0].message}"
                trials.append(Trial(operator=operator, number=number, verdict=verdict))
        reporter.write_line(f"PR gate {operator}: {RUNS} runs")
    publish("pr_gate", report_of(trials), list(trials))
    return trials


def test_unchanged_kernels_raise_no_alarm(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Trial]], None],
    expert_source: Callable[[str], KernelSource],
) -> None:
    """None of 100 comparisons is called slower."""
    reuse = request.config.getoption("--reuse")
    if reuse and Path(reuse).name == "pr_gate.jsonl":
        trials = [msgspec.json.decode(line, type=Trial) for line in Path(reuse).read_bytes().splitlines()]
        publish("pr_gate", report_of(trials), list(trials))
    elif reuse:
        pytest.skip(f"{reuse} is of another measurement")
    else:
        trials = measured(request, publish, expert_source)
    found = [
        item for name in OPERATORS for item in neighbours([trial for trial in trials if trial.operator == name])
    ]  # fmt: skip
    assert len(found) == len(OPERATORS) * (RUNS - 1)
    assert not [item for item in found if item.outcome is Outcome.SLOWER]
