"""The loop: what is judged, what counts as the best, how a run ends, and that a resumed or replayed one is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import StoreError, UsageError, WorkerDied
from pytest_klineage.lab.llm.faults import BackendFailed, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import optimize
from pytest_klineage.lab.optimizers.task import StepProgress, Task
from pytest_klineage.records import Event, Judged, Noted, Stopped, Verdict, cost_curve

Begin = Callable[..., Session]
Says = Callable[..., str]
PLAIN = CardMethod("generated-only")


def events(path: Path) -> list[Event]:
    return [line.event for line in read_trajectory(path)[0]]


def of_kind(path: Path, kind: type[Any]) -> list[Any]:
    return [event for event in events(path) if isinstance(event, kind)]


def at_low(verdict: Verdict, low: float) -> Verdict:
    """The verdict with an interval that begins there."""
    timing = verdict.timing
    if timing is None:
        return verdict
    wide = msgspec.structs.replace(timing.speedup, low=low)
    return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(timing, speedup=wide))


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class TestTheLoop:
    def test_the_best_scored_kernel_counts(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        replies = [says("wrong_value.mismatch"), says("slower.than_required 0.8"), says("slower.than_required 0.6")]
        outcome = optimize(task, PLAIN, begin(scripted(replies)), judge, max_steps=3)
        assert [seen.speedup for seen in outcome.observations] == [0.5, None, 0.8, 0.6]
        assert [seen.is_best for seen in outcome.observations] == [True, False, True, False]
        assert [seen.best_speedup for seen in outcome.observations] == [0.5, 0.5, 0.8, 0.8]
        assert [seen.step for seen in outcome.observations] == [0, 1, 2, 3]
        assert (outcome.stopped, outcome.best_speedup) == ("step_limit", 0.8)
        assert outcome.best is not None
        assert outcome.best.files[0].text == "// slower.than_required 0.8\n"
        assert outcome.best_verdict is not None
        assert outcome.best_verdict.timing is not None
        assert outcome.best_verdict.timing.candidate_samples_ms == (1.0, 1.0)
        assert outcome.spent_usd == pytest.approx(0.03)

    def test_a_wrapper_or_cheat_is_never_the_best(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        replies = [says("wrapper.library 9.0"), says("cheat.replay 99.0")]
        outcome = optimize(task, PLAIN, begin(scripted(replies)), judge, max_steps=2)
        assert outcome.best_speedup == 0.5
        assert [seen.speedup for seen in outcome.observations[1:]] == [None, None]

    def test_a_malformed_reply_is_a_step_without_a_kernel(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        outcome = optimize(
            task, PLAIN, begin(scripted(["no code here", says("accepted.faster 2")])), judge, max_steps=2
        )
        malformed = outcome.observations[1]
        assert malformed.verdict is None
        assert "send exactly one" in malformed.feedback
        assert [note.text for note in of_kind(path, Noted) if note.topic == "malformed"] == [
            "step 1: the reply has no code block; send exactly one, fenced by ```"
        ]
        assert judge.judged == ["// slower.than_required 0.5", "// accepted.faster 2"]

    def test_the_same_kernel_is_judged_once(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        replies = [says("accepted.faster 2"), says("accepted.faster 2"), says("slower.than_required 0.5")]
        outcome = optimize(task, PLAIN, begin(scripted(replies)), judge, max_steps=3)
        assert len(judge.judged) == 2
        assert [seen.repeats for seen in outcome.observations] == [None, None, 1, 0]
        assert "it was not judged again" in outcome.observations[2].feedback
        assert len(of_kind(path, Judged)) == 2

    def test_calls_costs_and_bests_are_recorded(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        replies = [says("wrong_value.mismatch"), says("accepted.faster 2")]
        optimize(task, PLAIN, begin(scripted(replies)), judge, max_steps=2)
        assert [(event.call, event.code.value) for event in of_kind(path, Judged)] == [
            (0, "slower.than_required"), (1, "wrong_value.mismatch"), (2, "accepted.faster"),
        ]  # fmt: skip
        costs, bests = zip(*cost_curve(events(path)), strict=True)
        assert costs == pytest.approx((0, 0.01, 0.02))
        assert bests == (0.5, 0.5, 2.0)

    def test_a_verdict_is_recorded_under_its_kernel(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, path: Path
    ) -> None:
        """Also where the judge has not said which kernel it is about."""

        def forgetful(case: Any, source: Any) -> Any:
            return msgspec.structs.replace(judge(case, source), source_digest="")

        optimize(task, PLAIN, begin(scripted(["no code"])), forgetful, max_steps=1)
        assert task.root is not None
        assert [event.source_digest for event in of_kind(path, Judged)] == [task.root.digest]

    def test_progress_is_reported_after_every_step(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        lines: list[StepProgress] = []
        optimize(
            task, PLAIN, begin(scripted([says("build_error.compile"), "?"])), judge, max_steps=2, on_step=lines.append
        )
        assert [step.line for step in lines] == [
            "step 0/2, $0.00 of $1.00, best 0.50x; this one 0.50x (slower.than_required)",
            "step 1/2, $0.01 of $1.00, best 0.50x; this one (build_error.compile)",
            "step 2/2, $0.02 of $1.00, best 0.50x; no kernel in the reply",
        ]

    def test_a_root_that_is_not_submitted_is_not_judged(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        backend = scripted([says("accepted.faster 2")])
        outcome = optimize(task, PLAIN, begin(backend), judge, max_steps=1, submit_root=False)
        assert [seen.step for seen in outcome.observations] == [1]
        assert "// slower.than_required 0.5" in backend.asked[0].turns[0].text


class TestTheEnd:
    def test_at_the_target(self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path) -> None:
        replies = [says("slower.than_required 0.92"), says("slower.than_required 0.96"), says("accepted.faster 2")]
        outcome = optimize(task, PLAIN, begin(scripted(replies)), judge, max_steps=9, target_speedup=0.9)
        # 0.92 has its lower end at 0.874, 0.96 at 0.912.
        assert (outcome.stopped, outcome.best_speedup) == ("target_reached", 0.96)
        assert of_kind(path, Stopped)[-1].reason == "target_reached"

    def test_at_the_target_by_a_sharper_interval_than_the_bests(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
    ) -> None:
        """The best one's interval begins at 0.5 only. A recorded run that went on goes on when it is replayed."""

        def blurred(case: Any, source: Any) -> Any:
            verdict = judge(case, source)
            wide = verdict.timing is not None and verdict.timing.speedup.estimate == 1
            return at_low(verdict, 0.5) if wide else verdict

        replies = [says("slower.than_required 1"), says("slower.than_required 0.98"), says("slower.than_required 0.7")]
        ended = optimize(task, PLAIN, begin(scripted(list(replies))), blurred, max_steps=9, target_speedup=0.9)
        assert (ended.stopped, ended.best_speedup, len(ended.observations)) == ("target_reached", 1, 3)
        for number, (target, stopped, steps) in enumerate([(0.9, "target_reached", 3), (None, "step_limit", 4)]):
            at = tmp_path / f"{number}.jsonl"
            optimize(task, PLAIN, begin(scripted(list(replies)), at=at), blurred, max_steps=3, target_speedup=target)
            again = begin(ReplayBackend(at), at=tmp_path / f"{number}-replay.jsonl")
            outcome = optimize(task, PLAIN, again, judge, max_steps=3, target_speedup=0.9)
            assert (outcome.stopped, len(outcome.observations)) == (stopped, steps)

    def test_with_the_budget(self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path) -> None:
        session = begin(scripted([says("accepted.faster 2")]), limit_usd=0.015)
        outcome = optimize(task, PLAIN, session, judge, max_steps=9)
        assert (outcome.stopped, outcome.best_speedup, len(outcome.observations)) == ("budget_exhausted", 2.0, 2)
        assert [event.reason for event in of_kind(path, Stopped)] == ["budget_exhausted"]

    def test_when_the_model_cannot_be_reached(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        failure = BackendFailed(Failure.OVERLOADED, "busy", billed=False)
        outcome = optimize(task, PLAIN, begin(scripted([says("accepted.faster 2"), failure])), judge, max_steps=9)
        assert (outcome.stopped, outcome.best_speedup) == ("backend_failed", 2.0)
        assert "resume the trajectory later" in outcome.message

    def test_when_the_method_is_done(self, task: Task, begin: Begin, judge: Any, scripted: Any) -> None:
        class Nothing:
            name = "nothing"

            def proposals(self, task: Task, models: Session) -> Any:
                yield from ()

        outcome = optimize(task, Nothing(), begin(scripted([])), judge, max_steps=9)
        assert (outcome.stopped, outcome.best_speedup) == ("finished", 0.5)

    def test_when_the_case_cannot_be_judged_here(self, task: Task, begin: Begin, judge: Any, scripted: Any) -> None:
        def skipping(case: Any, source: Any) -> Any:
            return judge(
                case, msgspec.structs.replace(source, files=(type(source.files[0])("a", "// skipped.platform"),))
            )

        outcome = optimize(task, PLAIN, begin(scripted([])), skipping, max_steps=9)
        assert (outcome.stopped, outcome.best, outcome.message) == ("not_judged", None, "pretended")

    def test_when_a_step_cannot_be_judged_here(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        """The kernel is not to blame: no model hears of it, and the run asks again when it is resumed."""
        backend = scripted([says("skipped.out_of_memory"), says("accepted.faster 2")])
        outcome = optimize(task, PLAIN, begin(backend), judge, max_steps=2)
        assert (outcome.stopped, len(backend.asked), len(of_kind(path, Judged))) == ("not_judged", 1, 1)

        def with_memory(case: Any, source: Any) -> Any:
            text = source.files[0].text.replace("skipped.out_of_memory", "accepted.faster 1.5")
            again = msgspec.structs.replace(source, files=(type(source.files[0])("kernel.cpp", text),))
            return msgspec.structs.replace(judge(case, again), source_digest=source.digest)

        outcome = optimize(task, PLAIN, begin(backend, resume=True), with_memory, max_steps=2)
        assert [seen.speedup for seen in outcome.observations] == [0.5, 1.5, 2.0]
        assert len(backend.asked) == 2

    @pytest.mark.parametrize(
        ("error", "reason"), [(KeyboardInterrupt(), "interrupted"), (WorkerDied("gone"), "harness_failed")]
    )
    def test_by_an_error_that_goes_on(
        self, error: BaseException, reason: str, task: Task, begin: Begin, judge: Any, scripted: Any, path: Path
    ) -> None:
        judge.before = raising(error)
        with pytest.raises(type(error)):
            optimize(task, PLAIN, begin(scripted([])), judge, max_steps=9)
        assert [event.reason for event in of_kind(path, Stopped)] == [reason]

    def test_an_interruption_and_a_fault_are_explained(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, path: Path, tmp_path: Path
    ) -> None:
        """Of a fault the first line is kept."""
        for error, at in ((KeyboardInterrupt(), path), (WorkerDied("gone\nits traceback"), tmp_path / "fault.jsonl")):
            judge.before = raising(error)
            with pytest.raises(type(error)):
                optimize(task, PLAIN, begin(scripted([]), at=at), judge, max_steps=9)
        assert of_kind(path, Stopped)[0].message
        assert of_kind(tmp_path / "fault.jsonl", Stopped)[0].message == "gone"

    def test_a_fault_outlives_a_full_disk(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error that ended the run is raised, not that its end could not be written."""

        def fail() -> None:
            monkeypatch.setattr(Session, "record", lambda self, event: raising(StoreError("no space left"))())
            raise WorkerDied("gone")

        judge.before = fail
        with pytest.raises(WorkerDied, match="gone"):
            optimize(task, PLAIN, begin(scripted([])), judge, max_steps=9)

    def test_without_a_right_kernel_no_target_is_reached(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says
    ) -> None:
        session = begin(scripted([says("wrong_value.mismatch")]))
        outcome = optimize(task, PLAIN, session, judge, max_steps=1, target_speedup=0.1, submit_root=False)
        assert (outcome.stopped, outcome.best) == ("step_limit", None)

    def test_no_steps_are_no_run(self, task: Task, begin: Begin, judge: Any, scripted: Any) -> None:
        with pytest.raises(UsageError, match="max_steps must be 1 or more"):
            optimize(task, PLAIN, begin(scripted([])), judge, max_steps=0)


class TestDoingItAgain:
    REPLIES = ("wrong_value.mismatch", "slower.than_required 0.8", "accepted.faster 2")

    @pytest.mark.parametrize("done", [1, 2])
    def test_a_resumed_run_pays_and_judges_only_what_is_new(
        self, done: int, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        replies = [says(line) for line in self.REPLIES]
        optimize(task, PLAIN, begin(scripted(replies[:done])), judge, max_steps=done)
        judged, backend = len(judge.judged), scripted(replies[done:])
        outcome = optimize(task, PLAIN, begin(backend, resume=True), judge, max_steps=3)
        assert len(judge.judged) - judged == 3 - done == len(backend.asked)
        assert [seen.speedup for seen in outcome.observations] == [0.5, None, 0.8, 2.0]
        assert outcome.spent_usd == pytest.approx(0.03)
        assert [event.call for event in of_kind(path, Judged)] == [0, 1, 2, 3]
        topics = [note.topic for note in of_kind(path, Noted)]
        assert topics.count("verdict") == 4
        assert topics.count("step") == 4

    def test_a_run_that_was_killed_before_its_verdict_was_written(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path
    ) -> None:
        optimize(task, PLAIN, begin(scripted([says("accepted.faster 2")])), judge, max_steps=1)
        lines = path.read_bytes().splitlines(keepends=True)
        last = max(position for position, line in enumerate(lines) if b'"Judged"' in line)
        path.write_bytes(b"".join(lines[:last]))
        outcome = optimize(task, PLAIN, begin(scripted([]), resume=True), judge, max_steps=1)
        assert (outcome.best_speedup, len(judge.judged)) == (2.0, 2)
        assert [event.speedup for event in of_kind(path, Judged)] == [0.5, 2.0]

    def test_a_replay_uses_recorded_verdicts_and_asks_the_gate(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
    ) -> None:
        optimize(task, PLAIN, begin(scripted([says(line) for line in self.REPLIES])), judge, max_steps=3)

        def today(case: Any, source: Any) -> Any:
            """Another machine: slower ones are faster there, and the wrong one crashes."""
            assert case == task.case
            text = source.files[0].text.replace("slower.than_required 0.", "accepted.faster 1.")
            text = text.replace("wrong_value.mismatch", "runtime_error.crash")
            return judge(case, msgspec.structs.replace(source, files=(type(source.files[0])("kernel.cpp", text),)))

        again = begin(ReplayBackend(path), at=tmp_path / "replay.jsonl")
        outcome = optimize(task, PLAIN, again, today, max_steps=3)
        assert [seen.speedup for seen in outcome.observations] == [0.5, None, 0.8, 2.0]
        assert [(item.step, item.verdict.code.value, item.agrees) for item in outcome.rejudged] == [
            (0, "accepted.faster", True), (1, "runtime_error.crash", False), (2, "accepted.faster", True),
            (3, "accepted.faster", True),
        ]  # fmt: skip
        before = len(judge.judged)
        begin(ReplayBackend(path), at=tmp_path / "quiet.jsonl")
        quiet = begin(ReplayBackend(path), at=tmp_path / "quieter.jsonl")
        assert optimize(task, PLAIN, quiet, today, max_steps=3, rejudge=False).best_speedup == 2.0
        assert len(judge.judged) == before

    def test_a_replay_that_was_cut_goes_on(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
    ) -> None:
        """No verdict is written twice."""
        optimize(task, PLAIN, begin(scripted([says("accepted.faster 2")])), judge, max_steps=1)
        at = tmp_path / "replay.jsonl"
        for resume in (False, True):
            optimize(task, PLAIN, begin(ReplayBackend(path), at=at, resume=resume), judge, max_steps=1)
        assert [event.speedup for event in of_kind(at, Judged)] == [0.5, 2.0]

    def test_a_replay_shows_the_recorded_prefix(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
    ) -> None:
        optimize(task, PLAIN, begin(scripted([says("accepted.faster 2")])), judge, max_steps=1)
        elsewhere = msgspec.structs.replace(task, instructions="contract, on another machine")
        again = begin(ReplayBackend(path), at=tmp_path / "replay.jsonl")
        assert optimize(elsewhere, PLAIN, again, judge, max_steps=1).best_speedup == 2.0

    def test_a_replay_of_something_else_fails_loudly(
        self, task: Task, begin: Begin, judge: Any, scripted: Any, says: Says, path: Path, tmp_path: Path
    ) -> None:
        optimize(task, PLAIN, begin(scripted([says("accepted.faster 2")])), judge, max_steps=1)
        other = msgspec.structs.replace(task, root=None)
        with pytest.raises(TrajectoryMismatch, match="turn 1 differs"):
            optimize(other, PLAIN, begin(ReplayBackend(path), at=tmp_path / "r.jsonl"), judge, max_steps=1)
        assert of_kind(tmp_path / "r.jsonl", Stopped)[-1].reason == "misuse"
