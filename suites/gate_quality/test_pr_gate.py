"""The comparison of unchanged kernels on the CPU tier with a pin: false alarms, and what slower kernels it finds.

Each expert kernel is judged 23 times under a short time limit. Two judgements in a row make a pin, the one after them
is compared with it, and where that says that the speed has changed, the next one has to confirm it: what
`--klineage-save` and `--klineage-compare` do, with `--klineage-compare-fail=slower:3%`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec
import pytest

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelSource, Verdict
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.compare import compare, confirmed
from pytest_klineage.results.baselines import pins_of
from pytest_klineage.results.packed import read_packed

OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
RUNS = 23
"""Of each operator: twenty comparisons, each of two that are pinned, one of today and one to confirm it."""
MARGIN = 0.03
TIME_LIMIT_S = 5.0
"""Half of the default: both sides are restarted several times, and a suite of five ends within a minute."""
SLOWER_BY = (0.05, 0.1, 0.2)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one kernel."""

    operator: str
    number: int
    verdict: Verdict


def neighbours(trials: list[Trial], *, slower_by: float = 0.0) -> list[Comparison]:
    """Every run compared with a pin of the two before it."""
    return [compared(trials[now - 2 : now], trials[now : now + 2], slower_by) for now in range(2, len(trials) - 1)]


def with_the_first(trials: list[Trial]) -> list[Comparison]:
    """Every run compared with the first two, as with a baseline that was pinned once."""
    return [compared(trials[:2], trials[now : now + 2], 0.0) for now in range(2, len(trials) - 1)]


def compared(then: list[Trial], now: list[Trial], slower_by: float) -> Comparison:
    """As the plugin compares: `then` was pinned, `now` is judged, the second of both where the first is not enough."""
    (first, second), key = then, ("pr_gate", then[0].verdict.case.id, then[0].verdict.label, 0)
    (pin,), _ = pins_of([("pr_gate", first.verdict)], {key: second.verdict})
    verdict, again = (slowed(trial.verdict, slower_by) for trial in now)
    found = compare(pin, verdict, against="main", margin=MARGIN)
    if not found.outcome.change:
        return found
    return confirmed(found, compare(pin, again, against="main", margin=MARGIN), again)


def slowed(verdict: Verdict, by: float) -> Verdict:
    """The verdict, had the kernel taken so much longer in every call."""
    assert verdict.timing is not None
    samples = tuple(sample * (1 + by) for sample in verdict.timing.candidate_samples_ms)
    return msgspec.structs.replace(
        verdict, timing=msgspec.structs.replace(verdict.timing, candidate_samples_ms=samples)
    )  # fmt: skip


def noticed(trials: list[Trial]) -> list[int]:
    """How many comparisons would say slower, had the kernel taken longer by each of SLOWER_BY."""
    return [
        sum(item.outcome is ComparisonOutcome.SLOWER for item in neighbours(trials, slower_by=by)) for by in SLOWER_BY
    ]


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
    late = {name: noticed(group) for name, group in groups.items() if group}
    near["all"], far["all"] = list(chain(*near.values())), list(chain(*far.values()))
    late["all"] = [sum(counts) for counts in zip(*late.values(), strict=True)]
    for name, found in near.items():
        seen = Counter(item.outcome for item in found)
        widths = [item.ratio.half_width for item in found if item.ratio is not None]
        cells = (
            name,
            len(found),
            sum(item.outcome.change for item in found),
            seen[ComparisonOutcome.SAME],
            seen[ComparisonOutcome.UNCLEAR],
            f"{100 * median(widths):.1f} %",
            *late[name],
            f"{sum(item.outcome.change for item in far[name])} of {len(far[name])}",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def report_of(trials: list[Trial]) -> str:
    """The page with its table."""
    last = trials[-1].verdict
    where = f"{last.machine.device}, {last.machine.cores} cores, {last.judged_at}" if last.machine else ""
    return (
        "# Comparing runs of unchanged kernels on the CPU\n\n"
        f"{where}. Expert kernels against `torch`, `--klineage-time-limit={TIME_LIMIT_S:g}`; two runs in a row "
        f"are a pin, the next is compared with it, margin {100 * MARGIN:g} %, 99 % intervals over the samples of both; "
        "a change that it finds is confirmed by the run after it, or `unclear`. A false alarm is `slower` or `faster`. "
        "What would be found is the same comparisons with the kernel's times made longer.\n\n"
        f"{table_of(trials)}\n\nRaw verdicts: `pr_gate.jsonl.gz`."
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
        trials = [msgspec.json.decode(line, type=Trial) for line in read_packed(Path(reuse)).splitlines()]
        publish("pr_gate", report_of(trials), list(trials))
    elif reuse:
        pytest.skip(f"{reuse} is of another measurement")
    else:
        trials = measured(request, publish, expert_source)
    found = [
        item for name in OPERATORS for item in neighbours([trial for trial in trials if trial.operator == name])
    ]  # fmt: skip
    assert len(found) == len(OPERATORS) * (RUNS - 3)
    assert not [item for item in found if item.outcome is ComparisonOutcome.SLOWER]
