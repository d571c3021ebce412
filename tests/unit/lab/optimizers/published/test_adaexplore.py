"""A whole search: what models are asked, what becomes of replies, three memories, budgets, resuming, replaying."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.adaexplore.method import AdaExplore, grade_of
from pytest_klineage.lab.optimizers.adaexplore.tree import AdaExploreSettings, Grade, MemoryMode
from pytest_klineage.lab.optimizers.session import OptimizationResult
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import Asked, Code, Event, Judged, KernelSource, Noted, Stopped, Surface

Write = Callable[[Conversation, int], str]
ROLES = {
    "You write kernels": "proposer", "You review": "reviser", "You improve": "tuner", "You read what": "extractor",
    "You decide whether": "judge",
}  # fmt: skip


def role_of(asked: Conversation) -> str:
    return next(role for start, role in ROLES.items() if asked.prefix.system.startswith(start))


def writing(propose: Write, tune: Write | None = None, extract: str = "You cannot do it.", judge: str = "new") -> Write:
    """An author whose proposer and tuner are given."""

    def write(asked: Conversation, call: int) -> str:
        replies = {"reviser": "Use wider loads.", "extractor": extract, "judge": judge}
        role = role_of(asked)
        if role in replies:
            return replies[role]
        return (propose if role == "proposer" or tune is None else tune)(asked, call)

    return write


def block(text: str) -> str:
    return f"```cpp\n{text}\n```\n"


def replacing(old: str, new: str) -> str:
    return f"<old_str_1>\n{old}\n</old_str_1>\n<new_str_1>\n{new}\n</new_str_1>"


def at_random(asked: Conversation, call: int) -> str:
    """Replies of every kind, the same for the same call."""
    rng = random.Random(call)
    what = rng.choice(["fast", "fast", "wrong", "crash", "unbuilt", "empty", "open"])
    text = {
        "fast": f"// speed {rng.uniform(0.2, 2):.3f}", "wrong": f"// {Code.MISMATCH.value} {call}",
        "crash": f"// {Code.CRASH.value} {call}", "unbuilt": f"// oops {call}",
    }.get(what)  # fmt: skip
    if text is None:
        return "nothing" if what == "empty" else "```cpp\nint x;"
    old = re.findall(r"^// (?:speed|wrong|runtime|oops).*$", asked.turns[-1].text, re.M)
    return block(text) if role_of(asked) == "proposer" else replacing(old[-1], text)


def events(path: Path) -> list[Event]:
    return [line.event for line in read_trajectory(path)[0]]


def observed(outcome: OptimizationResult) -> list[tuple[str | None, float | None, int]]:
    return [
        (seen.proposal.source.digest if seen.proposal.source else None, seen.speedup, seen.proposal.call)
        for seen in outcome.observations
    ]


class TestSteps:
    def test_a_large_step_asks_once_and_a_small_one_twice(self, runner: Any, author: Any) -> None:
        tune = lambda asked, call: "FLAGS: -O3 -mavx2\n" + replacing("speed 0.8", "speed 0.9")  # noqa: E731
        backend = author(writing(lambda asked, call: block("// speed 0.8"), tune))
        outcome = runner.run(AdaExplore(AdaExploreSettings(p_large=0.0, total_steps=2)), backend)
        assert [role_of(asked) for asked in backend.asked] == ["proposer", "reviser", "tuner"]
        root, large, small = outcome.observations
        assert (root.step, root.speedup, large.speedup, small.speedup) == (0, 0.5, 0.8, 0.9)
        assert (large.proposal.call, large.proposal.parent) == (1, "")
        assert small.proposal.call == 3
        assert small.proposal.parent == large.proposal.source.digest
        assert small.proposal.source.flags == ("-O3", "-mavx2")
        assert (outcome.stopped, outcome.best_speedup) == ("finished", 0.9)

    def test_what_models_are_shown(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: block("// speed 0.8"), lambda asked, call: "no edit"))
        runner.run(AdaExplore(AdaExploreSettings(p_large=0.0, total_steps=2)), backend)
        proposer, reviser, tuner = backend.asked
        for asked in backend.asked:
            assert len(asked.turns) == 1
            assert asked.prefix.context[0] == runner.task.instructions
            assert "// speed 0.5" in asked.prefix.context[1]
            assert "C++" in asked.prefix.system
            assert "Triton" not in asked.prefix.system
        positions = {role_of(asked): asked.prefix.system.count("FLAGS") for asked in backend.asked}
        assert positions == {"proposer": 1, "reviser": 0, "tuner": 1}
        assert "before the code block" in proposer.prefix.system
        assert "before the first edit" in tuner.prefix.system
        assert "Kernels by others" not in proposer.turns[0].text
        for asked in (reviser, tuner):
            assert "// speed 0.8" in asked.turns[0].text
            assert "speedup: 0.8" in asked.turns[0].text
            assert "slower.than_required" in asked.turns[0].text
        assert "Use wider loads." in tuner.turns[0].text

    def test_a_later_large_step_sees_the_pool(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: block(f"// speed 0.{call}")))
        runner.run(AdaExplore(AdaExploreSettings(p_large=1.0, exploration=0.0, total_steps=3)), backend)
        texts = [asked.turns[0].text for asked in backend.asked]
        assert ["# Kernel 1" in text for text in texts] == [False, True, True]
        assert "# Kernel 2" in texts[2]

    def test_there_is_no_review_where_all_is_wrong(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: block("// wrong"), lambda asked, call: "no edit"))
        runner.run(AdaExplore(AdaExploreSettings(p_large=0.0, total_steps=2)), backend)
        assert [role_of(asked) for asked in backend.asked] == ["proposer", "tuner"]

    def test_from_nothing_and_in_another_language(self, runner: Any, author: Any) -> None:
        task = msgspec.structs.replace(runner.task, root=None, surface=Surface.TRITON)
        backend = author(writing(lambda asked, call: block("# speed 2")))
        outcome = runner.run(AdaExplore(AdaExploreSettings(total_steps=1)), backend, task=task)
        source = outcome.best
        assert (source.surface, source.entry, source.files[0].text) == (Surface.TRITON, "run", "# speed 2\n")
        assert "Triton" in backend.asked[0].prefix.system
        assert "FLAGS" not in backend.asked[0].prefix.system

    def test_malformed_replies_are_failed_steps(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: "```cpp\nint x;" if call == 1 else block("// speed 0.7"),
                                 lambda asked, call: "I would rather not."))  # fmt: skip
        outcome = runner.run(AdaExplore(AdaExploreSettings(p_large=0.0, total_steps=4)), backend)
        steps = outcome.observations[1:]
        assert steps[0].proposal.source is None
        assert any(seen.speedup == 0.7 for seen in steps)
        assert all(seen.proposal.malformed for seen in steps if seen.proposal.source is None)
        nodes = [event.text for event in events(runner.path("run")) if isinstance(event, Noted)
                 and event.topic == "adaexplore node"]  # fmt: skip
        assert len(nodes) == 4
        assert "reward 0;" in nodes[0]


class TestGrades:
    @pytest.mark.parametrize(
        ("code", "speedup", "grade"),
        [
            (Code.COMPILE, None, Grade()), (Code.TIMEOUT_BUILD, None, Grade()), (Code.SKIPPED_MEMORY, None, Grade()),
            (Code.TIMEOUT_RUN, None, Grade(True)), (Code.WRAPPER_LIBRARY, None, Grade(True)),
            (Code.MISMATCH, None, Grade(True)), (Code.ACCEPTED_BUILT, None, Grade(True)),
            (Code.SLOWER_THAN_REQUIRED, 0.3, Grade(True, True, 0.3)),
        ],
    )  # fmt: skip
    def test_verdicts_as_the_search_sees_them(
        self, code: Code, speedup: float | None, grade: Grade, judge: Any, make_kernel: Callable[..., KernelSource]
    ) -> None:
        source = make_kernel(f"// {code.value}")
        verdict = judge(None, source)
        verdict = msgspec.structs.replace(
            verdict, status=code.status, reasons=(msgspec.structs.replace(verdict.reasons[0], code=code),)
        )
        seen = Observation(
            step=1, proposal=Proposal(source=source), verdict=verdict, feedback="", speedup=speedup, is_best=False,
            best_speedup=None,
        )  # fmt: skip
        assert grade_of(seen) == grade
        assert grade_of(msgspec.structs.replace(seen, verdict=None)) == Grade()


class TestMemory:
    def failing(self, author: Any, judge: str = "new") -> Any:
        return author(writing(lambda asked, call: block(f"// {Code.CRASH.value} {call}"), judge=judge))

    def shown(self, backend: Any) -> list[int]:
        """How many rules each step's prompt showed."""
        texts = [asked.turns[0].text for asked in backend.asked if role_of(asked) in ("proposer", "tuner", "reviser")]
        return [text.count("You cannot") for text in texts]

    def test_reset_shows_no_rule_and_learns_nothing(self, runner: Any, author: Any) -> None:
        backend = self.failing(author)
        method = AdaExplore(AdaExploreSettings(p_large=1.0, total_steps=4))
        runner.run(method, backend)
        assert method.name == "adaexplore"
        assert self.shown(backend) == [0] * 4
        assert {role_of(asked) for asked in backend.asked} == {"proposer"}

    def test_reset_can_pay_for_learning_at_the_end(self, runner: Any, author: Any) -> None:
        backend = self.failing(author)
        runner.run(AdaExplore(AdaExploreSettings(p_large=1.0, total_steps=3, update_memory=True)), backend)
        assert [role_of(asked) for asked in backend.asked] == ["proposer"] * 3 + ["extractor"] + [
            "extractor", "judge", "extractor", "judge"]  # fmt: skip
        assert self.shown(backend) == [0] * 3

    def test_online_learns_after_every_failing_step(self, runner: Any, author: Any) -> None:
        backend = self.failing(author)
        method = AdaExplore(AdaExploreSettings(p_large=1.0, total_steps=4, memory=MemoryMode.ONLINE))
        runner.run(method, backend)
        assert method.name == "adaexplore-online"
        assert self.shown(backend) == [0, 1, 2, 3]

    def test_online_counts_what_it_meets_again(self, runner: Any, author: Any) -> None:
        same = '{"is_duplicate": true, "matched_index": 1, "confidence": 0.9}'
        backend = self.failing(author, same)
        settings = AdaExploreSettings(p_large=1.0, total_steps=5, memory=MemoryMode.ONLINE, rule_threshold=3)
        runner.run(AdaExplore(settings), backend)
        assert self.shown(backend) == [0, 0, 0, 1, 1]

    def test_wrong_values_and_malformed_replies_teach_nothing(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: block("// wrong_value.mismatch") if call == 1 else "nothing",
                                 lambda asked, call: "nothing"))  # fmt: skip
        runner.run(AdaExplore(AdaExploreSettings(total_steps=3, memory=MemoryMode.ONLINE)), backend)
        assert "extractor" not in {role_of(asked) for asked in backend.asked}

    def test_an_extraction_without_guidance_is_noted(self, runner: Any, author: Any) -> None:
        backend = author(writing(lambda asked, call: block("// oops"), extract="no guidance"))
        runner.run(AdaExplore(AdaExploreSettings(total_steps=1, memory=MemoryMode.ONLINE)), backend)
        notes = [event for event in events(runner.path("run")) if isinstance(event, Noted)]
        assert Noted(topic="adaexplore rules", text="step 1: nothing learnt") in notes

    def test_shared_shows_frequent_rules_and_adds_to_the_file_once(
        self, runner: Any, author: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "rules.txt"
        path.write_text("You cannot a||3\nYou cannot b||2\n")
        backend = self.failing(author)
        settings = AdaExploreSettings(
            p_large=1.0, total_steps=2, memory=MemoryMode.SHARED, rules_path=path, update_memory=True
        )
        assert AdaExplore(settings).name == "adaexplore-shared"
        runner.run(AdaExplore(settings), backend)
        assert self.shown(backend) == [1, 1]
        after = "You cannot a||3\nYou cannot b||2\nYou cannot do it.||1\nYou cannot do it.||1\n"
        assert path.read_text() == after
        runner.run(AdaExplore(settings), author(lambda asked, call: pytest.fail("asked again")), resume=True)
        assert path.read_text() == after

    def test_a_replay_shows_the_recorded_rules_and_writes_no_file(
        self, runner: Any, author: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "rules.txt"
        path.write_text("You cannot a||3\n")
        settings = AdaExploreSettings(total_steps=2, memory=MemoryMode.SHARED, rules_path=path, update_memory=True)
        first = runner.run(AdaExplore(settings), self.failing(author))
        path.write_text("You cannot z||9\n")
        again = runner.run(AdaExplore(settings), ReplayBackend(runner.path("run")), name="replay")
        assert observed(again) == observed(first)
        assert path.read_text() == "You cannot z||9\n"

    @pytest.mark.parametrize("learns", [False, True])
    def test_only_a_run_that_learns_begins_its_file(
        self, runner: Any, author: Any, tmp_path: Path, learns: bool
    ) -> None:
        path = tmp_path / "rules.txt"
        settings = AdaExploreSettings(total_steps=1, memory=MemoryMode.SHARED, rules_path=path, update_memory=learns)
        misuse = contextlib.nullcontext() if learns else pytest.raises(UsageError, match="no rule file")
        with misuse:
            runner.run(AdaExplore(settings), self.failing(author))
        assert path.exists() is learns

    def test_an_invalid_rule_file_is_misuse(self, runner: Any, author: Any, tmp_path: Path) -> None:
        path = tmp_path / "rules.txt"
        path.write_text("gibberish\n")
        settings = AdaExploreSettings(memory=MemoryMode.SHARED, rules_path=path)
        with pytest.raises(UsageError, match=r"rules\.txt, line 1"):
            runner.run(AdaExplore(settings), self.failing(author))


MODES = [{}, {"memory": MemoryMode.ONLINE}, {"update_memory": True}]


@pytest.mark.parametrize("settings", MODES, ids=["reset", "online", "update"])
class TestRuns:
    def method(self, settings: dict[str, Any]) -> AdaExplore:
        return AdaExplore(AdaExploreSettings(total_steps=24, **settings))

    def author(self, author: Any) -> Any:
        return author(writing(at_random, at_random, judge="duplicate of 1: true"))

    def test_every_step_is_in_the_trajectory(self, runner: Any, author: Any, settings: dict[str, Any]) -> None:
        outcome = runner.run(self.method(settings), self.author(author))
        found = events(runner.path("run"))
        nodes = [event for event in found if isinstance(event, Noted) and event.topic == "adaexplore node"]
        assert len(nodes) == 24 == len(outcome.observations) - 1
        judged = [event for event in found if isinstance(event, Judged)]
        assert len(judged) == len(
            {seen.proposal.source.digest for seen in outcome.observations if seen.proposal.source}
        )
        calls = {event.call for event in found if isinstance(event, Asked)}
        assert all(seen.proposal.call in calls for seen in outcome.observations[1:])
        assert isinstance(found[-1], Stopped)
        best = max(seen.speedup for seen in outcome.observations if seen.speedup is not None)
        assert outcome.best_speedup == best

    @pytest.mark.parametrize("limit_usd", [0.02, 0.1, 0.23])
    def test_a_budget_ends_it_and_a_larger_one_goes_on(
        self, runner: Any, author: Any, settings: dict[str, Any], limit_usd: float
    ) -> None:
        whole = runner.run(self.method(settings), self.author(author), name="whole")
        cut = runner.run(self.method(settings), self.author(author), limit_usd=limit_usd)
        assert cut.stopped == "budget_exhausted"
        assert cut.spent_usd <= limit_usd
        rest = self.author(author)
        outcome = runner.run(self.method(settings), rest, resume=True)
        assert observed(outcome) == observed(whole)
        assert outcome.spent_usd == pytest.approx(whole.spent_usd)
        notes = Counter(event.text for event in events(runner.path("run")) if isinstance(event, Noted)
                        and event.topic.startswith("adaexplore"))  # fmt: skip
        expected = Counter(event.text for event in events(runner.path("whole")) if isinstance(event, Noted)
                           and event.topic.startswith("adaexplore"))  # fmt: skip
        assert notes == expected

    def test_a_replay_is_the_same_run(self, runner: Any, author: Any, settings: dict[str, Any]) -> None:
        first = runner.run(self.method(settings), self.author(author))
        runner.judge.judged.clear()
        again = runner.run(self.method(settings), ReplayBackend(runner.path("run")), name="replay")
        assert observed(again) == observed(first)
        assert runner.judge.judged == []

    def test_the_seed_decides(self, runner: Any, author: Any, settings: dict[str, Any]) -> None:
        runs = [
            observed(runner.run(self.method(settings), self.author(author), name=name, task=task))
            for name, task in (("a", runner.task), ("b", runner.task), ("c", reseeded(runner.task)))
        ]
        assert runs[0] == runs[1] != runs[2]


def reseeded(task: Task) -> Task:
    return msgspec.structs.replace(task, seed=1)
