"""What the gate skips: what ends a run, what its method hears of, and what is taken up again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import CUT_SHORT, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task

Begin = Callable[..., Session]
Says = Callable[..., str]
PLAIN = CardMethod("generated-only")
WITH_LIBRARY = "PLAN: take CUTLASS\nFLAGS: --include=cutlass"
MISSING = "skipped.missing_dependency"


@pytest.fixture
def run(task: Task, begin: Begin, judge: Any, scripted: Any) -> Callable[..., OptimizationResult]:
    """A run of three steps in which the model gives these replies."""

    def run(*replies: str, of: Task = task, **options: Any) -> OptimizationResult:
        return optimize(of, PLAIN, begin(scripted(list(replies))), judge, max_steps=3, **options)

    return run


class TestWhatAProposalAloneNeeds:
    def test_its_method_hears_and_goes_on(self, run: Any, says: Says) -> None:
        replies = says(MISSING, WITH_LIBRARY), says("accepted.faster 2"), says("accepted.faster 3")
        outcome = run(*replies)
        assert [seen.speedup for seen in outcome.observations] == [0.5, None, 2.0, 3.0]
        assert MISSING in outcome.observations[1].feedback
        assert outcome.stopped == "step_limit"

    def test_a_replay_goes_the_same_way(
        self, run: Any, task: Task, judge: Any, begin: Begin, says: Says, path: Path, tmp_path: Path
    ) -> None:
        replies = says(MISSING, WITH_LIBRARY), says("accepted.faster 2"), says("accepted.faster 3")
        outcome = run(*replies)
        session = begin(ReplayBackend(path), at=tmp_path / "replay.jsonl")
        again = optimize(task, PLAIN, session, judge, max_steps=3)
        assert [seen.feedback for seen in again.observations] == [seen.feedback for seen in outcome.observations]
        assert again.stopped == "step_limit"

    def test_flags_that_the_root_has_as_well_end_it(self, run: Any, task: Task, says: Says) -> None:
        assert task.root is not None
        root = msgspec.structs.replace(task.root, flags=("--include=cutlass",))
        outcome = run(says(MISSING, WITH_LIBRARY), of=msgspec.structs.replace(task, root=root))
        assert (outcome.stopped, len(outcome.observations)) == ("not_judged", 1)

    def test_no_flags_end_it(self, run: Any, says: Says) -> None:
        assert run(says(MISSING)).stopped == "not_judged"

    def test_another_reason_ends_it(self, run: Any, says: Says) -> None:
        assert run(says("skipped.out_of_memory", WITH_LIBRARY)).stopped == "not_judged"

    def test_before_a_kernel_was_judged_it_ends(self, run: Any, says: Says) -> None:
        """A compiler may be missing."""
        assert run(says(MISSING, WITH_LIBRARY), submit_root=False).stopped == "not_judged"

    def test_a_malformed_reply_is_no_judgement(self, run: Any, says: Says) -> None:
        outcome = run("no kernel", says(MISSING, WITH_LIBRARY), submit_root=False)
        assert (outcome.stopped, len(outcome.observations)) == ("not_judged", 1)


def test_what_is_not_judged_is_taken_up_again(task: Task, judge: Any, scripted: Any, says: Says, path: Path) -> None:
    """Each turn asks the gate once and no model, and writes nothing while it is told the same."""
    backend = scripted([says("skipped.out_of_memory")])
    with Session.begin(path, backend, limit_usd=1.0, name="test") as session:
        assert optimize(task, PLAIN, session, judge, max_steps=3).stopped in CUT_SHORT
    before = path.read_bytes()
    for judged in (3, 4):
        with Session.resume(path, backend, note=False) as session:
            outcome = optimize(task, PLAIN, session, judge, max_steps=3)
        assert (outcome.stopped, len(judge.judged), path.read_bytes()) == ("not_judged", judged, before)
