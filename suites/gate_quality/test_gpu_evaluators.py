"""The same GEMM judged by the gate and by other evaluators: verdicts per minute, spread of the speedup.

pytest suites/gate_quality/test_gpu_evaluators.py --platform sm90              all; published after each
pytest suites/gate_quality/test_gpu_evaluators.py --platform sm90 -k gate      one; the others' rows are kept

flashinfer-bench judges itself where it is installed (pip install flashinfer-bench==0.1.2). KernelBench is no package:
its algorithm, and a later one of flashinfer-bench, are in evaluators/, written again from descriptions. Nothing is
built
while the time runs: the kernel that all of them judge is built before.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeVar

import msgspec
import pytest
from evaluators.gpu import alone, device_name, process_on
from evaluators.problem import Judged, Request
from on_gpu import gpu_platform, kept_rows, machine_of, results_file, sources

from pytest_klineage import KlineageSession
from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.stages.build import build_kernel
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelCase, KernelSource, Surface, Verdict

VERDICTS = 5
LEAST = 2
"""Verdicts that are waited for, whatever they take; below two there is no spread."""
TOOL_VERSION = "0.1.2"
"""Of flashinfer-bench: the one that was read, and is asked for where none is installed."""
T = TypeVar("T")


class Evaluator(NamedTuple):
    """Who judges."""

    title: str
    process: str
    """How it uses processes."""
    budget_s: float
    """After which no further verdict is asked for; a GPU is dear."""
    module: str = ""
    fresh: bool = False
    """Whether every verdict has a process of its own, as the tool's batch script gives it one."""
    distribution: str = ""
    """The installed tool that judges; empty where it is an algorithm of this folder."""


EVALUATORS = {
    "gate": Evaluator("the gate, policy `paired`", "kept; new workers for each verdict", 45.0),
    "kernelbench": Evaluator("KernelBench's algorithm", "a new one", 20.0, "evaluators.kernelbench", True),
    "flashinfer_bench": Evaluator("flashinfer-bench's algorithm", "kept", 12.0, "evaluators.flashinfer_bench"),
    "flashinfer_bench_tool": Evaluator(
        "flashinfer-bench", "kept, and its worker", 40.0, "evaluators.flashinfer_bench_tool",
        distribution="flashinfer-bench",
    ),
}  # fmt: skip


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one evaluator on one kernel; milliseconds, and seconds from question to answer."""

    evaluator: str
    """A key of EVALUATORS."""
    case: str
    kernel: str
    library: str
    """What torch calls for the reference; empty for torch's own choice."""
    clock: str
    first_s: float | None
    """The first verdict, which is cold, where a process is kept; it is in none of the other fields."""
    seconds: tuple[float, ...]
    speedups: tuple[float, ...]
    half_widths: tuple[float, ...] = ()
    """Of the intervals that the evaluator itself gives, relative; empty when it gives none."""
    refused: tuple[str, ...] = ()
    """Why the kernel was called wrong, for every verdict that did."""
    reference_samples_ms: tuple[tuple[float, ...], ...]
    candidate_samples_ms: tuple[tuple[float, ...], ...]
    machine: str
    judged_at: str
    version: str = ""
    """Of the tool that judged; empty for an algorithm of this folder, and for the gate."""

    @property
    def title(self) -> str:
        """The evaluator's name, with its version if it is an installed tool."""
        return f"{EVALUATORS[self.evaluator].title} {self.version}".strip()

    @property
    def per_minute(self) -> float:
        """Verdicts per minute."""
        return 60 * len(self.seconds) / sum(self.seconds)

    @property
    def half_range(self) -> float:
        """Half of what lies between the smallest and the largest speedup, over their median."""
        return (max(self.speedups) - min(self.speedups)) / 2 / median(self.speedups)


def in_time(judge: Callable[[], T], count: int, budget_s: float) -> tuple[list[T], list[float]]:
    """Verdicts and the seconds of each: `count`, or LEAST and as many more as the budget has room for."""
    verdicts: list[T] = []
    seconds: list[float] = []
    while len(verdicts) < count:
        if len(verdicts) >= LEAST and sum(seconds) + max(seconds) > budget_s:
            break
        started = time.monotonic()
        verdicts.append(judge())
        seconds.append(time.monotonic() - started)
    return verdicts, seconds


