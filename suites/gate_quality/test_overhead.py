"""What the gate itself costs: a warm verdict beside its timed blocks, the judge's memory, the plugin's import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from statistics import median

import msgspec

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelSource, Machine

VERDICTS = 12
IMPORTS = 21

JUDGE = """
import resource, sys
from pathlib import Path
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import paper_case
from pytest_klineage.surfaces import read_source
with Gate("cpu", GateSettings(time_limit_s=1.0)) as gate:
    gate.judge(paper_case("topk", "cpu", "torch"), read_source(sys.argv[1], flags=("-O3", "-fopenmp")))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
IMPORT = """
import time
{before}
start = time.perf_counter()
import pytest_klineage.plugin
print((time.perf_counter() - start) * 1e3)
"""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: seconds per warm verdict beside its timed blocks, bytes, milliseconds per import."""

    verdict_overhead_s: tuple[float, ...]
    judge_peak_bytes: int
    import_alone_ms: tuple[float, ...]
    import_in_pytest_ms: tuple[float, ...]
    machine: Machine | None
    judged_at: str


def output_of(code: str, *arguments: str) -> float:
    command = [sys.executable, "-c", code, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def test_overhead(
    publish: Callable[[str, str, list[Overhead]], None], expert_source: Callable[[str], KernelSource]
) -> None:
    """A warm Top-K verdict costs at most 0.5 s beside its timed blocks, the judge 150 MB, the plugin's import 50 ms."""
    source, case = expert_source("topk"), paper_case("topk", "cpu", "torch")
    with Gate("cpu", GateSettings(time_limit_s=1.0)) as gate:
        verdicts = [gate.judge(case, source) for _ in range(VERDICTS + 1)]
    overheads = tuple(verdict.overhead_s for verdict in verdicts[1:])
    path = f"{__file__.rpartition('/suites/')[0]}/experts/topk/cpu-cpp/expert.cpp"
    figures = Overhead(
        verdict_overhead_s=overheads,
        judge_peak_bytes=int(output_of(JUDGE, path)),
        import_alone_ms=tuple(output_of(IMPORT.format(before="")) for _ in range(IMPORTS)),
        import_in_pytest_ms=tuple(
            output_of(IMPORT.format(before="import pytest, _pytest.terminal")) for _ in range(IMPORTS)
        ),
        machine=verdicts[-1].machine,
        judged_at=verdicts[-1].judged_at,
    )
    spent = f"{median(overheads):.2f} s ({max(overheads):.2f} s)"
    rows = [
        ("warm Top-K verdict beside its timed blocks, median (largest)", spent, "0.5 s"),
        ("judge process, peak resident", f"{figures.judge_peak_bytes / 1e6:.0f} MB", "150 MB"),
        (
            "import pytest_klineage.plugin where pytest is loaded, median",
            f"{median(figures.import_in_pytest_ms):.1f} ms",
            "50 ms",
        ),
        ("the same in a bare interpreter (imports pytest too)", f"{median(figures.import_alone_ms):.1f} ms", ""),
    ]
    machine = figures.machine
    where = f"{machine.device}, {machine.cores} cores, {figures.judged_at}." if machine else ""
    lines = [f"# What the gate costs\n\n{where}\n", "| what | measured | target |", "|---|---|---|"]
    lines += [f"| {what} | {value} | {target} |" for what, value, target in rows]
    publish("overhead", "\n".join(lines) + "\n\nRaw figures: `overhead.jsonl`.", [figures])
    assert median(overheads) <= 0.5
    assert figures.judge_peak_bytes <= 150e6
    assert median(figures.import_in_pytest_ms) <= 50
