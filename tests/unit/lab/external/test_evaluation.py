"""The evaluation server over HTTP: the plain contract, AdaExplore's, steps in the trajectory, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import HarnessError
from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.runner import ExternalRun, Limits
from pytest_klineage.records import Judged, KernelSource, Noted, SourceFile, Surface
from pytest_klineage.report.collect import collect
from pytest_klineage.report.outcomes import attempts, optimizations, results

httpx = pytest.importorskip("httpx", reason="needs the extra external")
pytest.importorskip("starlette", reason="needs the extra external")

MakeRun = Callable[..., ExternalRun]
Events = Callable[..., list[Any]]
QUESTION = {"model": "toy", "max_tokens": 100, "messages": [{"role": "user", "content": "why?"}]}


def submit(run: ExternalRun, source: str = "", **fields: Any) -> Any:
    given = {"source": source, **fields} if source else fields
    return httpx.post(f"{run.url}/v1/judge", json=given, timeout=30)


def evaluate(run: ExternalRun, source: Any) -> Any:
    body = {"original_model_src": "class Model: ...", "custom_model_src": source, "seed_num": 42, "backend": "triton"}
    return httpx.post(f"{run.url}/evaluate", json=body, timeout=30)


def ask(run: ExternalRun) -> None:
    httpx.post(f"{run.url}/v1/messages", json=QUESTION, headers={"x-api-key": run.key}, timeout=30)


@pytest.fixture
def python_target(target: EvaluationTarget) -> EvaluationTarget:
    return msgspec.structs.replace(target, surface=Surface.PYTHON)


class TestThePlainContract:
    def test_the_task_says_all_that_is_needed(self, make_run: MakeRun, target: EvaluationTarget) -> None:
        root = KernelSource(surface=Surface.CPP, files=(SourceFile("naive.cpp", "speed 0.5"),), entry="run")
        run = make_run(target=msgspec.structs.replace(target, root=root))
        task = httpx.get(f"{run.url}/v1/task").json()
        assert (task["case"], task["surface"], task["entry"]) == ("gemm-4x8x16-fp32", "cpp", "run")
        assert task["instructions"] == "multiply two matrices"
        assert task["root"] == [{"name": "naive.cpp", "text": "speed 0.5"}]
        assert (task["limit_usd"], task["remaining_usd"], task["best_speedup"]) == (1.0, 1.0, None)

    def test_a_kernel_is_judged_and_recorded(self, make_run: MakeRun, events: Events, judge: Any) -> None:
        run = make_run()
        reply = submit(run, "speed 1.5", note="tiles of 32")
        assert reply.status_code == 200
        found = reply.json()
        assert (found["step"], found["status"], found["speedup"], found["is_best"]) == (1, "accepted", 1.5, True)
        assert found["interval"] == pytest.approx([1.35, 1.65])
        assert found["feedback"].startswith("Verdict: accepted (accepted.faster)")
        assert found["verdict"]["source_digest"] == judge.judged[0].digest
        assert found["steps_left"] == 999
        (judged,) = events(run, Judged)
        assert (judged.code.value, judged.speedup, judged.best_speedup, judged.call) == ("accepted.faster", 1.5, 1.5, 0)
        topics = [(note.topic, note.text) for note in events(run, Noted)]
        assert topics[0] == ("step", "step 1: tiles of 32 (through /v1/judge)")
        assert json.loads(topics[1][1])["feedback"] == found["feedback"]

    def test_files_entry_and_flags(self, make_run: MakeRun, judge: Any) -> None:
        files = [{"name": "a.cpp", "text": "1"}, {"name": "b.h", "text": "speed 1.0"}]
        submit(make_run(), files=files, entry="go", flags=["-O2"], case="gemm-4x8x16-fp32")
        (source,) = judge.judged
        assert ([file.name for file in source.files], source.entry, source.flags) == (["a.cpp", "b.h"], "go", ("-O2",))

    def test_the_best_is_the_fastest_that_was_scored(self, make_run: MakeRun, events: Events) -> None:
        run = make_run()
        texts = ["speed 0.8", "wrong_value.mismatch", "speed 1.5", "wrapper.library", "speed 1.2", "cheat.replay"]
        replies = [submit(run, text).json() for text in texts]
        assert [reply["is_best"] for reply in replies] == [True, False, True, False, False, False]
        assert [reply["best_speedup"] for reply in replies] == [0.8, 0.8, 1.5, 1.5, 1.5, 1.5]
        assert run.evaluator.best is not None
        assert run.evaluator.best.files[0].text == "speed 1.5"
        assert [judged.speedup for judged in events(run, Judged)] == [0.8, None, 1.5, None, 1.2, None]

    def test_the_same_kernel_is_not_judged_again(self, make_run: MakeRun, events: Events, judge: Any) -> None:
        run = make_run()
        submit(run, "speed 1.5")
        again = submit(run, "speed 1.5").json()
        assert (again["step"], again["repeats"], again["is_best"], again["speedup"]) == (2, 1, False, 1.5)
        assert len(judge.judged) == len(events(run, Judged)) == 1

    @pytest.mark.parametrize(
        ("body", "status", "word"),
        [
            (b"{", 400, "not_json"), (b"[]", 400, "invalid"), (b"{}", 400, "invalid"),
            (b'{"source": ""}', 400, "invalid"), (b'{"source": 7}', 400, "invalid"),
            (b'{"source": "x", "files": [{"name": "a", "text": ""}]}', 400, "invalid"),
            (b'{"files": [{"name": "../a.cpp", "text": "x"}]}', 400, "invalid"),
            (b'{"source": "x", "case": "other"}', 400, "wrong_case"), (b"\xff", 400, "not_json"),
        ],
    )  # fmt: skip
    def test_rubbish_is_refused_and_recorded(
        self, make_run: MakeRun, events: Events, judge: Any, body: bytes, status: int, word: str
    ) -> None:
        run = make_run()
        reply = httpx.post(f"{run.url}/v1/judge", content=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, word)
        (note,) = events(run, Noted)
        assert note.topic == "malformed"
        assert note.text.startswith(f"step 1: {word}: ")
        assert submit(run, "speed 1.5").json()["step"] == 2
        assert len(judge.judged) == 1

    def test_no_more_steps_than_allowed(self, make_run: MakeRun, judge: Any) -> None:
        run = make_run(limits=Limits(budget_usd=1.0, max_steps=2))
        submit(run, "speed 1.0")
        httpx.post(f"{run.url}/v1/judge", content=b"{")
        reply = submit(run, "speed 2.0")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "step_limit")
        assert len(judge.judged) == 1

    def test_submissions_at_once_are_judged_one_at_a_time(self, make_run: MakeRun, judge: Any, events: Events) -> None:
        judge.delay_s = 0.02
        run = make_run()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda position: submit(run, f"speed 1.{position}").json(), range(1, 9)))
        assert sorted(reply["step"] for reply in replies) == list(range(1, 9))
        assert len(judge.threads) == 1
        assert len(events(run, Judged)) == 8
        assert run.evaluator.best_speedup == 1.8

    def test_a_fault_of_ours_ends_judging(self, make_run: MakeRun, judge: Any) -> None:
        judge.faults.append(HarnessError("the oracle died"))
        run = make_run()
        reply = submit(run, "speed 1.0")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "harness_failed")
        reply = submit(run, "speed 2.0")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "closed")
        assert httpx.get(f"{run.url}/health").json()["error"]["code"] == "closed"

    def test_a_kernel_is_connected_with_the_reply_that_holds_it(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        for text in ("here: speed 1.5", "here: speed 2.5", "replace speed 2.5 by something"):
            provider.json(provider.message(text))
        run = make_run()
        ask(run)
        ask(run)
        submit(run, "speed 1.5")
        submit(run, "speed 2.5")
        ask(run)
        submit(run, "speed 3.5")  # an edit: no reply holds it whole
        submit(run, "speed 4.5")  # no call of a model is behind this one
        assert [judged.call for judged in events(run, Judged)] == [1, 2, 3, 0]


class TestAdaExplore:
    def test_a_right_kernel(self, make_run: MakeRun, python_target: EvaluationTarget, judge: Any) -> None:
        run = make_run(target=python_target)
        reply = evaluate(run, "class ModelNew: ...  # speed 1.5")
        assert reply.status_code == 200
        found = reply.json()
        assert (found["compiled"], found["correctness"]) == (True, True)
        assert found["runtime"] == pytest.approx(2.0 / 1.5)
        assert found["runtime_stats"]["fast_p"] == 1.5
        assert found["runtime_stats"]["baseline_time"] == 2.0
        assert set(found) == {"compiled", "correctness", "metadata", "runtime", "runtime_stats"}
        (source,) = judge.judged
        assert [file.name for file in source.files] == ["adapter.py", "candidate.py"]
        assert "def run(a, b):" in source.files[0].text

    @pytest.mark.parametrize(
        ("code", "compiled", "key"),
        [
            ("build_error.compile", False, "compilation_error"), ("runtime_error.crash", True, "runtime_error"),
            ("timeout.run", True, "runtime_error"), ("wrong_value.mismatch", True, "correctness_issue"),
            ("wrong_shape.shape", True, "correctness_issue"), ("cheat.replay", True, "correctness_issue"),
            ("wrapper.framework", True, "correctness_issue"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_in_its_words(
        self, make_run: MakeRun, python_target: EvaluationTarget, code: str, compiled: bool, key: str
    ) -> None:
        found = evaluate(make_run(target=python_target), code).json()
        assert (found["compiled"], found["correctness"]) == (compiled, False)
        assert found["metadata"][f"{key}_name"] == code
        assert f"({code})" in found["metadata"][key].splitlines()[0]
        assert found["runtime_stats"] == {}

    def test_a_wrapper_may_be_reported_and_does_not_count(
        self, make_run: MakeRun, python_target: EvaluationTarget, events: Events
    ) -> None:
        run = make_run(target=python_target, ordinary_wrappers=True)
        found = evaluate(run, "wrapper.framework").json()
        assert (found["correctness"], found["runtime_stats"]["fast_p"]) == (True, 3.0)
        (judged,) = events(run, Judged)
        assert (judged.code.value, judged.speedup) == ("wrapper.framework", None)
        assert run.evaluator.best is None
        notes = [note.text for note in events(run, Noted) if note.topic == "ordinary"]
        assert notes == ["step 1: shown as accepted.faster, counted as wrapper.framework"]

    @pytest.mark.parametrize("source", ["", 7, None])
    def test_rubbish_is_a_kernel_that_does_not_compile(
        self, make_run: MakeRun, python_target: EvaluationTarget, events: Events, source: Any
    ) -> None:
        run = make_run(target=python_target)
        reply = evaluate(run, source)
        assert (reply.status_code, reply.json()["compiled"]) == (200, False)
        assert events(run, Noted)[0].topic == "malformed"

    def test_a_surface_that_takes_no_modules(self, make_run: MakeRun) -> None:
        assert "cpp kernels" in evaluate(make_run(), "x").json()["metadata"]["compilation_error"]

    def test_the_end_is_an_error(self, make_run: MakeRun, python_target: EvaluationTarget) -> None:
        run = make_run(target=python_target, limits=Limits(budget_usd=1.0, max_steps=1))
        evaluate(run, "speed 1.0")
        assert evaluate(run, "speed 2.0").status_code == 403


def test_a_report_shows_the_run_as_one_of_ours(provider: Any, make_run: MakeRun, tmp_path: Path) -> None:
    provider.json(provider.message("speed 1.5"))
    run = make_run()
    httpx.post(f"{run.url}/v1/judge", content=b"{")
    ask(run)
    submit(run, "speed 1.5")
    submit(run, "wrapper.library")
    material = collect([run.path])
    assert not material.problems
    (one,) = optimizations(material)
    assert (one.method, one.case_id, one.platform) == ("toy-method", "gemm-4x8x16-fp32", "cpu")
    assert [(step.number, step.mark.value, step.speedup) for step in one.steps] == [
        (1, "failed", None), (2, "scored", 1.5), (3, "wrapper", None),
    ]  # fmt: skip
    assert one.steps[1].reply == "speed 1.5"
    assert one.steps[1].interval is not None
    assert one.spent_usd == pytest.approx(run.budget.spent_usd)
    (row,) = results(attempts(material.runs, [one]))
    assert row.best.speedup == 1.5
