"""Speedups kernel by kernel of optimizations that wait for verdicts, from their trajectories alone.

python suites/kernel_by_kernel.py build/ablations/trajectories/generated_only-sm90     # a row for each method and case
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import Judged

RECOVERED = 0.9
"""Share of the reference's speed that is counted, by estimate."""


def speedups_of(path: Path) -> list[float | None]:
    """Of every kernel that a reply made, None for a wrong one."""
    judged = [line.event for line in read_trajectory(path)[0] if isinstance(line.event, Judged)]
    return [event.speedup if event.code.status in RIGHT else None for event in judged if event.call > 0]


def cell(speedups: list[float | None]) -> str:
    """One run, kernel by kernel."""
    return ", ".join("wrong" if one is None else f"{one:.2f}" for one in speedups) or "waits"


def main(folder: Path) -> None:
    """Print a table for each method, how many runs reach RECOVERED, and the mean of the cases' best."""
    for method in sorted(path for path in folder.iterdir() if path.is_dir()):
        cases: dict[str, list[list[float | None]]] = {}
        for path in sorted(method.glob("*.jsonl")):
            cases.setdefault(path.stem.rpartition("-")[0], []).append(speedups_of(path))
        best = {name: [max(filter(None, run), default=0.0) for run in runs] for name, runs in cases.items()}
        runs_at_most = max(map(len, cases.values()))
        print(f"\n{method.name}\n\n| case | {' | '.join(str(i + 1) for i in range(runs_at_most))} |")
        print(f"|{'---|' * (runs_at_most + 1)}")
        for name, runs in cases.items():
            print(f"| {name} | {' | '.join(map(cell, runs))} |")
        tops = [max(runs) for runs in best.values()]
        mean = f"{math.exp(sum(map(math.log, tops)) / len(tops)):.2f}" if all(tops) else "-"
        reached = sum(one >= RECOVERED for runs in best.values() for one in runs)
        print(f"\n{reached} of {sum(map(len, best.values()))} reach {RECOVERED}; mean of the best {mean}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
