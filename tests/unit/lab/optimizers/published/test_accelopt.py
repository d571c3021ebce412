"""A whole run: who is asked what and how often, what is remembered, repairs, budgets, resuming, replaying."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.accelopt.method import AccelOpt
from pytest_klineage.lab.optimizers.accelopt.policy import AccelOptSettings
from pytest_klineage.lab.optimizers.session import OptimizationResult
from pytest_klineage.records import Code, Event, Noted, Surface

ROLES = {
    "You are an expert in making": "planner", "You are an expert in writing fast": "executor",
    "You help people": "summarizer",
}  # fmt: skip


def role_of(asked: Conversation) -> str:
    return next(role for start, role in ROLES.items() if asked.prefix.system.startswith(start))


def block(text: str) -> str:
    return f"Here it is.\n```cpp\n{text}\n```\nand\n```\nmore\n```\n"


def write(asked: Conversation, call: int) -> str:
    """Every kernel has a speed of its own."""
    role = role_of(asked)
    if role == "planner":
        return f"Plan of call {call}: tile it."
    if role == "summarizer":
        return f"**Lesson {call}**\nTile it."
    return block(f"// speed {0.3 + random.Random(call).random():.3f} by {call}")


def at_random(asked: Conversation, call: int) -> str:
    """Replies of every kind, the same for the same call."""
    what = random.Random(call).choice(["fast", "fast", "wrong", "unbuilt", "empty", "nothing"])
    if what == "nothing" and role_of(asked) == "summarizer":
        return "No optimization found."
    if role_of(asked) in ("planner", "summarizer"):
        return write(asked, call)
    code = {"wrong": block(f"// {Code.MISMATCH.value} {call}"), "unbuilt": block(f"// oops {call}"), "empty": "none"}
    return code.get(what) or write(asked, call)


def events(path: Path) -> list[Event]:
    return [line.event for line in read_trajectory(path)[0]]


def observed(outcome: OptimizationResult) -> list[tuple[str | None, float | None, int, str]]:
    return [
        (
            seen.proposal.source.digest if seen.proposal.source else None, seen.speedup, seen.proposal.call,
            seen.proposal.note,
        )
        for seen in outcome.observations
    ]  # fmt: skip


def run_of(iterations: int, **settings: Any) -> AccelOpt:
    return AccelOpt(AccelOptSettings(iterations=iterations, **settings))


class TestCounts:
    def test_the_first_iteration_has_eight_kernels_and_twelve_calls(self, runner: Any, author: Any) -> None:
        backend = author(write)
        outcome = runner.run(run_of(1), backend)
        assert Counter(map(role_of, backend.asked)) == {"planner": 4, "executor": 8}
        assert len(outcome.observations) == 1 + 8
        assert (outcome.stopped, outcome.spent_usd) == ("finished", pytest.approx(0.12))

    def test_later_ones_have_sixteen(self, runner: Any, author: Any) -> None:
        backend = author(write)
        outcome = runner.run(run_of(2), backend)
        asked = Counter(map(role_of, backend.asked))
        assert (asked["planner"], asked["executor"]) == (4 + 8, 8 + 16)
        assert 1 <= asked["summarizer"] <= 8
        assert len(outcome.observations) == 1 + 8 + 16

    def test_calls_of_one_plan_are_the_same_call(self, runner: Any, author: Any) -> None:
        backend = author(write)
        runner.run(run_of(1), backend)
        digests = Counter(asked.digest for asked in backend.asked)
        assert sorted(digests.values()) == [2, 2, 2, 2, 4]


class TestPrompts:
    def test_visibility_of_prompts(self, runner: Any, author: Any) -> None:
        backend = author(write)
        runner.run(run_of(3), backend)
        planners = [asked for asked in backend.asked if role_of(asked) == "planner"]
        first, later = planners[:4], planners[4:]
        assert {asked.prefix.context for asked in first} == {(runner.task.instructions,)}
        assert all("# Experiences" in asked.prefix.context[1] for asked in later)
        assert all("**Lesson" in asked.prefix.context[1] for asked in later)
        assert "latency: 2 ms" in first[0].turns[0].text
        assert "// speed 0.5" in first[0].turns[0].text
        for asked in backend.asked:
            assert len(asked.turns) == 1
            assert "Triton" not in asked.prefix.system
            if role_of(asked) == "executor":
                assert "Experiences" not in str(asked.prefix)
                assert "Plan of call" in asked.turns[0].text
            if role_of(asked) == "summarizer":
                assert asked.prefix.context == ()
                assert "The slow kernel" in asked.turns[0].text

    def test_facts_about_triton_are_for_triton(self, runner: Any, author: Any) -> None:
        root = msgspec.structs.replace(runner.task.root, surface=Surface.TRITON)
        task = msgspec.structs.replace(runner.task, surface=Surface.TRITON, root=root)
        backend = author(write)
        runner.run(run_of(1), backend, task=task)
        assert all("Facts about Triton" in asked.prefix.system for asked in backend.asked)
        assert not any("FLAGS" in asked.turns[0].text for asked in backend.asked)

    def test_a_kernel_inherits_flags_or_brings_its_own(self, runner: Any, author: Any) -> None:
        def with_flags(asked: Conversation, call: int) -> str:
            return "FLAGS: -O1\n" + write(asked, call) if call % 2 else write(asked, call)

        root = msgspec.structs.replace(runner.task.root, flags=("-O2",))
        outcome = runner.run(run_of(1), author(with_flags), task=msgspec.structs.replace(runner.task, root=root))
        flags = {seen.proposal.call % 2: seen.proposal.source.flags for seen in outcome.observations[1:]}
        assert flags == {1: ("-O1",), 0: ("-O2",)}


class TestRoot:
    def test_it_needs_one(self, runner: Any, author: Any) -> None:
        with pytest.raises(UsageError, match="no root"):
            runner.run(run_of(1), author(write), task=msgspec.structs.replace(runner.task, root=None))

    def test_it_must_be_right(self, runner: Any, author: Any, make_kernel: Any) -> None:
        task = msgspec.structs.replace(runner.task, root=make_kernel(f"// {Code.MISMATCH.value}"))
        with pytest.raises(UsageError, match=r"wrong_value\.mismatch"):
            runner.run(run_of(1), author(write), task=task)


class TestFailures:
    def test_replies_without_code_leave_the_beam_unchanged(self, runner: Any, author: Any) -> None:
        backend = author(lambda asked, call: "I will not.")
        outcome = runner.run(run_of(2, plans=1, samples=1), backend)
        assert [seen.proposal.source for seen in outcome.observations[1:]] == [None, None]
        planners = [asked for asked in backend.asked if role_of(asked) == "planner"]
        assert [("// speed 0.5" in asked.turns[0].text) for asked in planners] == [True, True]

    def test_a_parent_that_is_there_twice_has_plans_of_its_own(self, runner: Any, author: Any) -> None:
        backend = author(
            lambda asked, call: block(f"// oops {call}") if role_of(asked) == "executor" else f"plan {call}"
        )
        runner.run(run_of(2, plans=2, samples=1), backend)
        carried_out = [asked.turns[0].text for asked in backend.asked if role_of(asked) == "executor"]
        assert len(carried_out) == len(set(carried_out)) == 2 + 4
        assert all("// speed 0.5" in text for text in carried_out)

    def test_a_beam_may_become_slower(self, runner: Any, author: Any) -> None:
        def slower(asked: Conversation, call: int) -> str:
            return block(f"// speed 0.{call}") if role_of(asked) == "executor" else "slow down"

        backend = author(slower)
        outcome = runner.run(run_of(2, plans=1, samples=1), backend)
        second = [asked for asked in backend.asked if role_of(asked) == "planner"][1]
        assert "// speed 0.2" in second.turns[0].text
        assert outcome.best_speedup == 0.5


class TestRuns:
    def test_beams_and_experiences_are_in_the_trajectory(self, runner: Any, author: Any) -> None:
        runner.run(run_of(3), author(at_random))
        topics = Counter(event.topic for event in events(runner.path("run")) if isinstance(event, Noted))
        assert (topics["accelopt beam"], topics["accelopt experiences"]) == (3, 2)

    @pytest.mark.parametrize("limit_usd", [0.03, 0.1, 0.3])
    def test_a_budget_ends_it_and_a_larger_one_goes_on(self, runner: Any, author: Any, limit_usd: float) -> None:
        whole = runner.run(run_of(3), author(at_random), name="whole")
        cut = runner.run(run_of(3), author(at_random), limit_usd=limit_usd)
        assert cut.stopped == "budget_exhausted"
        assert cut.spent_usd <= limit_usd
        outcome = runner.run(run_of(3), author(at_random), resume=True)
        assert observed(outcome) == observed(whole)
        notes, expected = (
            Counter(event.text for event in events(runner.path(name)) if isinstance(event, Noted)
                    and event.topic.startswith("accelopt"))
            for name in ("run", "whole")
        )  # fmt: skip
        assert notes == expected

    def test_a_replay_is_the_same_run(self, runner: Any, author: Any) -> None:
        first = runner.run(run_of(3), author(at_random))
        runner.judge.judged.clear()
        again = runner.run(run_of(3), ReplayBackend(runner.path("run")), name="replay")
        assert observed(again) == observed(first)
        assert runner.judge.judged == []

    def test_steps_end_it_too(self, runner: Any, author: Any) -> None:
        outcome = runner.run(run_of(2), author(write), steps=5)
        assert (outcome.stopped, len(outcome.observations)) == ("step_limit", 6)
