"""The detection suite: a loop that takes its share of the call, and trials that share no judgement."""

from __future__ import annotations

import ctypes
import math
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import test_detection as suite
import test_gpu_detection as on_gpus
from detection import (
    UNCHANGED,
    Judged,
    all_trials,
    chosen,
    count,
    judgements,
    run_round,
    scaled,
    short_of,
    slowed_on_cpu,
    table,
    trials_of,
)

from pytest_klineage.errors import UsageError
from pytest_klineage.records import (
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Verdict,
)

CASE = KernelCase(operator="gemm", shape={"M": 8}, dtype="fp32", reference="torch")
ENTRY = 'extern "C" int run(const klineage_call *call) {'
STEPS = """
#include <chrono>
struct klineage_call { long steps; double spent; };
ENTRY
    const auto begin = std::chrono::steady_clock::now();
    volatile long sum = 0;
    for (long step = 0; step < call->steps; step = step + 1) sum = sum + step;
    ((klineage_call *)call)->spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return 7;
}
"""
"""Work whose duration the caller chooses, and which says how long it took."""


def source(text: str = STEPS) -> KernelSource:
    return KernelSource(
        surface=Surface.CPP, files=(SourceFile("kernel.cpp", text.replace("ENTRY", ENTRY)),), entry="run"
    )


class Call(ctypes.Structure):
    _fields_ = (("steps", ctypes.c_long), ("spent", ctypes.c_double))


