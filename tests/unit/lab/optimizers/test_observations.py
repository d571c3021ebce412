"""What a method gets to know of its proposals, and what stands in the trajectory of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import WorkerDied
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.feedback import feedback_text
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import Proposals, optimize
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import Judged, KernelSource, SourceFile, Stopped, Surface

Begin = Callable[..., Session]
Says = Callable[..., str]


def kernel(line: str) -> KernelSource:
    """A kernel of which the pretended judge says `line`."""
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", f"// {line}\n"),), entry="run")


class Listening:
    """Proposes kernels in order, and remembers what came back. An empty line is a malformed proposal."""

    name = "listening"

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.root: Observation | None = None
        self.seen: list[Observation] = []

    def proposals(self, task: Task, models: Session) -> Proposals:
        self.root = task.submitted
        for line in self.lines:
            proposal = Proposal(source=kernel(line)) if line else Proposal(source=None, malformed="nothing")
            self.seen.append((yield proposal))


class TestWhatAMethodGetsToKnow:
    @pytest.fixture
    def heard(self, task: Task, begin: Begin, judge: Any, scripted: Any) -> Callable[..., Listening]:
        def run(*lines: str, **options: Any) -> Listening:
            method = Listening(*lines)
            optimize(task, method, begin(scripted([])), judge, max_steps=len(lines) + 1, **options)
            return method

        return run

    def test_the_root_comes_with_its_verdict(self, heard: Callable[..., Listening]) -> None:
        root = heard().root
        assert root is not None
        assert (root.step, root.speedup, root.is_best) == (0, 0.5, True)

    def test_a_root_that_is_not_judged_is_not_submitted(self, heard: Callable[..., Listening]) -> None:
        assert heard(submit_root=False).root is None

    def test_feedback_is_of_the_verdict(self, heard: Callable[..., Listening]) -> None:
        (seen,) = heard("wrong_value.mismatch").seen
        assert seen.verdict is not None
        assert seen.feedback == feedback_text(seen.verdict)

    def test_as_fast_as_the_best_is_not_better(self, heard: Callable[..., Listening]) -> None:
        (seen,) = heard("accepted.faster 0.5").seen
        assert (seen.speedup, seen.is_best, seen.best_speedup) == (0.5, False, 0.5)

    def test_no_kernel_leaves_the_best_as_it_was(self, heard: Callable[..., Listening]) -> None:
        (seen,) = heard("").seen
        assert (seen.speedup, seen.is_best, seen.best_speedup) == (None, False, 0.5)

    def test_a_repeat_has_the_earlier_verdict_and_feedback(self, heard: Callable[..., Listening]) -> None:
        first, better, again = heard("accepted.faster 2", "accepted.faster 3", "accepted.faster 2").seen
        assert (again.verdict, again.speedup, again.repeats) == (first.verdict, 2.0, first.step)
        assert (again.is_best, again.best_speedup) == (False, better.speedup)
        assert first.feedback in again.feedback
        assert f"step {first.step}" in again.feedback


class TestWithoutARightKernel:
    @pytest.mark.parametrize("target", [None, 0.9])
    def test_there_is_no_best(self, target: float | None, task: Task, begin: Begin, judge: Any, scripted: Any) -> None:
        wrong = msgspec.structs.replace(task, root=kernel("wrong_value.mismatch"))
        outcome = optimize(
            wrong, Listening("wrapper.library 9.0"), begin(scripted([])), judge, max_steps=2, target_speedup=target
        )
        assert (outcome.best, outcome.best_verdict, outcome.best_speedup) == (None, None, None)
        assert outcome.stopped == "finished"


def test_an_error_is_recorded_by_its_first_line(
    task: Task, begin: Begin, judge: Any, scripted: Any, path: Path
) -> None:
    def failing() -> None:
        raise WorkerDied("gone\nwith\ndetails")

    judge.before = failing
    with pytest.raises(WorkerDied):
        optimize(task, Listening(), begin(scripted([])), judge, max_steps=1)
    events = [line.event for line in read_trajectory(path)[0]]
    assert [event.message for event in events if isinstance(event, Stopped)] == ["gone"]


def test_the_end_is_recorded_with_its_message(task: Task, begin: Begin, judge: Any, scripted: Any, path: Path) -> None:
    outcome = optimize(task, Listening(), begin(scripted([])), judge, max_steps=1)
    assert outcome.message
    assert [line.event.message for line in read_trajectory(path)[0] if isinstance(line.event, Stopped)] == [
        outcome.message
    ]


@pytest.mark.parametrize(("target", "stopped"), [(0.95 * 4.0, "target_reached"), (0.96 * 4.0, "finished")])
def test_the_target_is_reached_by_the_lower_end(
    target: float, stopped: str, task: Task, begin: Begin, judge: Any, scripted: Any
) -> None:
    """The judge's intervals begin at 95 %."""
    method = Listening("accepted.faster 4")
    assert optimize(task, method, begin(scripted([])), judge, max_steps=2, target_speedup=target).stopped == stopped


def test_the_budgets_end_is_the_one_recorded(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
) -> None:
    session = begin(scripted([says("accepted.faster 2")]), limit_usd=0.015)
    outcome = optimize(task, CardMethod("generated-only"), session, judge, max_steps=9)
    events = [line.event for line in read_trajectory(path)[0]]
    assert [event.message for event in events if isinstance(event, Stopped)] == [outcome.message]


def test_a_judgement_is_recorded_with_its_time(task: Task, begin: Begin, judge: Any, scripted: Any, path: Path) -> None:
    optimize(task, Listening("accepted.faster 2"), begin(scripted([])), judge, max_steps=1)
    events = [line.event for line in read_trajectory(path)[0]]
    times = [event.verdict.split()[-1] for event in events if isinstance(event, Judged)]
    assert times == ["2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"]
