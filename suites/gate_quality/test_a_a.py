"""A/A: the same kernel on both sides of the gate, many times over. What the interval claims, and what it costs.

pytest suites/gate_quality/test_a_a.py --platform cpu --trials 60 --for 2.5      2.5 minutes more of 60 trials
pytest suites/gate_quality/test_a_a.py --publish --reuse results/runs/gate_quality/a_a.jsonl
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import pytest
from on_gpu import results_file

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.timing.statistics import Standing, paired_interval, quantile, standing
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Code, Interval, KernelSource, Machine, Verdict, speedup
from pytest_klineage.results.packed import is_there, packed, read_packed
from pytest_klineage.results.storage import write_atomically

MARGIN = 0.05
TRIALS = 200
"""In all, unless --trials says otherwise."""
TIME_LIMIT_S = 5.0
"""Less than a judgement's default, so that 200 trials take twenty-five minutes."""
LEAST_TRIALS = 60
ATTEMPTS = 3
SEQUENTIAL = {"topk": "paper"}
"""What stands beside `paired`, do_bench elsewhere: its 125 ms of a kernel of 0.2 ms are 800 calls of each side."""
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
    starts: tuple[int, ...]
    machine: Machine | None
    judged_at: str
    busy: bool = False
    """Whether others used the machine meanwhile: such a trial is kept, made once more, and in no table."""


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
        starts=timing.starts,
        machine=verdict.machine,
        judged_at=verdict.judged_at,
        busy=verdict.code is Code.INCONCLUSIVE_BUSY,
    )


def table_of(trials: list[Trial]) -> str:
    """One row per operator and one for all, the intervals computed again from the samples at two confidences."""
    lines = [
        "| operator | trials | 95 % interval holds 1.0 | 99 % interval holds 1.0 | false slower | "
        "median half-width 95 % / 99 % | median pairs | paired: 90 % of estimates within | "
        "sequential medians: 90 % within | paired: median | sequential: median |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*OPERATORS, "all"):
        chosen = [trial for trial in trials if name in ("all", trial.operator)]
        if not chosen:
            continue
        narrow, wide = intervals(chosen, 0.95), intervals(chosen, 0.99)
        widths = (median([interval.half_width for interval in group]) for group in (narrow, wide))
        cells = (
            name,
            len(chosen),
            *(share(sum(interval.low <= 1 <= interval.high for interval in group), group) for group in (narrow, wide)),
            sum(standing(interval, at_least=1.0, margin=MARGIN) is Standing.SLOWER for interval in narrow),
            " / ".join(f"{100 * width:.2f} %" for width in widths),
            f"{median([trial.pairs for trial in chosen]):.0f}",
            f"+-{100 * spread([trial.estimate for trial in chosen]):.2f} %",
            f"+-{100 * spread([trial.sequential for trial in chosen]):.2f} %",
            f"{median([trial.estimate for trial in chosen]):.4f}",
            f"{median([trial.sequential for trial in chosen]):.4f}",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def intervals(trials: list[Trial], confidence: float) -> list[Interval]:
    """Every trial's interval at this confidence, from its samples."""
    return [
        paired_interval(
            trial.reference_samples_ms, trial.candidate_samples_ms, confidence=confidence, starts=trial.starts
        )
        for trial in trials
    ]


def share(count: int, group: list[Interval]) -> str:
    return f"{count} ({100 * count / len(group):.1f} %)"


def report_of(trials: list[Trial]) -> str:
    """The page with its table."""
    machine, alone = trials[-1].machine, in_peace(trials)
    heading = "# A/A on the CPU: the same expert kernel as candidate and as reference\n"
    where = f"{machine.device}, {machine.cores} cores, {trials[-1].judged_at}" if machine else ""
    how = (
        f"Policy `paired` (stops at +-1 % or {TIME_LIMIT_S:g} s). Beside it, one side after the other: `do_bench` "
        "(25 + 100 ms), for Top-K `paper` (25 + 100 calls). During "
        f"{len(trials) - len(alone)} of {len(trials)} trials others used the machine; they are left out, and were made "
        "once more."
    )
    return f"{heading}\n{where}. {how}\n\n{table_of(alone)}\n\nRaw samples: `a_a.jsonl.gz`."


def spread(ratios: list[float]) -> float:
    """The distance from 1 that 90 % of the ratios keep."""
    return quantile(sorted(abs(ratio - 1) for ratio in ratios), 0.9)


def earlier(path: Path) -> list[Trial]:
    """Trials of an earlier run."""
    return [msgspec.json.decode(line, type=Trial) for line in read_packed(path).splitlines()]


def measured(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Trial]], None],
    expert_source: Callable[[str], KernelSource],
) -> list[Trial]:
    """Trials of the operators in turns, each kept at once; with --for MIN so many minutes more of them."""
    count, minutes = request.config.getoption("--trials") or TRIALS, request.config.getoption("--for")
    path = results_file(request.config, "a_a")
    trials = earlier(path) if minutes and is_there(path) else []
    begun = len(trials)
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    with contextlib.ExitStack() as opened:
        gates = {name: opened.enter_context(gate_for(name)) for name in ("do_bench", "paper")}
        while len(in_peace(trials)) < count and time.monotonic() < until and not is_hopeless(trials[begun:]):
            operator = OPERATORS[len(in_peace(trials)) % len(OPERATORS)]
            source, case = expert_source(operator), paper_case(operator, "cpu", "torch")
            verdict = gates[SEQUENTIAL.get(operator, "do_bench")].judge(case, source, reference_source=source)
            assert verdict.timing is not None, f"{operator}: {verdict.code}: {verdict.reasons[0].message}"
            trials.append(trial_of(verdict, len(trials)))
            keep(path, trials)
    publish("a_a", report_of(trials), list(trials))
    return trials


def gate_for(sequential: str) -> Gate:
    """A gate that also times one side after the other."""
    return Gate("cpu", GateSettings(also_policies=(sequential,), time_limit_s=TIME_LIMIT_S, margin=MARGIN))


def keep(path: Path, trials: list[Trial]) -> None:
    """Write what there is: a run that is cut off is gone on with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed(path).unlink(missing_ok=True)
    write_atomically(path, b"".join(msgspec.json.encode(trial) + b"\n" for trial in trials))


def is_hopeless(trials: list[Trial]) -> bool:
    """Whether others used the machine during the last few trials: the same command goes on later."""
    return len(last := trials[-ATTEMPTS:]) == ATTEMPTS and all(trial.busy for trial in last)


def in_peace(trials: list[Trial]) -> list[Trial]:
    """Those during which others left the machine alone."""
    return [trial for trial in trials if not trial.busy]


def test_a_a(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Trial]], None],
    expert_source: Callable[[str], KernelSource],
) -> None:
    """95 % of the intervals hold 1.0, no trial is called slower, the median half-width is 2 % at most."""
    if reuse := request.config.getoption("--reuse"):
        trials = earlier(Path(reuse))
        publish("a_a", report_of(trials), list(trials))
    else:
        trials = measured(request, publish, expert_source)
    found = intervals(in_peace(trials), 0.95)
    if len(found) < (request.config.getoption("--trials") or LEAST_TRIALS):
        pytest.skip(f"{len(found)} trials: the same command goes on")
    assert sum(interval.low <= 1 <= interval.high for interval in found) >= 0.95 * len(found)
    assert not any(standing(interval, at_least=1.0, margin=MARGIN) is Standing.SLOWER for interval in found)
    assert median([interval.half_width for interval in found]) <= 0.02
