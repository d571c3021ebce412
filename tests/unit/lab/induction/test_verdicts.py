"""Verdicts beside a trajectory: written whole or not yet, found again, asked for again where they are blurred."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, HarnessError
from pytest_klineage.lab.induction import verdicts
from pytest_klineage.lab.induction.rederive import shortfall
from pytest_klineage.lab.induction.verdicts import Judge, ReplayJudging, VerdictFile, judged_in_peace
from pytest_klineage.records import (
    Code,
    Interval,
    Judged,
    KernelCase,
    KernelSource,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Verdict,
)

SOURCE = KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", "int x;"),), entry="run")


def verdict(
    case: KernelCase, code: Code = Code.ACCEPTED_SAME, estimate: float = 1.0, half_width: float = 0.01
) -> Verdict:
    speed = Interval(estimate, estimate * (1 - half_width), estimate * (1 + half_width))
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=1.0, speedup=speed, reference_samples_ms=(1.0,),
        candidate_samples_ms=(1.0,), warmup=3, flush_bytes=0, statistic="",
    )  # fmt: skip
    return Verdict(
        case=case, status=code.status, reasons=(Reason(code=code, message="so"),), source_digest=SOURCE.digest,
        timing=timing,
    )  # fmt: skip


def judged(position: str, code: Code = Code.ACCEPTED_SAME) -> Judged:
    return Judged(source_digest=SOURCE.digest, code=code, verdict=position)


def test_verdicts_are_found_where_they_were_put(tmp_path: Path, small_case: KernelCase) -> None:
    path = tmp_path / "walk.verdicts.jsonl"
    file = VerdictFile(path)
    assert file.append(verdict(small_case)) == "verdicts.jsonl:1"
    assert file.append(verdict(small_case, Code.MISMATCH)) == "verdicts.jsonl:2"
    with path.open("ab") as torn:
        torn.write(b'{"case": ')
    again = VerdictFile(path)
    assert again.read(judged("verdicts.jsonl:2", Code.MISMATCH)) == verdict(small_case, Code.MISMATCH)
    assert again.append(verdict(small_case)) == "verdicts.jsonl:3"
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("position", ["verdicts.jsonl:0", "verdicts.jsonl:2", "elsewhere", ""])
def test_a_place_that_is_not_there_is_named(tmp_path: Path, small_case: KernelCase, position: str) -> None:
    file = VerdictFile(tmp_path / "verdicts.jsonl")
    file.append(verdict(small_case))
    with pytest.raises(BadRecord, match="has no line"):
        file.read(judged(position))
    with pytest.raises(BadRecord, match="is not the verdict that the trajectory speaks of"):
        file.read(judged("verdicts.jsonl:1", Code.MISMATCH))


def test_infinite_figures_survive(tmp_path: Path, small_case: KernelCase) -> None:
    file = VerdictFile(tmp_path / "verdicts.jsonl")
    endless = msgspec.structs.replace(verdict(small_case), overhead_s=math.inf)
    file.append(endless)
    assert file.read(judged("verdicts.jsonl:1")).overhead_s > 1e308


def test_a_replay_has_no_verdict_that_was_not_recorded(tmp_path: Path, small_case: KernelCase) -> None:
    file = VerdictFile(tmp_path / "verdicts.jsonl")
    judging = ReplayJudging([judged(file.append(verdict(small_case)))], file, None)
    judging(small_case, SOURCE, None)
    with pytest.raises(HarnessError, match="no verdict on"):
        judging(small_case, SOURCE, None)


@pytest.mark.parametrize(
    ("answers", "chosen"),
    [
        ([(Code.ACCEPTED_SAME, 0.01)], 0),
        ([(Code.INCONCLUSIVE_BUSY, 0.02), (Code.ACCEPTED_SAME, 0.01)], 1),
        ([(Code.ACCEPTED_SAME, 0.3), (Code.INCONCLUSIVE_BUSY, 0.2), (Code.ACCEPTED_SAME, 0.4)], 0),
        ([(Code.INCONCLUSIVE_BUSY, 0.02), (Code.MISMATCH, 0.5)], 1),
    ],
)
def test_blurred_verdicts_are_asked_for_again(
    small_case: KernelCase, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[Code, float]], chosen: int
) -> None:
    monkeypatch.setattr(verdicts, "PAUSE_S", 0.0)
    given = [verdict(small_case, code, half_width=width) for code, width in answers]
    waiting = iter(given)

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        return next(waiting)

    asked: Judge = judge
    assert judged_in_peace(asked, small_case, SOURCE, None) is given[chosen]
    assert next(waiting, None) is None


@pytest.mark.parametrize(
    ("code", "patient", "chosen"),
    [
        (Code.INCONCLUSIVE_FEW, True, Code.ACCEPTED_SAME),
        (Code.INCONCLUSIVE_FEW, False, Code.INCONCLUSIVE_FEW),
        (Code.MISMATCH, True, Code.MISMATCH),
    ],
)
def test_few_pairs_are_judged_again_with_patience(
    small_case: KernelCase, monkeypatch: pytest.MonkeyPatch, code: Code, chosen: Code, *, patient: bool
) -> None:
    monkeypatch.setattr(verdicts, "PAUSE_S", 0.0)
    hasty: Judge = lambda case, source, against: verdict(small_case, code, half_width=0.01)  # noqa: E731
    slow: Judge = lambda case, source, against: verdict(small_case, half_width=0.01)  # noqa: E731
    assert judged_in_peace(hasty, small_case, SOURCE, None, slow if patient else None).code is chosen


@pytest.mark.parametrize(
    ("estimate", "half_width", "accepted"),
    [(1.0, 0.01, True), (0.985, 0.01, True), (0.97, 0.01, False), (0.9, 0.2, False), (1.0, 0.2, True)],
)
def test_the_speed_of_a_re_derived_kernel(
    small_case: KernelCase, estimate: float, half_width: float, *, accepted: bool
) -> None:
    assert (shortfall(verdict(small_case, estimate=estimate, half_width=half_width)) == "") is accepted
