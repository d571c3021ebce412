"""The gate's speedup beside that of a plain loop: threads bound, operands cold, no processes between.

The loop runs in a process of its own: PyTorch's operator and the expert's shared library on tensors of the case, in
turns, each call after another processor has written as many bytes as the gate flushes. As in the gate, memory that is
freed stays with the process: until 2026-11-28 it did not, and half of a convolution's time was for 950 page faults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.host.hosts import host_for
from pytest_klineage.gate.host.threads import binding_here
from pytest_klineage.gate.settings import default_cache_dir
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Interval, KernelSource, Machine, speedup

OPERATORS = ("topk", "gdn", "fmha", "conv2d", "gemm")
MUST_AGREE = ("topk", "gdn")
APART = 0.15
"""How far the gate may be from the loop, relative."""
PAIRS = 60
LOOP_LIMIT_S = 120.0
DIFFERENCES = (
    "What is left: a call of the gate has new inputs, in a process that stood still while another one compared, "
    "wrote these inputs and flushed. Where that costs a call ten microseconds, it is a tenth of Top-K's kernel."
)
LOOP = Path(__file__).parent / "bound_loop.py"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Both measurements of one kernel."""

    operator: str
    gate: Interval
    code: str
    loop_reference_ms: tuple[float, ...]
    loop_candidate_ms: tuple[float, ...]
    machine: Machine | None
    judged_at: str

    @property
    def loop(self) -> float:
        """The loop's speedup: of its medians."""
        return speedup(median(self.loop_reference_ms), median(self.loop_candidate_ms))

    @property
    def apart(self) -> float:
        """The gate's speedup over the loop's, less 1."""
        return self.gate.estimate / self.loop - 1


def report_of(rows: list[Compared]) -> str:
    """The page with its table."""
    machine = rows[-1].machine
    where = f"{machine.device}, {machine.cores} cores, {rows[-1].judged_at}" if machine else ""
    lines = [
        "# The gate beside a plain bound loop with cold operands", "",
        f"{where}. {PAIRS} pairs in one process, medians; the gate with its defaults.", "",
        "| kernel | loop: reference ms | loop: kernel ms | loop | gate | gate over loop | verdict |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        gate = f"{row.gate.estimate:.2f}x [{row.gate.low:.2f}, {row.gate.high:.2f}]"
        times = f"{median(row.loop_reference_ms):.4f} | {median(row.loop_candidate_ms):.4f}"
        lines.append(f"| {row.operator} | {times} | {row.loop:.2f}x | {gate} | {100 * row.apart:+.1f} % | {row.code} |")
    return "\n".join([*lines, "", DIFFERENCES, "", "Raw samples: `bound_loop.jsonl`."])


def looped(operator: str, library: Path, entry: str, flush_bytes: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Milliseconds of both sides in a plain loop."""
    threads = len(os.sched_getaffinity(0))
    kept = host_for("cpu", "all").environment
    environment = os.environ | kept | binding_here(threads).environment | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(LOOP), operator, str(library), entry, str(flush_bytes), str(PAIRS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LOOP_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return tuple(found["reference"]), tuple(found["candidate"])


def measured(operator: str, source: KernelSource, gate: Gate) -> Compared:
    """Both measurements of one kernel, one after the other."""
    verdict = gate.judge(msgspec.structs.replace(paper_case(operator, "cpu", "torch"), at_least=1e-3), source)
    assert verdict.timing is not None, f"{operator}: {verdict.code}: {verdict.reasons[0].message}"
    assert verdict.build is not None
    library = gate.settings.cache_dir / "cpp" / verdict.build.digest / "kernel.so"
    reference, candidate = looped(operator, library, source.entry, verdict.timing.flush_bytes)
    return Compared(
        operator=operator, gate=verdict.timing.speedup, code=verdict.code.value, loop_reference_ms=reference,
        loop_candidate_ms=candidate, machine=verdict.machine, judged_at=verdict.judged_at,
    )  # fmt: skip


def test_the_gate_agrees_with_a_plain_bound_loop(
    expert_source: Callable[[str], KernelSource], publish: Callable[[str, str, list[Compared]], None]
) -> None:
    """Top-K and GDN within 15 %, all five in the table."""
    with Gate("cpu", GateSettings(cache_dir=default_cache_dir())) as gate:
        rows = [measured(operator, expert_source(operator), gate) for operator in OPERATORS]
    publish("bound_loop", report_of(rows), rows)
    held = [row for row in rows if row.operator in MUST_AGREE]
    assert not [f"{row.operator}: {row.apart:+.3f}" for row in held if abs(row.apart) > APART]
