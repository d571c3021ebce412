"""Walks whose verdicts come later: the same trajectory and lineage as in one go; repetitions are requests apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import WaitsForVerdict
from pytest_klineage.lab.induction.lineage_store import induce
from pytest_klineage.lab.induction.verdicts import GateJudge, Judge, judged_in_peace
from pytest_klineage.lab.induction.walk import WalkOrigin
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import Interval, KernelCase, KernelSource, Verdict

Words = dict[str, Any]


def content(path: Path) -> bytes:
    """A trajectory without the times at which things happened."""
    return re.sub(rb'"(at|seconds)":("[^"]*"|[\d.e-]+)', rb'"\1":0', path.read_bytes())


def test_a_walk_that_waits_for_each_verdict_is_the_same_walk(
    tmp_path: Path, origin: WalkOrigin, begin: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    replies = [
        words["proposal"]("block_parallel", words["blocked"]),
        words["whole"](words["expert"]),
        words["proposal"]("cache_block", words["naive"]),
        words["whole"](words["blocked"].replace("32", "16")),
        words["done"],
        words["nothing_left"],
    ]
    asked: set[tuple[str, str]] = set()

    def later(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        key = (source.digest, against.digest if against is not None else "")
        if key not in asked:
            asked.add(key)
            raise WaitsForVerdict("folder", "not yet")
        return real_judge(case, source, against)

    with begin(words["scripted"](*replies)) as session:
        whole = induce(origin, session, real_judge, tmp_path / "whole")
    file = tmp_path / "walk.jsonl"
    one_go = content(file)
    file.unlink()
    (tmp_path / "walk.verdicts.jsonl").unlink()

    backend, turns = words["scripted"](*replies), 0
    stored = None
    with begin(backend) as session, pytest.raises(WaitsForVerdict):
        induce(origin, session, later, tmp_path / "turns")
    while stored is None and turns < 10:
        turns += 1
        with Session.resume(file, backend, note=False) as session:
            try:
                stored = induce(origin, session, later, tmp_path / "turns")
            except WaitsForVerdict:
                continue
    assert stored is not None
    assert turns == len(asked) == 5
    assert content(file) == one_go
    assert stored.lineage.digest == whole.lineage.digest


class Blurred:
    """A gate elsewhere: its first verdicts are wide, and every repetition has a number."""

    def __init__(self, verdict: Verdict, widths: list[float], repeat: int = 0) -> None:
        self.verdict, self.widths, self.repeat = verdict, widths, repeat
        self.asked: list[int] = []

    def again(self, repeat: int) -> Blurred:
        other = Blurred(self.verdict, self.widths, repeat)
        other.asked = self.asked
        return other

    def judge(self, case: KernelCase, source: KernelSource, *, reference_source: KernelSource | None = None) -> Verdict:
        self.asked.append(self.repeat)
        timing = self.verdict.timing
        assert timing is not None
        width = self.widths[self.repeat]
        interval = Interval(1.0, 1 - width, 1 + width)
        return msgspec.structs.replace(self.verdict, timing=msgspec.structs.replace(timing, speedup=interval))


def test_repetitions_elsewhere_are_asked_for_by_number(origin: WalkOrigin, real_judge: Judge) -> None:
    gate = Blurred(real_judge(origin.case, origin.source, None), [0.5, 0.4, 0.01])
    verdict = judged_in_peace(GateJudge(gate), origin.case, origin.source, None)
    assert gate.asked == [0, 1, 2]
    assert verdict.timing is not None
    assert verdict.timing.speedup.high == 1.01
