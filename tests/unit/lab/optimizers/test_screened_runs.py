"""A search that screens: who is judged in full, what is kept as best, what trajectories say, what replays see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import Judged, KernelCase, KernelSource, Verdict
from pytest_klineage.report.document import Mark
from pytest_klineage.report.steps import mark_of

Begin = Callable[..., Session]
Says = Callable[..., str]
PLAIN = CardMethod("generated-only")


class Screening:
    """Screens with the verdicts of the fake judge, a little off, and remembers against what."""

    def __init__(self, judge: Any, off: float = 1.0) -> None:
        self.judge, self.off = judge, off
        self.asked: list[tuple[str, float]] = []

    def __call__(self, case: KernelCase, source: KernelSource, best: float) -> Verdict:
        line = source.files[0].text.strip("/ \n")
        self.asked.append((line, best))
        verdict: Verdict = self.judge(case, source)
        self.judge.judged.pop()
        timing = verdict.timing
        if timing is None:
            return verdict
        seen = msgspec.structs.replace(timing.speedup, estimate=timing.speedup.estimate * self.off)
        return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(timing, speedup=seen), screened=best)


def run(task: Task, session: Session, judge: Any, screen: Any, steps: int) -> OptimizationResult:
    return optimize(task, PLAIN, session, judge, max_steps=steps, screen=screen)


def judged(path: Path) -> list[Judged]:
    return [line.event for line in read_trajectory(path)[0] if isinstance(line.event, Judged)]


def test_only_what_seems_better_is_judged_in_full(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
) -> None:
    """The root is, since there is no best one before it; a slower, a wrong and a wrapping kernel are not."""
    lines = ["slower.than_required 0.4", "wrong_value.mismatch", "slower.than_required 0.8", "wrapper.library 9.0"]
    screen = Screening(judge)
    outcome = run(task, begin(scripted([says(line) for line in lines])), judge, screen, len(lines))
    assert judge.judged == ["// slower.than_required 0.5", "// slower.than_required 0.8"]
    assert screen.asked == list(zip(lines, [0.5, 0.5, 0.5, 0.8], strict=True))
    assert outcome.best_speedup == 0.8
    assert outcome.best_verdict is not None
    assert outcome.best_verdict.screened is None
    assert [seen.speedup for seen in outcome.observations] == [0.5, 0.4, None, 0.8, None]


def test_a_kernel_as_fast_as_the_best_is_not_judged_in_full(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
) -> None:
    run(task, begin(scripted([says("accepted.faster 0.5")])), judge, Screening(judge), 1)
    assert judge.judged == ["// slower.than_required 0.5"]


def test_a_full_judgement_overrules_a_screening(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
) -> None:
    """A kernel that only seemed faster is not the best."""
    replies = [says("slower.than_required 0.45")]
    outcome = run(task, begin(scripted(replies)), judge, Screening(judge, off=1.2), 1)
    assert judge.judged == ["// slower.than_required 0.5", "// slower.than_required 0.45"]
    assert (outcome.best_speedup, outcome.observations[-1].speedup) == (0.5, 0.45)
    assert outcome.observations[-1].verdict is not None
    assert outcome.observations[-1].verdict.screened is None


def test_a_screened_speedup_is_not_kept_as_a_figure(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
) -> None:
    outcome = run(task, begin(scripted([says("slower.than_required 0.4")])), judge, Screening(judge), 1)
    root, step = judged(path)
    assert (root.speedup, root.screened) == (0.5, False)
    assert (step.speedup, step.best_speedup, step.screened) == (None, 0.5, True)
    assert mark_of(step.code, step.speedup, screened=step.screened) is Mark.SCREENED
    observed = outcome.observations[-1]
    assert observed.verdict is not None
    assert observed.verdict.screened == 0.5
    assert "0.5x" in observed.feedback


def test_a_replay_judges_screened_kernels_in_full(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
) -> None:
    replies = [says("slower.than_required 0.4"), says("slower.than_required 0.8")]
    first = run(task, begin(scripted(replies)), judge, Screening(judge), 2)
    judge.judged.clear()
    session = begin(ReplayBackend(path), at=tmp_path / "replay.jsonl")
    again = run(task, session, judge, pytest.fail, 2)
    assert [seen.feedback for seen in again.observations] == [seen.feedback for seen in first.observations]
    assert len(judge.judged) == 3
    assert all(item.agrees and item.verdict.screened is None for item in again.rejudged)


def test_a_resumed_run_screens_no_kernel_twice(
    task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
) -> None:
    def killed(step: Any) -> None:
        if step.observation.step == 1:
            raise KeyboardInterrupt

    model = scripted([says("slower.than_required 0.4"), says("slower.than_required 0.8")], resumable=True)
    with pytest.raises(KeyboardInterrupt):
        optimize(task, PLAIN, begin(model), judge, max_steps=2, screen=Screening(judge), on_step=killed)
    screen = Screening(judge)
    outcome = run(task, begin(model, resume=True), judge, screen, 2)
    assert screen.asked == [("slower.than_required 0.8", 0.5)]
    assert outcome.best_speedup == 0.8
