"""Whether intervals cover reruns: one kernel judged in separate runs, each with processes, oracle and references again.

pytest suites/gate_quality/test_reruns.py --platform cpu --runs 4 [-k gemm] [--publish]       here, on a quiet machine
pytest suites/gate_quality/test_reruns.py --platform sm90 --runs 8 --publish                  on a GPU
pytest suites/gate_quality/test_reruns.py -k recorded [--publish]      recorded runs of the main tier

An interval is of one run. What differs between runs (another GPU, another day, another search of the library) is not
in it. So the share of pairs of runs whose intervals overlap is counted, and the variance between runs is estimated:
that of the runs' estimates, less what the intervals account for. The wider interval has it added.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import msgspec
import pytest
from on_gpu import OPERATORS, ROOT, kept_rows, results_file, sources

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.operators import paper_case
from pytest_klineage.records import Interval, Timing
from pytest_klineage.report.reruns import between_runs, half_width, widened
from pytest_klineage.results.packed import line_files, read_packed
from pytest_klineage.results.runs import Record

RUNS = 4
RECORDED = ("43bd285", "bc78c78", "ebbb553", "d44c8bf", "0bab470", "260bc18")
"""Commits with a main tier on an H200, 2026-11-21 to 2026-11-23."""
TIER = "results/main_tier-sm90/records.jsonl"
AGAIN = "results/main_tier-sm90/again"
"""Runs with the policy `paired` alone, by date; no table is made of them."""
REFERENCES = {"gemm": "cublas", "conv2d": "cudnn", "fmha": "vendor", "topk": "flashinfer", "gdn": "flashinfer"}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run's timing of a kernel."""

    case: str
    kernel: str
    source_digest: str
    device: str
    device_uuid: str
    judged_at: str
    speedup: Interval
    reference_samples_ms: tuple[float, ...]
    candidate_samples_ms: tuple[float, ...]
    starts: tuple[int, ...]
    commit: str = ""
    """Where the record lies, or its file; empty for one that was measured for this table."""


def run_of(timing: Timing, **words: str) -> Run:
    return Run(
        speedup=timing.speedup, reference_samples_ms=timing.reference_samples_ms, starts=timing.starts,
        candidate_samples_ms=timing.candidate_samples_ms, **words,
    )  # fmt: skip


def overlap(one: Interval, other: Interval) -> bool:
    return one.low <= other.high and other.low <= one.high


def groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs of one kernel on one case, where there are two at least."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.case, run.source_digest), []).append(run)
    return {key: group for key, group in found.items() if len(group) > 1}


def overlapping(runs: Sequence[Run], between_sd: float = 0.0) -> tuple[int, int]:
    """Pairs of runs whose intervals overlap, and all pairs."""
    intervals = [widened(run.speedup, between_sd) for run in runs]
    pairs = list(combinations(intervals, 2))
    return sum(overlap(*pair) for pair in pairs), len(pairs)


