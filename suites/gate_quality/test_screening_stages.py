"""Where the seconds of a screening go: by stage of a judgement, for some kernels of each workload, warm.

pytest suites/gate_quality/test_screening_stages.py --platform cpu
pytest suites/gate_quality/test_screening_stages.py --platform sm90 --klineage-artifacts build/round/artifacts

About a minute each; see test_gpu_throughput.py for the artifacts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec
from on_gpu import machine_of
from screened_round import Screened, the_round, workloads

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.gate.context import Progress

ON_CPU, ON_GPU = (0, 0, 1, 2, 3), (4, 4, 7)
"""Places in a workload's kernels: one twice, the first time cold, and others."""


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """One screening's seconds by what it said it was doing."""

    workload: str
    kernel: str
    cold: bool
    code: str
    seconds: dict[str, float]
    machine: str
    judged_at: str


class Clock:
    """Notes when a judgement says that it goes on to something else."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, str]] = []

    def begin(self) -> None:
        """A new judgement."""
        self.marks = [(time.monotonic(), "before")]

    def note(self, progress: Progress) -> None:
        """Take the gate's progress; rounds of one stage are one."""
        name = f"start: {progress.message.rpartition(' ')[2]}" if progress.stage == "start" else progress.stage
        name = "attribution" if progress.message.startswith("naming") else name
        self.marks.append((time.monotonic(), name))

    def seconds(self) -> dict[str, float]:
        """By stage, in the order in which they began; what comes after the last is in it."""
        found: dict[str, float] = defaultdict(float)
        for (began, name), (ended, _) in pairwise([*self.marks, (time.monotonic(), "")]):
            found[name] += ended - began
        return dict(found)


def report_of(rows: list[StageSeconds], platform: str) -> str:
    """The page with its table: medians of warm screenings by workload and stage."""
    warm = [row for row in rows if not row.cold]
    stages = list(dict.fromkeys(name for row in rows for name in row.seconds))
    seconds = sum(sum(row.seconds.values()) for row in warm)
    lines = [
        f"# Where a screening's seconds go on {platform}\n",
        f"{rows[-1].machine}, {rows[-1].judged_at}. Medians of {len(taken(platform)) - 1} warm screenings of each "
        "workload; the stages are those of the gate's progress, and the ends of processes are in the last. "
        f"All {len(warm)} warm ones took {seconds:.1f} s: {60 * len(warm) / seconds:.1f} a minute.\n",
        f"| workload | {' | '.join(stages)} | all | cold |",
        f"|---|{'---|' * (len(stages) + 2)}",
    ]
    for workload in workloads(platform):
        own = [row.seconds for row in warm if row.workload == workload]
        cold = [sum(row.seconds.values()) for row in rows if row.cold and row.workload == workload]
        cells = [median(one.get(name, 0.0) for one in own) for name in stages]
        cells += [median(sum(one.values()) for one in own), median(cold)]
        lines.append(f"| {workload} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join([*lines, "", f"Raw figures: `screening-stages-{platform}.jsonl`."])


def taken(platform: str) -> tuple[int, ...]:
    return ON_CPU if platform == "cpu" else ON_GPU


def taken_of(platform: str) -> list[tuple[Screened, bool]]:
    """What is screened, and whether it is the first of its workload."""
    every = list(the_round(platform))
    chains = {name: [one for one in every if one.workload == name] for name in workloads(platform)}
    return [(chain[place], index == 0) for chain in chains.values() for index, place in enumerate(taken(platform))]


def test_screening_stages(
    klineage_session: KlineageSession, publish: Callable[[str, str, list[StageSeconds]], None]
) -> None:
    """Every kernel is right; the table is for the reader."""
    platform, clock, rows = klineage_session.platform, Clock(), []
    with Gate(platform, klineage_session.gate_settings, progress=clock.note) as gate:
        for one, cold in taken_of(platform):
            clock.begin()
            verdict = gate.judge(one.case, one.source, platforms=one.platforms, screen_against=one.best)
            row = StageSeconds(
                workload=one.workload, kernel=one.source.label, cold=cold, code=verdict.code.value,
                seconds=clock.seconds(), machine=machine_of(verdict), judged_at=verdict.judged_at,
            )  # fmt: skip
            rows.append(row)
            assert verdict.ranked, verdict.reasons[0].message
    publish(f"screening-stages-{platform}", report_of(rows, platform), rows)
