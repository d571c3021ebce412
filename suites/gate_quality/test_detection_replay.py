"""What the PR gate by pair would find on a CPU, replayed: the A/A trials, had the candidate's times been longer.

pytest suites/gate_quality/test_detection_replay.py --publish      measures nothing; test_detection.py slows kernels

A trial is a judgement of an unchanged kernel and the next one of the same kernel, which has to confirm a change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from detection import UNCHANGED, Found
from test_a_a import OPERATORS, Trial, earlier, in_peace
from test_detection import LEVELS, TARGETS

from pytest_klineage.gate.timing.statistics import paired_interval
from pytest_klineage.records.baseline import ComparisonOutcome
from pytest_klineage.report.compare import MARGIN, classify

SAMPLES = Path(__file__).resolve().parents[2] / "results" / "gate_quality" / "a_a.jsonl"
NAME = "detection-cpu-replay"
RESAMPLES = 500


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement as it would have been."""

    operator: str
    slower_by: float
    number: int
    outcome: ComparisonOutcome


def outcome(trial: Trial, by: float) -> ComparisonOutcome:
    """What a judgement says, had every time of its candidate been longer by this share."""
    longer = tuple(ms * (1 + by) for ms in trial.candidate_samples_ms)
    interval = paired_interval(
        trial.reference_samples_ms, longer, confidence=0.95, starts=trial.starts, resamples=RESAMPLES
    )
    return classify(interval, MARGIN)


def found_in(judged: list[Replayed]) -> Found:
    """What the trials of one slowdown came to, each kernel's judgements by themselves."""
    groups = [[one.outcome for one in judged if one.operator == name] for name in OPERATORS]
    sure = [group[n] for group in groups for n in range(len(group)) if group[n] is group[(n + 1) % len(group)]]
    slower = sum(one is ComparisonOutcome.SLOWER for one in sure)
    return Found(trials=len(judged), slower=slower, changed=sum(one.change for one in sure))


def report_of(judged: list[Replayed], trials: list[Trial]) -> str:
    """The page with its table."""
    lines = [
        f"# The PR gate by pair on a CPU, replayed: margin {100 * MARGIN:g} %", "",
        f"{trials[-1].machine.device if trials[-1].machine else ''}, samples of {trials[0].judged_at[:10]} in "
        "`a_a.jsonl.gz`: the same kernel on both sides, with the gate of that day. The candidate's times are made "
        "longer; a change counts when the next judgement of the kernel confirms it.", "",
        "| kernel | times longer by | trials | found slower | found faster | asked |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for by, target in zip((UNCHANGED, *LEVELS), (UNCHANGED, *TARGETS), strict=True):
        for name in (*OPERATORS, None):
            found = found_in([one for one in judged if one.slower_by == by and name in (None, one.operator)])
            asked = "" if name else ("0" if by == UNCHANGED else f">= {100 * target:.0f} %")
            slower = f"{found.slower} ({100 * found.share:.0f} %)"
            cells = (name or "**all**", f"{100 * by:g} %", found.trials, slower, found.changed - found.slower, asked)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def test_no_unchanged_kernel_would_be_accused(publish: Callable[[str, str, list[Replayed]], None]) -> None:
    """Of the replayed judgements none accuses an unchanged kernel; what is found of slower ones is in the table."""
    trials = in_peace(earlier(SAMPLES))
    judged = [
        Replayed(operator=trial.operator, slower_by=by, number=trial.number, outcome=outcome(trial, by))
        for by in (UNCHANGED, *LEVELS)
        for trial in trials
    ]
    publish(NAME, report_of(judged, trials), judged)
    assert found_in([one for one in judged if one.slower_by == UNCHANGED]).changed == 0
