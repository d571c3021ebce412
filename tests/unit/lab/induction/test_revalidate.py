"""Lineages judged again: signs and their classes, what holds, what is reported, and what is asked twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.induction.lineage_store import induce
from pytest_klineage.lab.induction.revalidate import Sign, agrees, recheck, sign_of
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import WalkOrigin
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.records import Code, Interval, KernelCase, KernelSource, Reason, Verdict


@pytest.mark.parametrize(
    ("low", "high", "sign"),
    [
        (1.2, 1.3, Sign.FASTER),
        (1.01, 1.02, Sign.SAME),
        (0.5, 2.0, Sign.SAME),
        (0.975, 0.99, Sign.SAME),
        (0.7, 0.9, Sign.SLOWER),
    ],
)
def test_a_sign_is_an_interval_that_is_clear_of_one(low: float, high: float, sign: Sign) -> None:
    assert sign_of(Interval((low + high) / 2, low, high)) is sign


@pytest.mark.parametrize(
    ("recorded", "measured", "same"),
    [
        ((1.4, 1.6), (2.0, 2.2), True),  # another figure, the same sign
        ((1.04, 1.06), (1.0, 1.05), True),  # cannot be distinguished
        ((1.04, 1.06), (0.99, 1.015), True),  # within three percent of it
        ((1.4, 1.6), (0.98, 1.02), False),  # the effect is gone
        ((1.4, 1.6), (0.5, 0.6), False),
        ((0.98, 1.02), (1.5, 1.6), False),  # an effect where there was none
    ],
)
def test_signs_agree_unless_the_effects_are_clearly_apart(
    recorded: tuple[float, float], measured: tuple[float, float], same: bool
) -> None:
    one, other = (Interval((low + high) / 2, low, high) for low, high in (recorded, measured))
    assert agrees(one, other) is same


@pytest.fixture
def stored(
    tmp_path: Path, origin: WalkOrigin, begin: Callable[..., Any], real_judge: Judge, words: dict[str, Any]
) -> StoredLineage:
    """A lineage of three states with recorded effects of 2x and none."""

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        verdict = real_judge(case, source, against)
        if source.files[0].text == words["naive"]:
            return timed(verdict, Interval(0.5, 0.49, 0.51))
        return timed(verdict, Interval(1.0, 0.99, 1.01))

    script = [
        words["proposal"]("block_parallel", words["blocked"]), words["whole"](words["expert"]),
        words["proposal"]("cache_block", words["naive"]), words["whole"](words["blocked"]),
        words["done"], words["nothing_left"],
    ]  # fmt: skip
    with begin(words["scripted"](*script)) as session:
        return induce(origin, session, judge, tmp_path / "lineage")


def timed(verdict: Verdict, speedup: Interval) -> Verdict:
    assert verdict.timing is not None
    return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(verdict.timing, speedup=speedup))


def answering(real_judge: Judge, *speedups: Interval) -> tuple[Judge, list[tuple[str, str]]]:
    """A judge that measures these speedups in turn, and whom it was asked about."""
    asked: list[tuple[str, str]] = []
    waiting = list(speedups)

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        asked.append((source.label, against.label if against is not None else ""))
        return timed(real_judge(case, source, against), waiting.pop(0))

    return judge, asked


def test_a_state_is_judged_against_the_next_and_inverted(stored: StoredLineage, real_judge: Judge) -> None:
    judge, asked = answering(real_judge, Interval(0.4, 0.39, 0.41))
    found = recheck(stored, 0, judge)
    assert found.problem == found.note == ""
    assert asked == [("naive", "cache-block")]
    assert found.measured is not None
    assert found.measured.estimate == pytest.approx(2.5)
    judge, asked = answering(real_judge, Interval(0.4, 0.39, 0.41))
    assert recheck(stored, 2, judge).recorded is None
    assert asked == [("block-parallel", "")]


def test_a_lost_effect_is_measured_twice_and_named(stored: StoredLineage, real_judge: Judge) -> None:
    gone, back = Interval(1.0, 0.99, 1.01), Interval(0.5, 0.49, 0.51)
    judge, asked = answering(real_judge, gone, back)
    assert recheck(stored, 0, judge).problem == ""
    assert len(asked) == 2
    judge, _ = answering(real_judge, gone, gone)
    problem = recheck(stored, 0, judge).problem
    assert "the step cache_block (run) was faster and is same" in problem
    assert "recorded 2x" in problem


def test_a_state_that_is_wrong_here_is_reported(
    stored: StoredLineage, real_judge: Judge, words: dict[str, Any]
) -> None:
    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        text = source.files[0].text.replace("sum = 0.0", "sum = 1.0")
        return real_judge(case, words["kernel"](text), against)

    assert "no longer right here: wrong_value.mismatch" in recheck(stored, 1, judge).problem


def test_a_busy_machine_and_a_missing_compiler_decide_nothing(stored: StoredLineage, real_judge: Judge) -> None:
    def excused(code: Code) -> Judge:
        def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
            verdict = timed(real_judge(case, source, against), Interval(1.0, 0.99, 1.01))
            return msgspec.structs.replace(
                verdict, status=code.status, reasons=(Reason(code=code, message="as it was"),)
            )

        return judge

    busy = recheck(stored, 0, excused(Code.INCONCLUSIVE_BUSY))
    assert busy.problem == ""
    assert busy.note.endswith("; inconclusive.busy_machine, which decides nothing")
    missing = recheck(stored, 0, excused(Code.SKIPPED_DEPENDENCY))
    assert (missing.problem, missing.note) == ("", "not judged here: as it was")
