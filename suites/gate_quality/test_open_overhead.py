"""What a warm verdict takes on an operator of a user's file, beside the same kernel's on a shipped operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

from pytest_klineage import operator
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import KernelCase, KernelSource, Machine, Verdict

VERDICTS = 12
LARGEST_RATIO = 1.15


@operator("a[M,K], b[K,N] -> c[M,N]", dtypes=("fp32",), flops="2*M*N*K")
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


class OpenOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: seconds of whole warm verdicts, and of what is beside their timed blocks, taken in turns."""

    shipped_s: tuple[float, ...]
    own_s: tuple[float, ...]
    shipped_beside_s: tuple[float, ...]
    own_beside_s: tuple[float, ...]
    machine: Machine | None
    judged_at: str


def seconds(gate: Gate, case: KernelCase, source: KernelSource) -> tuple[float, Verdict]:
    started = time.monotonic()
    verdict = gate.judge(case, source)
    assert verdict.scored, verdict.reasons
    return time.monotonic() - started, verdict


def test_open_overhead(
    publish: Callable[[str, str, list[OpenOverhead]], None], expert_source: Callable[[str], KernelSource]
) -> None:
    """A warm verdict on a user's GEMM takes at most 1.15x the time of one on the shipped GEMM."""
    source, shipped = expert_source("gemm"), paper_case("gemm", "cpu", "torch")
    sizes = {axis: shipped.shape[axis] for axis in "MKN"}
    own = make_case(product, sizes, "fp32", "torch", at_least=shipped.at_least)
    with Gate("cpu", GateSettings(time_limit_s=1.0)) as gate:
        taken = [(seconds(gate, shipped, source), seconds(gate, own, source)) for _ in range(VERDICTS + 1)][1:]
    last = taken[-1][1][1]
    figures = OpenOverhead(
        shipped_s=tuple(first[0] for first, _ in taken), own_s=tuple(second[0] for _, second in taken),
        shipped_beside_s=tuple(first[1].overhead_s for first, _ in taken),
        own_beside_s=tuple(second[1].overhead_s for _, second in taken),
        machine=last.machine, judged_at=last.judged_at,
    )  # fmt: skip
    ratio = median(figures.own_s) / median(figures.shipped_s)
    machine = figures.machine
    where = f"{machine.device}, {machine.cores} cores, {figures.judged_at}." if machine else ""
    lines = [
        "# A warm verdict on a user's operator\n",
        f"{where} GEMM {'x'.join(str(size) for size in shipped.shape.values())}, fp32, the expert's kernel against "
        f"PyTorch, {VERDICTS} verdicts each in turns after a first one, time_limit_s = 1, else the defaults.\n",
        "| what | shipped `gemm` | `a @ b` in a test file |", "|---|---|---|",
        f"| a warm verdict, median | {median(figures.shipped_s):.2f} s | {median(figures.own_s):.2f} s |",
        f"| of this beside the timed blocks | {median(figures.shipped_beside_s):.2f} s "
        f"| {median(figures.own_beside_s):.2f} s |",
        f"| ratio (target {LARGEST_RATIO}) | | {ratio:.2f}x |",
    ]  # fmt: skip
    publish("open_overhead", "\n".join(lines) + "\n\nRaw figures: `open_overhead.jsonl`.", [figures])
    assert ratio <= LARGEST_RATIO