def report_of(rows: list[Evaluated], platform: str) -> str:
    """The page with its table, in the order of EVALUATORS."""
    last = rows[-1]
    lines = [
        f"# One kernel, {len(EVALUATORS)} evaluators on {platform}: {last.case}\n",
        f"{last.machine}, {last.judged_at}. {last.kernel}, built before, against cuBLAS by `torch.mm`. "
        f"{which_are_tools(rows)}\n",
        "| evaluator | process | clock | verdicts | seconds each, median (largest) | per minute | speedup: smallest "
        "| median | largest | half-range | own interval |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(EVALUATORS)
    lines += [line_of(row) for row in sorted(rows, key=lambda row: order.index(row.evaluator))]
    lines += [f"\n{row.title}: {'; '.join(row.refused)}" for row in rows if row.refused]
    notes = (
        "Where a process is kept, a first verdict is left out. The gate checks in every regime, with new inputs in "
        "every timed call, and names the kernels that were executed; the others check first and then time on the same "
        "inputs. flashinfer-bench itself gives one mean for each side and verdict, and no single calls."
    )
    return "\n".join([*lines, "", notes, "", f"Raw samples: `evaluators-{platform}.jsonl`."])


def which_are_tools(rows: list[Evaluated]) -> str:
    """Which rows are tools as they install, which are algorithms and why."""
    tools = [row.title for row in rows if row.version]
    install = f"`pip install flashinfer-bench=={TOOL_VERSION}`"
    itself = f"{tools[0]} is the tool, as pip installs it" if tools else f"flashinfer-bench ({install}) has not judged"
    return (
        f"{itself}. KernelBench is on no package index: its row is its algorithm (commit 423217d), rewritten from a "
        "description of its source (`suites/gate_quality/evaluators/`). So is flashinfer-bench's algorithm, of a later "
        "source (40e6ca7) than the release: it takes medians of what CUPTI saw on the device, where the release takes "
        "means between events, with the time that the host needs to launch. To the tool the candidate is a call that "
        "is bound to the output it is given, and the reference is `torch.mm`, which PyTorch dispatches and which "
        "allocates its output: "
        "what the host needs for that is in the tool's speedups, too."
    )


def line_of(row: Evaluated) -> str:
    """One row of the table."""
    evaluator = EVALUATORS[row.evaluator]
    spent = f"{median(row.seconds):.2f} ({max(row.seconds):.2f}) | {row.per_minute:.1f}"
    spread = " |  |  | "
    if row.speedups:
        figures = (min(row.speedups), median(row.speedups), max(row.speedups))
        spread = " | ".join([*(f"{figure:.4f}" for figure in figures), f"{100 * row.half_range:.2f} %"])
    own = f"+-{100 * median(row.half_widths):.2f} %" if row.half_widths else "none"
    head = f"{row.title} | {evaluator.process} | {row.clock} | {len(row.seconds)}"
    return f"| {head} | {spent} | {spread} | {own} |"


def by_gate(platform: str, settings: GateSettings, case: KernelCase, source: KernelSource, count: int) -> Evaluated:
    """Warm verdicts of the gate, with the settings of this run."""
    with Gate(platform, settings) as gate:
        started = time.monotonic()
        first = gate.judge(case, source)
        first_s = time.monotonic() - started
        verdicts, seconds = in_time(lambda: gate.judge(case, source), count, EVALUATORS["gate"].budget_s - first_s)
    return row_of_gate(case, source, first, first_s, verdicts, seconds)


def row_of_gate(
    case: KernelCase, source: KernelSource, first: Verdict, first_s: float, verdicts: list[Verdict],
    seconds: list[float],
) -> Evaluated:  # fmt: skip
    """The gate's row."""
    timings = [verdict.timing for verdict in verdicts if verdict.timing is not None]
    return Evaluated(
        evaluator="gate", case=case.id, kernel=source.label, library=first.reference.get("variant", ""),
        clock="CUDA events of both sides, in turns", first_s=first_s, seconds=tuple(seconds),
        speedups=tuple(timing.speedup.estimate for timing in timings),
        half_widths=tuple(timing.speedup.half_width for timing in timings),
        refused=tuple(f"{v.code}: {v.reasons[0].message}" for v in verdicts if not v.scored),
        reference_samples_ms=tuple(timing.reference_samples_ms for timing in timings),
        candidate_samples_ms=tuple(timing.candidate_samples_ms for timing in timings),
        machine=machine_of(first), judged_at=first.judged_at,
    )  # fmt: skip


def by_other(name: str, platform: str, settings: GateSettings, request: Request, label: str, count: int) -> Evaluated:
    """Verdicts of another evaluator: each in a process of its own, or all in one that is warm."""
    evaluator = EVALUATORS[name]

    def in_a_new_process() -> Judged:
        with process_on(platform, evaluator.module, settings) as process:
            return process.ask(request, Judged)

    first_s = None
    with alone(platform):
        if evaluator.fresh:
            judged, seconds = in_time(in_a_new_process, count, evaluator.budget_s)
        else:
            with process_on(platform, evaluator.module, settings) as process:
                started = time.monotonic()
                process.ask(request, Judged)
                first_s = time.monotonic() - started
                budget_s = evaluator.budget_s - first_s
                judged, seconds = in_time(lambda: process.ask(request, Judged), count, budget_s)
    return row_of_other(name, request, label, first_s, judged, seconds, machine=device_name(platform))


def row_of_other(
    name: str, request: Request, label: str, first_s: float | None, judged: list[Judged], seconds: list[float], *,
    machine: str,
) -> Evaluated:  # fmt: skip
    """Another evaluator's row."""
    right = [verdict for verdict in judged if verdict.correct]
    return Evaluated(
        evaluator=name, case=request.case.id, kernel=label, library=request.blas_library,
        clock=", ".join(dict.fromkeys(verdict.clock for verdict in right)), first_s=first_s, seconds=tuple(seconds),
        speedups=tuple(verdict.speedup for verdict in right),
        refused=tuple(verdict.why for verdict in judged if not verdict.correct),
        reference_samples_ms=tuple(verdict.reference_samples_ms for verdict in right),
        candidate_samples_ms=tuple(verdict.candidate_samples_ms for verdict in right),
        machine=machine, judged_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=version_of(EVALUATORS[name]),
    )  # fmt: skip


def request_for(
    platform: str, settings: GateSettings, case: KernelCase, source: KernelSource, library: str
) -> Request:  # fmt: skip
    """The kernel, built or taken from the cache; skips where nothing can build it."""
    try:
        built = build_kernel(source, platform, settings)
    except MissingDependency as missing:
        pytest.skip(str(missing))
    return Request(
        case=case, surface=source.surface.value, artifact=str(built.artifact), entry=source.entry, blas_library=library
    )


def version_of(evaluator: Evaluator) -> str:
    """The version of the installed tool that judges; empty where none does. Skips where it is not installed."""
    name = evaluator.distribution
    try:
        return importlib.metadata.version(name) if name else ""
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: pip install {name}=={TOOL_VERSION}")


def expert_of(platform: str) -> KernelSource:
    """The expert GEMM in CUDA; skips on a platform that has none."""
    found = next((source for source in sources("gemm", platform) if source.surface is Surface.CUDA), None)
    return found or pytest.skip(f"experts/gemm has no CUDA kernel for {platform}")


@pytest.mark.parametrize("name", EVALUATORS)
def test_gpu_evaluators(
    name: str,
    request: pytest.FixtureRequest,
    klineage_session: KlineageSession,
    publish: Callable[[str, str, list[Evaluated]], None],
) -> None:
    """Every evaluator calls the expert right, and gives a speedup for every verdict."""
    platform, settings = gpu_platform(klineage_session), klineage_session.gate_settings
    version_of(EVALUATORS[name])
    case = msgspec.structs.replace(paper_case("gemm", "gpu", "cublas"), at_least=1e-4)
    source = expert_of(platform)
    count = max(LEAST, request.config.getoption("--verdicts", VERDICTS))
    table = f"evaluators-{platform}"
    others = kept_rows(results_file(request.config, table), Evaluated, without=lambda row: row.evaluator == name)
    if name == "gate":
        row = by_gate(platform, settings, case, source, count)
    else:
        # The library that the gate found faster: all compare with the same call.
        library = next((other.library for other in others if other.evaluator == "gate"), "")
        asked = request_for(platform, settings, case, source, library)
        row = by_other(name, platform, settings, asked, source.label, count)
    publish(table, report_of([*others, row], platform), [*others, row])
    assert not row.refused
    assert len(row.speedups) == len(row.seconds) >= LEAST
    assert all(speedup > 0 for speedup in row.speedups)
