"""Checks among timed pairs: which they are, where they come, who gets them, and that they are not timed."""

from __future__ import annotations

import socket
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_klineage.channel import Channel
from pytest_klineage.gate.settings import DEFENCES
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, Reason
from pytest_klineage.records.messages import OpenCase, TimedCall, TimeRequest
from pytest_klineage.worker import problems as made
from pytest_klineage.worker.comparison import View
from pytest_klineage.worker.oracle import Oracle, as_checked_among
from pytest_klineage.worker.problems import Plain, Problem, ProblemSet
from pytest_klineage.worker.redrawn import LEAST_AMONG, SLOW_S, Redrawn
from pytest_klineage.worker.rounds import RepetitionResult, WorkerProblem
from pytest_klineage.worker.turns import CHECK_EVERY, CHECKS_SHARE, FIRST_CHECK, Schedule

UNTAMED = {"spikes", "shifted", "large_magnitude", "plain", "graded"}
CASE = make_case("gemm", (6, 5, 4), "fp32", "torch", also_shapes=[(3, 5, 7)])
ROUND = ("reference", "candidate", "candidate", "reference")


def opened(case: KernelCase) -> ProblemSet:
    found = ProblemSet(OpenCase(case=case, secret="s", seeds=2, flush_bytes=0, threads=1))
    found.make_stock()
    return found


@pytest.fixture(scope="module")
def problems() -> ProblemSet:
    return opened(CASE)


def is_planned(problems: ProblemSet, one: Problem) -> bool:
    """Whether it is one of the checks that come first."""
    return any(one is check for check in problems.checks)


