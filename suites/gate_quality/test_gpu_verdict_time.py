"""What a verdict costs on a GPU: GEMM 4096^3 by the expert kernel, warm, from the question to the answer.

pytest suites/gate_quality/test_gpu_verdict_time.py --platform sm90 --publish          half a minute on an H200
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec
from on_gpu import gpu_platform, machine_of, sources

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Surface

VERDICTS = 5
SEEDS = 3
TARGET_S = 4.0
"""A verdict with three seeds against the oracle."""
TIMED_S, HALF_WIDTH = 2.5, 0.005
"""Of these under the default policy, and the interval that it ends with."""
OVERHEAD_S = 1.5
"""Beside the timed blocks and the build: two contexts, the checks, the profiled blocks."""


class VerdictTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of every verdict, the first (cold) apart."""

    kernel: str
    first_s: float
    total_s: tuple[float, ...]
    timed_s: tuple[float, ...]
    """Of these, inside of the timed blocks' policy."""
    overhead_s: tuple[float, ...]
    half_widths: tuple[float, ...]
    codes: tuple[str, ...]
    machine: str
    judged_at: str


def report_of(figures: VerdictTime, platform: str) -> str:
    """The page with its table."""
    rows = (
        ("a warm verdict, median (largest)", figures.total_s, f"{TARGET_S:g} s"),
        ("of these inside of the timed blocks", figures.timed_s, f"{TIMED_S:g} s"),
        ("beside them", figures.overhead_s, f"{OVERHEAD_S:g} s"),
    )
    lines = [
        f"# What a verdict costs on {platform}: GEMM 4096^3, bf16\n",
        f"{figures.machine}, {figures.judged_at}. {figures.kernel} against cuBLAS, {SEEDS} seeds, else the "
        f"defaults, {len(figures.total_s)} verdicts after a first one of {figures.first_s:.1f} s.\n",
        "| what | measured | target |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {median(seconds):.2f} s ({max(seconds):.2f} s) | {goal} |" for what, seconds, goal in rows]
    lines.append(
        f"| half-width of the interval | +-{100 * median(figures.half_widths):.2f} % | {100 * HALF_WIDTH:g} % |"
    )
    return "\n".join([*lines, "", f"Raw figures: `verdict-time-{platform}.jsonl`."])


def test_gpu_verdict_time(
    klineage_session: KlineageSession, publish: Callable[[str, str, list[VerdictTime]], None]
) -> None:
    """A warm verdict takes at most 4 s, of which 2.5 s are timing, and its interval is within 0.5 %."""
    platform = gpu_platform(klineage_session)
    case = msgspec.structs.replace(paper_case("gemm", "gpu", "cublas"), at_least=1e-4)
    source = next(source for source in sources("gemm", platform) if source.surface is Surface.CUDA)
    verdicts, seconds = [], []
    settings = msgspec.structs.replace(klineage_session.gate_settings, seeds=SEEDS)
    with Gate(platform, settings) as gate:
        for _ in range(VERDICTS + 1):
            started = time.monotonic()
            verdicts.append(gate.judge(case, source))
            seconds.append(time.monotonic() - started)
    timings = [verdict.timing for verdict in verdicts[1:] if verdict.timing is not None]
    assert len(timings) == VERDICTS, [verdict.reasons[0].message for verdict in verdicts]
    figures = VerdictTime(
        kernel=source.label, first_s=seconds[0], total_s=tuple(seconds[1:]),
        timed_s=tuple(timing.seconds for timing in timings),
        overhead_s=tuple(verdict.overhead_s for verdict in verdicts[1:]),
        half_widths=tuple(timing.speedup.half_width for timing in timings),
        codes=tuple(verdict.code.value for verdict in verdicts), machine=machine_of(verdicts[-1]),
        judged_at=verdicts[-1].judged_at,
    )  # fmt: skip
    publish(f"verdict-time-{platform}", report_of(figures, platform), [figures])
    assert median(figures.total_s) <= TARGET_S
    assert median(figures.timed_s) <= TIMED_S
    assert median(figures.half_widths) <= HALF_WIDTH
    assert median(figures.overhead_s) <= OVERHEAD_S
