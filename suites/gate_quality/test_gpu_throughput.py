"""How many kernels a GPU screens in a minute: 60 of experts/, prebuilt, judged in one call through a folder.

suite="suites/gate_quality/test_gpu_throughput.py --platform sm90"
pytest $suite --klineage-executor batch:build/round         asks for 60 screenings; needs no GPU
pytest-klineage judge build/round --build-only              builds them; needs nvcc and no GPU
pytest-klineage judge build/round --share 2 --for 8m        where the GPU is, or the GPUs
pytest $suite --klineage-executor batch:build/round         once replies are back: makes the table

For other GPUs, or more of them, copy the folder without reply/, fault/ and machine/. Rows of another number of GPUs
are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import msgspec
import pytest
from on_gpu import at_once, gpu_platform, kept_rows, machine_of, results_file, span_s
from screened_round import WORKLOADS, the_round, workload_of

from pytest_klineage import KlineageSession
from pytest_klineage.errors import WaitsForVerdict
from pytest_klineage.records import Code, Verdict

LEAST_A_MINUTE = {1: 20.0, 2: 38.0}
"""Verdicts a minute that are wanted, by number of GPUs of one host."""
COUNTS = (1, 2)


class ScreenedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One screening of a round."""

    gpus: int
    """That judged this round."""
    workload: str
    kernel: str
    source_digest: str
    code: str
    speedup: float | None
    screened_against: float | None
    stopped: str
    timed_s: float
    build_s: float
    """0 for a kernel that was built ahead."""
    overhead_s: float
    judged_at: str
    """When it ended, to the second."""
    device_uuid: str
    machine: str

    @property
    def seconds(self) -> float:
        """From its begin to its end."""
        return self.timed_s + self.build_s + self.overhead_s


def row_of(verdict: Verdict, gpus: int) -> ScreenedRow:
    """What the table needs of a verdict."""
    timing, build = verdict.timing, verdict.build
    return ScreenedRow(
        gpus=gpus, workload=workload_of(verdict.case), kernel=verdict.label, source_digest=verdict.source_digest,
        code=verdict.code.value, speedup=timing.speedup.estimate if timing else None,
        screened_against=verdict.screened, stopped=timing.stopped if timing else "",
        timed_s=timing.seconds if timing else 0.0, build_s=build.seconds if build and not build.artifact else 0.0,
        overhead_s=verdict.overhead_s, judged_at=verdict.judged_at,
        device_uuid=verdict.machine.device_uuid if verdict.machine else "", machine=machine_of(verdict),
    )  # fmt: skip


def rows_of(verdicts: list[Verdict]) -> list[ScreenedRow]:
    """The rows of one round, in the order in which they ended."""
    devices = {verdict.machine.device_uuid for verdict in verdicts if verdict.machine is not None}
    return sorted((row_of(verdict, len(devices)) for verdict in verdicts), key=lambda row: row.judged_at)


def a_minute(rows: list[ScreenedRow]) -> float:
    """Verdicts a minute of one round. Where a case found no memory beside others' there is none."""
    return 60 * len(judged(rows)) / span_s(rows)


def judged(rows: list[ScreenedRow]) -> list[ScreenedRow]:
    """The rows with a verdict on the kernel."""
    return [row for row in rows if row.code != Code.SKIPPED_MEMORY]


def first_of_case(rows: list[ScreenedRow]) -> set[tuple[str, str]]:
    """Of each GPU and workload the first judgement: it also makes the case's problems. As (UUID, digest)."""
    first: dict[tuple[str, str], ScreenedRow] = {}
    for row in rows:
        first.setdefault((row.device_uuid, row.workload), row)
    return {(row.device_uuid, row.source_digest + row.workload) for row in first.values()}


def report_of(rows: list[ScreenedRow], platform: str) -> str:
    """The page with its tables; a number of GPUs that was not tried says so."""
    rounds = {count: [row for row in rows if row.gpus == count] for count in COUNTS}
    machines = "; ".join(dict.fromkeys(row.machine for row in rows))
    lines = [
        f"# Screenings a minute on {platform}\n",
        f"{machines}. One round: stages and experts of {len(WORKLOADS)} workloads at the paper's sizes, built ahead, "
        "each screened against the expert's recorded speedup with all checks, by one call of `pytest-klineage judge`. "
        "Seconds run from the begin of the first judgement to the end of the last (judged_at, to the second), the "
        "start of the gate's processes included.\n",
        "| GPUs of one host | at once on one | judged on | verdicts | seconds | verdicts a minute | wanted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [round_line(count, found) for count, found in rounds.items()]
    for count, found in rounds.items():
        if found:
            lines += ["", *workload_table(count, found)]
    return "\n".join([*lines, "", f"Raw figures: `throughput-{platform}.jsonl`."])


def round_line(count: int, rows: list[ScreenedRow]) -> str:
    """One round in a line."""
    wanted = f"{LEAST_A_MINUTE[count]:g}"
    if not rows:
        return f"| {count} | | not run | | | | {wanted} |"
    begun = min(row.judged_at for row in rows)
    found = len(judged(rows))
    return f"| {count} | {at_once(rows)} | {begun} | {found} | {span_s(rows):.0f} | {a_minute(rows):.1f} | {wanted} |"


def workload_table(count: int, rows: list[ScreenedRow]) -> list[str]:
    """Where a round's seconds went, by workload."""
    first = first_of_case(rows)
    lines = [
        f"{count} GPU{'s' * (count > 1)}: seconds of a verdict, medians; the first of a case on a GPU apart.\n",
        "| workload | verdicts | right | ended early | first | others | of these timed | beside the timing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        own = [row for row in judged(rows) if row.workload == workload]
        warm = [row for row in own if (row.device_uuid, row.source_digest + row.workload) not in first]
        cold = [row for row in own if row not in warm]
        right, early = (row.speedup is not None for row in own), (row.stopped == "excluded" for row in own)
        middles = [
            f"{median(seconds):.2f}" if seconds else ""
            for seconds in (
                [row.seconds for row in cold], [row.seconds for row in warm], [row.timed_s for row in warm],
                [row.overhead_s for row in warm],
            )
        ]  # fmt: skip
        lines.append(f"| {workload} | {len(own)} | {sum(right)} | {sum(early)} | {' | '.join(middles)} |")
    return lines


def test_gpu_throughput(
    klineage_session: KlineageSession, publish: Callable[[str, str, list[ScreenedRow]], None],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Every kernel is right and screened, none was built there, and there are verdicts enough a minute."""
    platform = gpu_platform(klineage_session)
    verdicts, waits = [], None
    with klineage_session.gate_with(klineage_session.gate_settings) as gate:
        for one in the_round(platform):
            try:
                verdict = gate.judge(one.case, one.source, platforms=one.platforms, screen_against=one.best)
                verdicts.append(verdict)
            except WaitsForVerdict as error:
                waits = error
    if waits is not None:
        raise waits
    rows = rows_of(verdicts)
    gpus = rows[0].gpus
    kept = kept_rows(
        results_file(request.config, f"throughput-{platform}"), ScreenedRow, without=lambda row: row.gpus == gpus
    )
    publish(f"throughput-{platform}", report_of([*kept, *rows], platform), sorted([*kept, *rows], key=_by_round))
    assert [row.kernel for row in judged(rows) if row.screened_against is None] == []
    assert [row.kernel for row in rows if row.build_s] == []
    assert a_minute(rows) >= LEAST_A_MINUTE[gpus]


def _by_round(row: ScreenedRow) -> tuple[int, str]:
    return row.gpus, row.judged_at