@pytest.mark.parametrize("by", [0.0, 0.5, 3.0])
def test_the_loop_is_a_share_of_its_own_call(tmp_path: Path, by: float) -> None:
    """Of short calls and of long ones; how fast the machine is does not matter."""
    (tmp_path / "kernel.cpp").write_text(slowed_on_cpu(source(), by).files[0].text)
    library = tmp_path / "kernel.so"
    command = ["g++", "-O2", "-shared", "-fPIC", "-std=c++17", str(tmp_path / "kernel.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    run, found = ctypes.CDLL(str(library)).run, []
    for steps in [200_000, 2_000_000] * 5:
        call, begin = Call(steps, 0.0), time.perf_counter()
        assert run(ctypes.byref(call)) == 7
        found.append((time.perf_counter() - begin) / call.spent)
    assert min(found) >= (1 + by) * (1 - 1e-6)
    # Some of ten calls were left alone by whatever else runs here.
    assert min(found) <= (1 + by) * 1.2


def test_a_loop_of_nothing_differs_in_a_number_only() -> None:
    base, head = (slowed_on_cpu(source(), by).files[0].text for by in (0.0, 0.05))
    assert base.replace("= 0.0 *", "= 0.05 *") == head
    with pytest.raises(ValueError, match="no entry"):
        slowed_on_cpu(source("int main() {}"), 0.1)


# --- trials -----------------------------------------------------------------------------------------------------------


def verdict_of(speed: float, code: Code = Code.ACCEPTED_SAME, seed: int = 0) -> Verdict:
    draw = random.Random(seed)
    candidate = tuple(math.exp(draw.gauss(0, 0.002)) / speed for _ in range(48))
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=1.0, speedup=Interval(speed, speed, speed), warmup=3,
        flush_bytes=0, reference_samples_ms=(1.0,) * 48, candidate_samples_ms=candidate, statistic="",
        starts=(0, 12, 24, 36), stopped="precise",
    )  # fmt: skip
    return Verdict(case=CASE, status=code.status, reasons=(Reason(code=code, message=""),), timing=timing)


def stream(*speeds: float, by: float = 0.05, operator: str = "gemm", number: int = 0) -> list[Judged]:
    """Judgements of one kernel and slowdown."""
    return [
        Judged(operator=operator, slower_by=by, number=number, verdict=verdict_of(speed, seed=seed))
        for seed, speed in enumerate(speeds)
    ]


def test_no_judgement_is_in_two_trials() -> None:
    judged = stream(0.9, 0.9, 1.0, 0.9, 1.0, 0.97, 0.9, 0.9, 0.9)
    found = trials_of(judged, 0.03)
    # The last has one judgement of the two that it needs.
    assert [one.outcome.value for one in found] == ["slower", "same", "unclear", "slower"]
    used = [verdict for one in found for verdict in (one.verdict, *one.more)]
    assert used == [one.verdict for one in judged[:-1]]
    assert judgements(found) == 8


def test_trials_are_of_one_kernel_and_slowdown() -> None:
    mixed = [
        one
        for group in zip(stream(0.9, 0.9), stream(0.9, 0.9, operator="topk"), stream(0.9, 0.9, by=0.1), strict=True)
        for one in group
    ]
    trials = all_trials([*mixed, *stream(1.0, 1.0, by=UNCHANGED)], 0.03)
    assert {key: [one.outcome.value for one in found] for key, found in trials.items()} == {
        ("gemm", 0.05): ["slower"], ("topk", 0.05): ["slower"], ("gemm", 0.1): ["slower"],
        ("gemm", UNCHANGED): ["same", "same"],
    }  # fmt: skip
    assert (count(chosen(trials, 0.05)).trials, count(chosen(trials, 0.05, "topk")).trials) == (2, 1)
    assert short_of(trials, (0.05, 0.1), (1.0, 1.0)) == []
    rows = table(trials, (0.05, 0.1), (0.5, 0.95), ("gemm", "topk"))
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == [
        "gemm", "**all**", "gemm", "topk", "**all**", "gemm", "**all**",
    ]  # fmt: skip
    assert rows[6].endswith("| 2 | 4 | 2 (100 %) | >= 50 % |")
    assert rows[3].endswith("| 2 | 2 | 0 (0 %) | 0 |")


def test_false_alarms_and_missed_slowdowns_fall_short() -> None:
    trials = all_trials([*stream(1.0, by=0.05), *stream(1.2, 1.2, by=UNCHANGED)], 0.03)
    assert short_of(trials, (0.05,), (0.5,)) == [
        "5 % slower: 0 of 1 found, 50 % asked", "1 false alarms in 1",
    ]  # fmt: skip


def test_longer_times_are_found_in_fresh_judgements() -> None:
    unchanged = stream(*[1.0] * 6, by=UNCHANGED)
    longer = chosen(all_trials(scaled(unchanged, 0.1), 0.03), 0.1)
    assert [one.outcome.value for one in longer] == ["slower"] * 3


def test_parts_of_all_gpus_or_one_file_are_put_together(tmp_path: Path) -> None:
    names = ("detection-sm90-0123abcd", "detection-sm90-4567cdef", "detection-sm90", "detection-cpu")
    paths = [tmp_path / f"{name}.jsonl" for name in names]
    for path in paths:
        path.write_bytes(b"")
    assert on_gpus.parts_of(tmp_path) == paths[:2]
    assert on_gpus.parts_of(paths[2]) == [paths[2]]
    assert {on_gpus.measured_on(path) for path in paths[:3]} == {"sm90"}


def test_a_folder_without_parts_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere", tmp_path / "no.jsonl"):
        with pytest.raises(UsageError, match=rf"{missing} has no detection-PLATFORM-GPU\.jsonl"):
            on_gpus.parts_of(missing)


def test_a_round_judges_until_each_trial_is_clear() -> None:
    kept: list[Judged] = []
    run_round(lambda by: verdict_of(1 / (1 + by)), (0.1,), "gemm", 4, kept.append, 0.03)
    assert [(one.slower_by, one.number) for one in kept] == [(UNCHANGED, 4), (0.1, 4), (0.1, 4)]


# --- the plan ---------------------------------------------------------------------------------------------------------

PLAN = [("gemm", 0.05), ("topk", UNCHANGED), ("gemm", 0.1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a judgement moves on by one."""
    now = [0.0]
    monkeypatch.setattr(suite.time, "monotonic", lambda: now[0])
    return now


def run(judged: list[Judged], clock: list[float], until: float, speeds: Iterator[Verdict] | None = None) -> None:
    def judge(operator: str, by: float) -> Verdict:
        clock[0] += 1
        return next(speeds) if speeds else verdict_of(1 / (1 + by), seed=len(judged))

    suite.measure(PLAN, judged, until, judge, judged.append)


def test_pieces_make_what_one_run_makes(clock: list[float]) -> None:
    whole: list[Judged] = []
    run(whole, clock, math.inf)
    # A loop of 5 % around a margin of 3 % is found in two judgements, as one of 10 %.
    assert [(one.number, one.operator, one.slower_by) for one in whole] == [
        (0, "gemm", 0.05), (0, "gemm", 0.05), (1, "topk", UNCHANGED), (2, "gemm", 0.1), (2, "gemm", 0.1),
    ]  # fmt: skip
    pieces: list[Judged] = []
    while suite.next_trial(pieces) < len(PLAN):
        before = len(pieces)
        run(pieces, clock, clock[0] + 0.5)
        assert len(pieces) == before + 1
    assert pieces == whole
    assert len(whole) == sum(judgements(found) for found in all_trials(whole, suite.MARGIN).values())


def test_a_busy_judgement_is_in_no_trial(clock: list[float]) -> None:
    busy = verdict_of(0.5, Code.INCONCLUSIVE_BUSY)
    judged: list[Judged] = []
    run(judged, clock, math.inf, iter([verdict_of(0.9), busy, verdict_of(0.9, seed=1), *[busy] * 3]))
    assert [one.number for one in judged] == [0, 0, 0, 1, 1, 1]
    assert suite.next_trial(judged) == 1
    assert count(all_trials(suite.in_peace(judged), 0.03)["gemm", 0.05]).slower == 1


def test_the_plan_has_the_counts_that_are_asked() -> None:
    plan = suite.planned()
    assert {by: sum(one[1] == by for one in plan) for by in (UNCHANGED, *suite.LEVELS)} == {
        UNCHANGED: 100, 0.03: 20, 0.05: 20, 0.1: 20, 0.2: 20,
    }  # fmt: skip
    assert suite.MEASURED.relative_to(suite.ROOT).parts[:2] == ("results", "runs")


def test_the_page_counts_what_is_in_it() -> None:
    judged = [*stream(1.0, 1.0, by=UNCHANGED), *stream(0.9, 0.9)]
    judged.append(msgspec.structs.replace(judged[0], verdict=verdict_of(1.0, Code.INCONCLUSIVE_BUSY)))
    page = suite.report_of(judged, all_trials(suite.in_peace(judged), 0.03))
    assert "3 trials of 180 planned" in page
    assert "False alarms: 0 slower, 0 faster in 2, after 1.00 judgements each. 1 of 5 judgements" in page
    assert "Sampling ended by precise 4 times." in page
