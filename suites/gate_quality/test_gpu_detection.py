"""The PR gate by pair on a GPU: kernels with a busy loop of 1 to 3 % against themselves without, margin 0.5 %.

Built beforehand, without a device; measured for BUDGET_S on each GPU, one process for each of them; put together:

pytest suites/gate_quality/test_gpu_detection.py --platform sm90 --klineage-stage compile --klineage-artifacts=DIR
CUDA_VISIBLE_DEVICES=0 pytest suites/gate_quality/test_gpu_detection.py --platform sm90 --klineage-artifacts=DIR
pytest suites/gate_quality/test_gpu_detection.py --publish --reuse results/runs/gate_quality
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from detection import (
    UNCHANGED,
    Judged,
    all_trials,
    chosen,
    count,
    run_round,
    scaled,
    scaled_table,
    short_of,
    slowed_on_gpu,
    table,
)
from on_gpu import ROOT, kept_rows, results_file

from pytest_klineage import KlineageSession, UsageError
from pytest_klineage.gate import Gate
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelSource, Surface, Verdict
from pytest_klineage.report.compare_base import precision_for
from pytest_klineage.results.packed import append_line, is_there, line_files

LEVELS = (0.01, 0.015, 0.02, 0.03)
TARGETS = (0.8, 0.95, 0.99, 1.0)
MARGIN = 0.005
BUDGET_S = 210.0
"""Of one process; --trials N measures N rounds of each kernel instead."""
CLOCK_KHZ = 1_980_000
"""At which an H200 ran each of these kernels in results/main_tier-sm90."""
LEAST_UNCHANGED = 100


class Kernel(msgspec.Struct, frozen=True):
    """An expert kernel, where its busy loop goes, and how long it takes."""

    operator: str
    function: str
    first_wave: int
    """Blocks that run at once, so that each of them delays the whole kernel by its own loop."""
    base_ms: float
    """In results/main_tier-sm90."""


KERNELS = (
    Kernel("gemm", "gemm", 132, 0.174),
    Kernel("fmha", "fmha", 132, 1.499),
    Kernel("gdn", "prepare", 528, 0.112),
)
"""Those that take 0.1 ms and more. Of shorter ones the interval is about as wide as what is to be found."""


def source_of(kernel: Kernel, platform: str, slower_by: float) -> KernelSource:
    """The expert with a busy loop; of no cycles for the base, so that the two differ in one number."""
    experts = [expert for expert in find_experts(ROOT / "experts", platform) if expert.surface is Surface.CUDA]
    source = next(expert for expert in experts if expert.operator == kernel.operator).source("expert")
    cycles = slower_by * kernel.base_ms * CLOCK_KHZ
    return slowed_on_gpu(source, kernel.function, cycles, kernel.first_wave)


def report_of(judged: list[Judged], platform: str) -> str:
    """The page with both tables."""
    machines = dict.fromkeys(one.verdict.machine.device for one in judged if one.verdict.machine)
    days = sorted({one.verdict.judged_at[:10] for one in judged})
    trials = all_trials(judged, MARGIN)
    false = count(chosen(trials, UNCHANGED))
    return "\n".join(
        [
            f"# The PR gate by pair on {platform}: what it finds at a margin of {100 * MARGIN:g} %",
            "",
            f"{', '.join([*machines, ' and '.join(days)])}. A kernel with a busy loop (`clock64`) at the start of each "
            "block of its first wave against the same kernel with a loop of no cycles, as `--klineage-base` judges: "
            "up to three judgements of the same kernels on the same GPU, pooled; none is in two trials. "
            f"Kernels of 0.1 ms and more. False alarms: {false.slower} slower, {false.changed - false.slower} faster "
            f"in {false.trials}.",
            "",
            *table(trials, LEVELS, TARGETS, [kernel.operator for kernel in KERNELS]),
            "",
            "The judgements of unchanged kernels once more, had every time of the candidate been longer:",
            "",
            *scaled_table(judged, LEVELS, MARGIN),
            "",
            f"Raw samples: `detection-{platform}.jsonl`.",
        ]
    )


def build_all(gate: Gate) -> None:
    """Build every kernel with every busy loop; needs no device."""
    for kernel in KERNELS:
        case = paper_case(kernel.operator, "gpu", "torch")
        for by in (UNCHANGED, *LEVELS):
            verdict = gate.judge(case, source_of(kernel, gate.platform, by))
            assert verdict.ok, f"{kernel.operator}: {verdict.code}: {verdict.reasons[0].message}"


def measure(gate: Gate, rounds: int, seconds: float, keep: Callable[[Judged], None]) -> None:
    """Rounds of every kernel, each kernel for its share of the time."""
    started = time.monotonic()
    for index, kernel in enumerate(KERNELS):
        case = paper_case(kernel.operator, "gpu", "torch")
        sources = {by: source_of(kernel, gate.platform, by) for by in (UNCHANGED, *LEVELS)}

        def judge(by: float, case=case, sources=sources) -> Verdict:  # type: ignore[no-untyped-def]  # bound in a loop
            return gate.judge(
                case, sources[by], reference_source=sources[UNCHANGED], precision=precision_for(MARGIN)
            )  # fmt: skip

        number, until = 0, started + seconds * (index + 1) / len(KERNELS)
        while number < rounds if rounds else time.monotonic() < until:
            run_round(judge, LEVELS, kernel.operator, number, keep, MARGIN)
            number += 1


def parts_of(reuse: Path) -> list[Path]:
    """Files of one platform in a folder, which processes on several GPUs have measured; or the one that is named.

    Raises UsageError where there is none.
    """
    if is_there(reuse) and reuse.name.startswith("detection-"):
        return [reuse]
    parts = list(line_files(reuse, "detection-*-*"))
    if not parts:
        raise UsageError(
            f"{reuse} has no detection-PLATFORM-GPU.jsonl, which a run without --reuse writes to "
            "results/runs/gate_quality: name that folder, or one file"
        )
    return [part for part in parts if measured_on(part) == measured_on(parts[0])]


def measured_on(part: Path) -> str:
    """The platform in a file's name, such as detection-sm90-0123abcd.jsonl, so that a table needs no device."""
    return part.stem.split("-")[1]


