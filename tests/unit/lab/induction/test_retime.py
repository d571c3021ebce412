"""Timing a step again: who is judged against whom, what a disturbed timing does, and when a re-derived kernel wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.lift_groups import sites_of, timed_sites
from pytest_klineage.lab.induction.lineage_store import induce
from pytest_klineage.lab.induction.retime import Disturbed, rederived_source, retime
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import WalkOrigin
from pytest_klineage.lab.library.lineages import StoredLineage, all_problems_of
from pytest_klineage.records import Code, Interval, KernelCase, KernelSource, Reason, Verdict
from pytest_klineage.results.retimed import keep_retimed

EQUAL = Interval(1.0, 0.99, 1.01)


@pytest.fixture
def stored(
    tmp_path: Path, origin: WalkOrigin, begin: Callable[..., Any], real_judge: Judge, words: dict[str, Any]
) -> StoredLineage:
    """A lineage of one step whose re-derived kernel differs in its text, and seemed 6 % faster at best."""
    rederived = words["expert"] + "// another text\n"

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        verdict = real_judge(case, source, against)
        return timed(verdict, Interval(1.04, 1.02, 1.06) if source.files[0].text == rederived else EQUAL)

    script = [
        words["proposal"]("block_parallel", words["naive"]), words["whole"](rederived),
        words["done"], words["nothing_left"],
    ]  # fmt: skip
    with begin(words["scripted"](*script)) as session:
        return induce(origin, session, judge, tmp_path / "lineage")


def timed(verdict: Verdict, speedup: Interval) -> Verdict:
    """The verdict as of a quiet machine, with this speedup."""
    assert verdict.timing is not None
    code = Code.ACCEPTED_FASTER
    return msgspec.structs.replace(
        verdict, timing=msgspec.structs.replace(verdict.timing, speedup=speedup), status=code.status,
        reasons=(Reason(code=code, message="as asked"),),
    )  # fmt: skip


def answering(real_judge: Judge, *speedups: Interval) -> tuple[Judge, list[tuple[str, str]]]:
    """A judge that measures these speedups in turn, and the digests of whom it was asked about."""
    asked: list[tuple[str, str]] = []
    waiting = list(speedups)

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        asked.append((source.digest, against.digest if against is not None else ""))
        return timed(real_judge(case, source, against), waiting.pop(0))

    return judge, asked


def test_a_better_rederived_kernel_wins(stored: StoredLineage, real_judge: Judge) -> None:
    judge, asked = answering(
        real_judge, Interval(0.5, 0.49, 0.51), Interval(1.1, 1.06, 1.14), Interval(0.4, 0.39, 0.41)
    )
    found = retime(stored, 0, judge)
    (before, after), made = (source.digest for source in stored.sources), rederived_source(stored, 0)
    assert made is not None
    assert asked == [(before, after), (made.digest, after), (before, made.digest)]
    assert found.effect is not None
    assert found.effect.estimate == pytest.approx(2.5)
    keep_retimed(stored.directory, found)
    assert all_problems_of(stored) == []
    (site,), (walked,) = timed_sites([stored]), sites_of([stored])
    assert (site.after.digest, walked.after.digest) == (made.digest, after)
    assert site.transition.effect == found.effect


def test_five_percent_alone_are_not_better(stored: StoredLineage, real_judge: Judge) -> None:
    judge, asked = answering(real_judge, Interval(0.5, 0.49, 0.51), Interval(1.08, 1.04, 1.14))
    found = retime(stored, 0, judge)
    assert len(asked) == 2
    assert found.better is None
    assert found.effect is not None
    assert (found.effect.low, found.effect.high) == (pytest.approx(1 / 0.51), pytest.approx(1 / 0.49))
    keep_retimed(stored.directory, found)
    assert timed_sites([stored])[0].after.digest == stored.sources[1].digest


def test_what_was_clearly_equal_is_not_asked(stored: StoredLineage, real_judge: Judge) -> None:
    (step,) = stored.lineage.transitions
    assert step.forward_verdict is not None
    equal = msgspec.structs.replace(step, forward_verdict=timed(step.forward_verdict, EQUAL))
    lineage = msgspec.structs.replace(stored.lineage, transitions=(equal,))
    judge, asked = answering(real_judge, EQUAL)
    assert retime(msgspec.structs.replace(stored, lineage=lineage), 0, judge).rederived is None
    assert len(asked) == 1


@pytest.mark.parametrize("code", [Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE])
def test_a_disturbed_timing_gives_nothing(code: Code, stored: StoredLineage, real_judge: Judge) -> None:
    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        verdict = real_judge(case, source, against)
        return msgspec.structs.replace(verdict, status=code.status, reasons=(Reason(code=code, message="others ran"),))

    with pytest.raises(Disturbed, match="others ran"):
        retime(stored, 0, judge)


def test_a_wrong_kernel_is_no_effect(stored: StoredLineage, real_judge: Judge) -> None:
    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        verdict, code = real_judge(case, source, against), Code.MISMATCH
        return msgspec.structs.replace(verdict, status=code.status, reasons=(Reason(code=code, message="it differs"),))

    with pytest.raises(UsageError, match="it differs"):
        retime(stored, 0, judge)
