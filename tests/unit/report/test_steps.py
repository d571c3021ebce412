"""Steps of an optimization: costs, marks, running best, and what is behind each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from report_sample import HOSTILE, write_trajectory

from pytest_klineage.records import Code, Interval
from pytest_klineage.report.collect import collect
from pytest_klineage.report.document import Mark
from pytest_klineage.report.steps import Optimization, mark_of, optimization_of, running_best


@pytest.fixture
def one(tmp_path: Path) -> Optimization:
    path = write_trajectory(tmp_path / "one.jsonl", "klineage", "topk", (0.3, 2.4, None, 1.9, 8.7))
    return optimization_of(collect([path]).trajectories[0])


def test_every_submission_and_every_malformed_reply_is_a_step(one: Optimization) -> None:
    assert [step.number for step in one.steps] == [0, 1, 2, 3, 4, 5]
    assert [step.mark for step in one.steps] == [
        Mark.SCORED,
        Mark.SCORED,
        Mark.WRAPPER,
        *[Mark.SCORED] * 2,
        Mark.FAILED,
    ]
    assert [step.speedup for step in one.steps] == [0.3, 2.4, None, 1.9, 8.7, None]
    assert one.steps[-1].code is None


def test_costs_add_up_and_belong_to_the_step_after_the_call(one: Optimization) -> None:
    costs = [round(step.cost_usd, 2) for step in one.steps]
    assert costs == [0.0, 0.53, 1.19, 1.98, 2.9, 2.9]
    assert one.spent_usd == pytest.approx(2.9)


def test_the_running_best_only_rises(one: Optimization) -> None:
    assert [(step.number, best) for step, best in running_best(one.steps)] == [(0, 0.3), (1, 2.4), (4, 8.7)]
    assert one.best is not None
    assert one.best.number == 4


def test_the_best_step_has_the_highest_lower_bound(one: Optimization) -> None:
    lucky = one.steps[4]
    assert lucky.verdict is not None
    assert lucky.verdict.timing is not None
    wide = msgspec.structs.replace(lucky.verdict.timing, speedup=Interval(8.7, 1.1, 20.0))
    doubtful = replace(lucky, verdict=msgspec.structs.replace(lucky.verdict, timing=wide))
    found = replace(one, steps=(*one.steps[:4], doubtful)).best
    assert found is not None
    assert found.number == 1


def test_the_root_is_no_merit_of_the_method(one: Optimization) -> None:
    assert one.steps[0].is_root
    assert one.steps[0].speedup is not None
    assert not any(step.is_root for step in one.steps[1:])
    assert replace(one, steps=one.steps[:1]).best is None


def test_a_step_has_its_verdict_its_reply_and_its_notes(one: Optimization) -> None:
    step = one.steps[4]
    assert step.interval is not None
    assert step.interval.high == pytest.approx(8.7 * 1.05)
    assert step.reply.endswith(HOSTILE)
    assert step.notes == (("step", "step 4: card: cpp-pack-b"),)
    assert one.steps[2].interval is None


def test_the_head_of_the_file_says_what_it_is(one: Optimization) -> None:
    assert (one.method, one.platform, one.case_id) == ("klineage", "cpu", "topk-64x4096x512-fp32")
    assert (one.model, one.budget_usd, one.stopped) == ("a-model", 10.0, "budget")


@pytest.mark.parametrize(
    ("code", "speedup", "mark"),
    [
        (Code.ACCEPTED_FASTER, 2.0, Mark.SCORED), (Code.SLOWER_THAN_REQUIRED, 0.2, Mark.SCORED),
        (Code.WRAPPER_LIBRARY, 3.0, Mark.WRAPPER), (Code.WRAPPER_FALLBACK, None, Mark.WRAPPER),
        (Code.MISMATCH, None, Mark.FAILED), (Code.REPLAY, None, Mark.FAILED),
    ],
)  # fmt: skip
def test_marks(code: Code, speedup: float | None, mark: Mark) -> None:
    assert mark_of(code, speedup) is mark