def test_gpu_detection(
    request: pytest.FixtureRequest, klineage_session: KlineageSession,
    publish: Callable[[str, str, list[Judged]], None],
) -> None:  # fmt: skip
    """Kernels slowed by 1, 1.5, 2 and 3 % are found in 80, 95, 99 and 100 %; none of 100 unchanged ones is accused."""
    reuse, platform = request.config.getoption("--reuse"), klineage_session.settings.platform
    if reuse:
        try:
            parts = parts_of(Path(reuse))
        except UsageError as error:
            pytest.fail(f"klineage: {error}", pytrace=False)
        platform = measured_on(parts[0])
        judged = [row for part in parts for row in kept_rows(part, Judged, without=lambda row: False)]
        publish(f"detection-{platform}", report_of(judged, platform), judged)
        trials = all_trials(judged, MARGIN)
        longer = [one for by in (UNCHANGED, *LEVELS) for one in scaled(judged, by)]
        short = short_of(trials, LEVELS, TARGETS) + short_of(all_trials(longer, MARGIN), LEVELS, TARGETS)
        unchanged = count(chosen(trials, UNCHANGED)).trials
        assert not short
        assert unchanged >= LEAST_UNCHANGED, f"only {unchanged} trials of unchanged kernels"
        return
    if platform == "cpu":
        pytest.skip("measures on a GPU: pass --platform sm90")
    if klineage_session.gate_settings.stage == "compile":
        with Gate(platform, klineage_session.gate_settings) as gate:
            build_all(gate)
        return
    with Gate(platform, klineage_session.gate_settings) as gate:
        path = results_file(request.config, f"detection-{platform}-{gate.machine().device_uuid[-8:]}")

        def keep(one: Judged) -> None:
            append_line(path, one)

        measure(gate, request.config.getoption("--trials") or 0, BUDGET_S, keep)