class TestWhich:
    def test_other_distributions_of_the_case_itself(self, problems: ProblemSet) -> None:
        assert {one.input_distribution for one in problems.among} == UNTAMED
        assert {one.case for one in problems.among if one.case != problems.case} == set()

    def test_none_is_one_that_was_checked_before(self, problems: ProblemSet) -> None:
        known = [one.inputs["a"] for one in problems.checks if isinstance(one, Problem) and one.case == problems.case]
        assert not any(torch.equal(one.inputs["a"], seen) for one in problems.among for seen in known)

    def test_every_kernel_gets_its_own(self, problems: ProblemSet) -> None:
        before = {one.input_distribution: one.inputs["a"] for one in problems.among}
        problems.make_stock()
        assert not any(torch.equal(one.inputs["a"], before[one.input_distribution]) for one in problems.among)

    def test_none_is_drawn_where_none_is_wanted(self, problems: ProblemSet) -> None:
        before = problems.among
        problems.make_stock(checks=False)
        assert problems.among is before

    def test_those_that_are_slow_to_make_stay_but_for_two(self) -> None:
        problems = opened(CASE)
        problems.seconds, problems.redrawn = 1.0, Redrawn(problems.redraw)
        for _kernel in range(2):
            problems.make_stock()
            assert {one.input_distribution for one in problems.among} == UNTAMED
            assert sum(is_planned(problems, one) for one in problems.among) == len(UNTAMED) - LEAST_AMONG
        first = dict(problems.redrawn.checks)
        problems.make_stock()
        assert problems.redrawn.checks == first

    def test_none_is_redrawn_where_one_takes_many_seconds(self) -> None:
        problems = opened(CASE)
        problems.seconds, problems.redrawn = 2 * SLOW_S, Redrawn(problems.redraw)
        problems.make_stock()
        assert problems.redrawn.checks == {}
        assert all(is_planned(problems, one) for one in problems.among)

    def test_a_few_large_ones_are_made(self) -> None:
        problems = opened(CASE)
        problems.checks = [problems.checks[0], *(made.Remade(problems.case, "spikes") for _ in range(5))]
        problems.seconds, problems.redrawn = 2 * SLOW_S, Redrawn(problems.redraw)
        problems.make_stock()
        assert [one.input_distribution for one in problems.among] == ["spikes"] * LEAST_AMONG

    def test_none_on_a_gpu(self, problems: ProblemSet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(problems, "device", "cuda")
        monkeypatch.setattr(problems, "among", [])
        problems.make_stock()
        assert problems.among == []


class TestAfterwards:
    def test_checks_come_with_other_inputs(self, problems: ProblemSet) -> None:
        for place, planned in enumerate(problems.checks):
            again = problems.check(place, again=True)
            assert isinstance(planned, Problem)
            assert (again.case, again.input_distribution) == (planned.case, planned.input_distribution)
            usual = planned.case == problems.case and planned.input_distribution not in UNTAMED
            assert torch.equal(again.inputs["a"], planned.inputs["a"]) == usual
            assert problems.layout_of(again) == problems.layout_of(planned)

    def test_a_large_one_is_drawn_then(self, problems: ProblemSet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(problems, "checks", [made.Remade(problems.case, "spikes")])
        monkeypatch.setattr(problems, "redrawn", Redrawn(problems.redraw))
        first, second = (problems.check(0, again=True) for _ in range(2))
        assert first.input_distribution == second.input_distribution == "spikes"
        assert not torch.equal(first.inputs["a"], second.inputs["a"])

    def test_on_a_gpu_they_are_the_same(self, problems: ProblemSet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(problems, "device", "cuda")
        assert all(problems.check(i, again=True) is one for i, one in enumerate(problems.checks))


class TestWhere:
    def positions(self, problems: ProblemSet, pairs: int) -> list[int]:
        schedule = Schedule()
        return [i for i in range(pairs) if schedule.check_if_due(problems.among) is not None]

    def test_the_first_comes_within_the_shortest_timing(self, problems: ProblemSet) -> None:
        firsts = {self.positions(problems, FIRST_CHECK)[0] for _ in range(300)}
        assert firsts == set(range(FIRST_CHECK))

    def test_one_pair_of_so_many(self, problems: ProblemSet) -> None:
        found = self.positions(problems, 400 * CHECK_EVERY)
        assert 340 < len(found) < 460
        assert len({later - earlier for earlier, later in pairwise(found)}) > CHECK_EVERY

    def test_each_as_often_as_any_other(self, problems: ProblemSet) -> None:
        schedule = Schedule()
        drawn = [schedule.check_if_due(problems.among) for _ in range(200 * CHECK_EVERY)]
        often = Counter(one.input_distribution for one in drawn if one is not None)
        assert set(often) == UNTAMED
        assert max(often.values()) - min(often.values()) <= 1

    def test_slow_ones_take_a_bounded_share(self, problems: ProblemSet) -> None:
        schedule, checks = Schedule(), 0
        for _ in range(2000):
            check = schedule.check_if_due(problems.among)
            checks += check is not None
            schedule.spend(100.0 if check else 1.0, on_check=check is not None)
        assert checks > LEAST_AMONG
        assert schedule.checks_s <= CHECKS_SHARE * schedule.pairs_s + 100

    def test_two_come_however_slow_they_are(self, problems: ProblemSet) -> None:
        schedule = Schedule()
        for _ in range(4 * CHECK_EVERY):
            if schedule.check_if_due(problems.among) is not None:
                schedule.spend(1e6, on_check=True)
        assert schedule.checks_drawn == LEAST_AMONG


class FakeHandle:
    """A side that is right, but where it is told otherwise."""

    def __init__(self, role: str, log: list[tuple[str, View]], wrong: bool = False) -> None:
        self.role, self.log, self.wrong = role, log, wrong

    def freeze(self, _frozen: bool) -> int:
        return 0

    def hold_still(self) -> None:
        pass

    def run(self, view: View, *_rest: Any) -> RepetitionResult:
        self.log.append((self.role, view))
        bad = self.wrong and view.problem.input_distribution in UNTAMED
        reasons = (Reason(code=Code.NON_FINITE, message="c has NaN"),) if bad else ()
        return RepetitionResult(sample=TimedCall(role=self.role, elapsed_ns=1, wall_ns=2), reasons=reasons)


def an_oracle(problems: ProblemSet, wrong: str = "") -> tuple[Oracle, list[tuple[str, View]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        oracle = Oracle(Channel(ours))
    log: list[tuple[str, View]] = []
    oracle.turns.problems = problems
    oracle.turns.handles = {role: FakeHandle(role, log, wrong == role) for role in set(ROUND)}  # type: ignore[misc]  # as far as is used
    return oracle, log


def request(rounds: int, *, checks: bool = True, flush: bool = True) -> TimeRequest:
    return TimeRequest(
        order=ROUND, reps=rounds, deadline_s=1.0, defences=DEFENCES, flush=flush, checks=checks
    )  # fmt: skip


class TestWho:
    def test_the_candidate_alone_gets_them_and_no_sample_is_kept(
        self, problems: ProblemSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Calls take no time here: what a check costs is the machine's.
        monkeypatch.setattr(Schedule, "spend", lambda *_given, **_named: None)
        oracle, log = an_oracle(problems)
        timed = oracle.time(request(200))
        checked = [role for role, view in log if view.problem.input_distribution in UNTAMED]
        assert set(checked) == {"candidate"}
        assert len(timed.samples) == 800 - 2 * len(checked)
        assert 8 <= len(checked) <= 32
        roles = Counter(sample.role for sample in timed.samples)
        assert roles["candidate"] == roles["reference"]

    def test_the_schedule_of_calls_is_the_same(self, problems: ProblemSet) -> None:
        oracle, log = an_oracle(problems)
        oracle.time(request(50))
        assert [role for role, _ in log] == list(ROUND * 50)

    @pytest.mark.parametrize(("checks", "flush"), [(False, True), (True, False)])
    def test_none_where_not_asked_or_warming_up(self, problems: ProblemSet, checks: bool, flush: bool) -> None:
        oracle, log = an_oracle(problems)
        assert len(oracle.time(request(50, checks=checks, flush=flush)).samples) == 200
        assert not any(view.problem.input_distribution in UNTAMED for _, view in log)

    def test_no_twin_is_lost(self, problems: ProblemSet) -> None:
        oracle, log = an_oracle(problems)
        oracle.time(request(400))
        own, other = ([view for role, view in log if role == side] for side in ("candidate", "reference"))
        twins = [i for i, view in enumerate(other) if view.problem in problems.twins]
        assert len(twins) > 20
        assert all(own[i].problem is other[i].problem for i in twins)
        assert all(own[i - 1].problem is problems.timed[0] for i in twins)

    def test_a_problem_of_the_stock_is_given_back(
        self, problems: ProblemSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        monkeypatch.setattr(problems, "novel_is_cheap", False)
        monkeypatch.setattr(problems, "stock", [problems.novel() for _ in range(3)])
        for _ in range(50):
            oracle, log = an_oracle(problems)
            oracle.time(request(40))
            met = [view.problem for role, view in log if role == "candidate"]
            assert [sum(one is new for one in met) for new in problems.stock] == [1, 1, 1]


class TestFindings:
    def test_a_check_that_fails_ends_the_timing(self, problems: ProblemSet) -> None:
        oracle, log = an_oracle(problems, wrong="candidate")
        timed = oracle.time(request(20))
        (reason,) = timed.reasons
        assert reason.code is Code.NON_FINITE
        assert "in a check among timed calls: c has NaN" in reason.message
        assert log[-1][0] == "candidate"
        assert isinstance(log[-1][1], Plain)

    def test_a_reference_is_never_checked(self, problems: ProblemSet) -> None:
        oracle, _log = an_oracle(problems, wrong="reference")
        assert oracle.time(request(50)).reasons == ()

    def test_a_wrong_reference_is_our_fault(self, problems: ProblemSet) -> None:
        oracle, _log = an_oracle(problems)
        bad = RepetitionResult(
            sample=TimedCall(role="reference", elapsed_ns=1, wall_ns=2),
            reasons=(Reason(code=Code.MISMATCH, message=""),),
        )
        oracle.turns.handles["reference"] = SimpleNamespace(
            freeze=lambda _: 0, hold_still=lambda: None, run=lambda *_: bad
        )  # type: ignore[assignment]  # as far as is used
        with pytest.raises(WorkerProblem):
            oracle.time(request(1))

    def test_other_findings_stay(self) -> None:
        late = Reason(code=Code.LATE_WORK, message="late")
        assert as_checked_among(late) is late