def table_of(runs: Sequence[Run]) -> str:
    lines = [
        "| case | kernel | runs | GPUs or days | estimates | half-width, median | between runs (s.d.) | "
        "intervals overlap | widened by it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain, wide = [0, 0], [0, 0]
    for (case, digest), group in groups(runs).items():
        sd, widths = between_runs([run.speedup for run in group]), sorted(half_width(run.speedup) for run in group)
        counts, wider = overlapping(group), overlapping(group, sd)
        plain, wide = [sum(two) for two in zip(plain, counts, strict=True)], [
            sum(two) for two in zip(wider, wide, strict=True)
        ]  # fmt: skip
        positions = {run.device_uuid or run.judged_at[:10] for run in group}
        cells = (
            case, digest[:8], str(len(group)), str(len(positions)),
            ", ".join(f"{run.speedup.estimate:.4f}" for run in group), f"+-{100 * widths[len(widths) // 2]:.2f} %",
            f"{100 * sd:.2f} %", f"{counts[0]} of {counts[1]}", f"{wider[0]} of {wider[1]}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"| all | | | | | | | {plain[0]} of {plain[1]} | {wide[0]} of {wide[1]} |")
    return "\n".join(lines)


def report_of(runs: Sequence[Run], what: str, name: str) -> str:
    """The page."""
    days = sorted({run.judged_at[:10] for run in runs})
    return "\n".join([
        "# Do intervals cover reruns?\n",
        f"{what} {', '.join(sorted({run.device for run in runs}))}, {days[0]} to {days[-1]}. An interval is of one "
        "run; \"between runs\" is what the estimates vary by beyond it, and \"widened\" adds that to each interval.\n",
        table_of(runs),
        f"\nRaw samples: `{name}.jsonl`.",
    ])  # fmt: skip


def recorded_texts() -> Iterator[tuple[str, bytes]]:
    """Records of every run of the main tier on a GPU, with the commit or the file that has them."""
    for commit in RECORDED:
        shown = subprocess.run(["git", "show", f"{commit}:{TIER}"], cwd=ROOT, capture_output=True, check=False)
        if shown.returncode:
            pytest.skip(f"version control has no commit {commit} here: git fetch --unshallow brings it")
        yield commit, shown.stdout
    for path in line_files(ROOT / AGAIN):
        yield path.name, read_packed(path)


def recorded_runs() -> list[Run]:
    """Every judgement of these runs once."""
    found: dict[tuple[str, str], Run] = {}
    for where, text in recorded_texts():
        for line in text.splitlines():
            record = msgspec.json.decode(line, type=Record)
            verdict, machine = record.verdict, record.verdict.machine
            if verdict.timing is None or machine is None:
                continue
            found[verdict.case.id, verdict.judged_at] = run_of(
                verdict.timing, case=verdict.case.id, kernel=verdict.label,
                source_digest=verdict.source_digest, device=machine.device, device_uuid=machine.device_uuid,
                judged_at=verdict.judged_at, commit=where,
            )  # fmt: skip
    return list(found.values())


def test_recorded_reruns(publish: Callable[[str, str, list[Run]], None]) -> None:
    """From records alone. The gate changed between these runs, so this is a bound and no measurement of one gate."""
    runs = recorded_runs()
    what = (
        "The main tier as it was recorded, kernels that were judged more than once. Between these "
        "runs the gate changed as well: one start of 20 pairs in the first, more later."
    )
    publish("reruns-recorded-sm90", report_of(runs, what, "reruns-recorded-sm90"), runs)
    assert len(groups(runs)) >= 3
    for group in groups(runs).values():
        before, after = overlapping(group), overlapping(group, between_runs([run.speedup for run in group]))
        assert after[0] >= before[0]


@pytest.mark.parametrize("operator", OPERATORS)
def test_reruns(
    operator: str, klineage_session: KlineageSession, request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Run]], None],
) -> None:  # fmt: skip
    """Judges the expert's kernel in runs of their own. Which share overlaps is published, not asserted."""
    platform = klineage_session.platform
    name, kind = f"reruns-{platform}", "cpu" if platform == "cpu" else "gpu"
    reference = "torch" if kind == "cpu" else REFERENCES[operator]
    case = msgspec.structs.replace(paper_case(operator, kind, reference), at_least=1e-4)
    source = next(found for found in sources(operator, platform) if not found.label.endswith("by the library"))
    path = results_file(request.config, name)
    runs = kept_rows(path, Run, without=lambda run: run.case == case.id)
    for _ in range(request.config.getoption("--runs") or RUNS):
        with Gate(platform, klineage_session.gate_settings) as gate:
            verdict = gate.judge(case, source)
        assert verdict.timing is not None, f"{verdict.code}: {verdict.reasons[0].message}"
        assert verdict.machine is not None
        runs.append(
            run_of(
                verdict.timing, case=case.id, kernel=verdict.label, source_digest=verdict.source_digest,
                device=verdict.machine.device, device_uuid=verdict.machine.device_uuid, judged_at=verdict.judged_at,
            )
        )  # fmt: skip
    what = "The expert's kernel of each operator, judged in runs one after the other, with new processes in each."
    publish(name, report_of(runs, what, name), runs)
    own = [run for run in runs if run.case == case.id]
    assert len(own) == (request.config.getoption("--runs") or RUNS)
    assert all(run.speedup.low <= run.speedup.estimate <= run.speedup.high for run in own)
