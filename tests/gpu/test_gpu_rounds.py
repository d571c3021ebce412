"""Without a GPU: the round of kernels that throughput is measured with, its tables, and that of a call that is cut."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import on_gpu
import pytest
import recorded_pairs
import screened_round
import test_cut as cut
import test_gpu_shared as shared
import test_gpu_throughput as throughput
import test_screening_stages as stages

from pytest_klineage.gate.context import Progress
from pytest_klineage.gate.timing.restarts import RestartPlan
from pytest_klineage.surfaces import surface_backend


def screened(workload: str, second: int, *, gpus: int = 1, device: str = "GPU-a") -> throughput.ScreenedRow:
    """A screening that ended in this second of a minute, after 2 s."""
    return throughput.ScreenedRow(
        gpus=gpus, workload=workload, kernel=f"stage {second}", source_digest=f"{second:064x}", code="slower.slower",
        speedup=0.5, screened_against=1.1, stopped="excluded", timed_s=0.5, build_s=0.0, overhead_s=1.5,
        judged_at=f"2026-11-24T12:00:{second:02d}+00:00", device_uuid=device, machine="NVIDIA H200, torch 2.11",
    )  # fmt: skip


def test_a_round_has_sixty_kernels_of_six_workloads() -> None:
    kernels = list(screened_round.the_round("sm90"))
    assert Counter(one.workload for one in kernels) == dict.fromkeys(screened_round.WORKLOADS, screened_round.EACH)
    assert len({(one.case.id, one.source.digest) for one in kernels}) == len(kernels) == 60
    assert {one.workload for one in kernels if one.best > 1} == set(screened_round.WORKLOADS)
    assert all("sm90" in one.platforms for one in kernels)
    assert all(surface_backend(one.source.surface.value).recipe(one.source, platform="sm90") for one in kernels)


@pytest.mark.parametrize(("length", "count"), [(10, 10), (14, 10), (18, 10)])
def test_kernels_are_spread_over_their_chain(length: int, count: int) -> None:
    chain = [(None, (str(number),)) for number in range(length)]
    chosen = [int(platforms[0]) for _, platforms in screened_round.spread(chain, count)]  # type: ignore[arg-type]  # only their order counts
    assert (chosen[0], chosen[-1]) == (0, length - 1)
    assert len(set(chosen)) == count


def test_verdicts_a_minute_of_one_gpu() -> None:
    """Ten verdicts from second 0, where the first begins, to second 20."""
    rows = [screened("gemm", second) for second in range(2, 22, 2)]
    assert throughput.span_s(rows) == 20.0
    table = throughput.report_of(rows, "sm90")
    assert "| 1 | 1 | 2026-11-24T12:00:02+00:00 | 10 | 20 | 30.0 | 20 |" in table
    assert "| 2 | | not run | | | | 38 |" in table
    assert "| gemm | 10 | 10 | 10 | 2.00 | 2.00 | 0.50 | 1.50 |" in table


def test_a_case_that_found_no_memory_is_no_verdict() -> None:
    rows = [screened("gemm", second) for second in range(2, 22, 2)]
    without = [msgspec.structs.replace(rows[0], code="skipped.out_of_memory", speedup=None), *rows[1:]]
    assert throughput.a_minute(without) == 27.0


@pytest.mark.parametrize(("seconds", "expected"), [((2, 4, 6), 1), ((2, 3, 6), 1), ((4, 4, 4), 3)])
def test_judgements_of_a_gpu_at_once(seconds: tuple[int, ...], expected: int) -> None:
    """Ends are known to a second: those that lie a second apart may have come one after the other."""
    own = [screened("gemm", second) for second in seconds]
    assert on_gpu.at_once([*own, screened("gemm", 4, device="GPU-b")]) == expected


def test_the_table_of_judges_that_share_a_gpu() -> None:
    trials = [
        shared.SharedTrial(
            operator=operator, code="accepted.same", seconds=3.0, judged_at=f"2026-11-29T12:00:0{second}+00:00",
            device_uuid="GPU-a", machine="NVIDIA H200", reference_samples_ms=(1.0, 1.1) * 6,
            candidate_samples_ms=(faster, faster) * 6, starts=(0, 6),
        )
        for operator, second, faster in (("gemm", 4, 1.05), ("topk", 4, 0.5))
    ]  # fmt: skip
    table = shared.report_of(trials, "sm90")
    assert "up to 2 judgements of a GPU at once" in table
    assert "2 verdicts, 0 of them inconclusive, in 3 s, 40.0 a minute" in table
    assert "| gemm | 1 | 1 (100.0 %) | 0 |" in table
    assert "| topk | 1 | 0 (0.0 %) | 0 |" in table


def test_the_first_of_a_case_on_each_gpu_is_apart() -> None:
    rows = [screened("gemm", second, gpus=2, device=f"GPU-{second % 2}") for second in range(2, 12)]
    slow = [msgspec.structs.replace(row, overhead_s=8.0) for row in rows[:2]]
    table = throughput.report_of([*slow, *rows[2:]], "sm90")
    assert "| 1 | | not run | | | | 20 |" in table
    assert "| gemm | 10 | 10 | 10 | 8.50 | 2.00 | 0.50 | 1.50 |" in table


def test_the_table_of_a_cut_says_what_was_lost() -> None:
    found = cut.Cut(
        requests=30, cut_after_s=21.5, before=("a", "b"), under_way=1, changed=0, judged_then=27, done=29,
        attempts=(1, 2), seconds=80.0, machine="NVIDIA H200", ended_at="2026-11-24T12:00:00+00:00",
    )  # fmt: skip
    assert "| 21.5 s | 2 | 1 | 27 | 29 | 0 | 1 |" in cut.report_of(found, "sm90")


def test_seconds_of_a_screening_are_put_down_to_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 3.0, 3.5, 4.0, 9.0])
    monkeypatch.setattr(stages.time, "monotonic", lambda: next(moments))
    clock = stages.Clock()
    clock.begin()
    for stage, message in (("build", "k"), ("start", "starting the reference"), ("time", "1.0x"), ("time", "naming")):
        clock.note(Progress(stage=stage, message=message))
    assert clock.seconds() == {"before": 1.0, "build": 2.0, "start: reference": 0.5, "time": 0.5, "attribution": 5.0}


@pytest.mark.parametrize("platform", ["cpu", "sm90"])
def test_the_table_of_stages_has_a_row_for_each_workload(platform: str) -> None:
    rows = [
        stages.StageSeconds(
            workload=one.workload, kernel="k", cold=cold, code="slower.slower", seconds={"build": 0.25, "time": 1.0},
            machine="NVIDIA H200", judged_at="now",
        )
        for one, cold in stages.taken_of(platform)
    ]  # fmt: skip
    table = stages.report_of(rows, platform)
    assert all(f"| {name} | 0.25 | 1.00 | 1.25 | 1.25 |" in table for name in screened_round.workloads(platform))
    assert f"All {sum(not row.cold for row in rows)} warm ones" in table
    assert ": 48.0 a minute" in table


def test_replays_hand_recorded_pairs_to_the_gates_own_policy() -> None:
    """Without a GPU: three starts of six equal pairs are precise, whatever is drawn."""
    plan = RestartPlan(starts=3, pairs=6, most=8)
    start = [(2.0, 1.0)] * 6
    found = recorded_pairs.under(recorded_pairs.Design(plan=plan, precision=0.01), [start], random.Random(1))
    assert (found.stopped, len(found.samples.starts), len(found.samples.candidate)) == ("precise", 3, 18)
    assert found.interval.estimate == pytest.approx(2.0)
