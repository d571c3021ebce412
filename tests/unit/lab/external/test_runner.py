"""Optimizers as processes: what they get, how runs end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.processes import MARK
from pytest_klineage.lab.external.runner import ExternalResult, ExternalRun, Limits, run_optimizer
from pytest_klineage.records import Begun, KernelSource, Noted, SourceFile, Stopped, Surface

pytest.importorskip("httpx", reason="needs the extra external")
pytest.importorskip("starlette", reason="needs the extra external")

MakeRun = Callable[..., ExternalRun]
Events = Callable[..., list[Any]]
Left = Callable[[], list[int]]
CLIENT = """\
import json, os, subprocess, sys, time, urllib.error, urllib.request

def post(path, body, **headers):
    data = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["KLINEAGE_URL"] + path, data, {"content-type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.load(reply)

def submit(text):
    return post("/v1/judge", {"source": text})

def ask(limit=100):
    body = {"model": "toy", "max_tokens": limit, "messages": [{"role": "user", "content": "why?"}]}
    return post("/v1/messages", body, **{"x-api-key": os.environ["ANTHROPIC_API_KEY"]})

"""  # noqa: E501 - a program of somebody else


@pytest.fixture
def optimize(make_run: MakeRun, tmp_path: Path) -> Callable[..., tuple[ExternalRun, ExternalResult]]:
    """Runs a program as an optimizer; the program has post, submit and ask."""

    def run(program: str, **changes: Any) -> tuple[ExternalRun, ExternalResult]:
        path = tmp_path / "optimizer.py"
        path.write_text(CLIENT + program)
        made = make_run(**changes)
        return made, run_optimizer(made, [sys.executable, str(path)], folder=tmp_path, log=tmp_path / "out.log")

    return run


@pytest.fixture
def left(tmp_path: Path) -> Left:
    """Processes of this test's optimizer that still run: a test beside this one may have one of its own."""

    def look() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and f"{MARK}=".encode() in (entry / "environ").read_bytes()
                    and (entry / "cwd").readlink() == tmp_path
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    return look


def limits(**changes: Any) -> Limits:
    return Limits(**{"budget_usd": 1.0, "deadline_s": 20, "silence_s": 20, "grace_s": 0.3, **changes})


class TestEnds:
    def test_an_optimizer_that_asks_submits_and_ends(
        self, provider: Any, optimize: Any, events: Events, left: Left
    ) -> None:
        provider.json(provider.message("speed 1.5"))
        run, outcome = optimize(
            "text = ask()['content'][0]['text']\nprint(submit(text)['speedup'])\nsubmit('speed 1.1')"
        )
        assert (outcome.stopped, outcome.best_speedup, len(outcome.steps)) == ("finished", 1.5, 2)
        assert outcome.best is not None
        assert outcome.best.files[0].text == "speed 1.5"
        assert outcome.spent_usd == pytest.approx(30e-6)
        begun = events(run, Begun)[0]
        assert (begun.name, begun.backend, begun.model, begun.budget_usd) == ("toy-gemm", "proxy", "toy", 1.0)
        assert {name: begun.settings[name] for name in ("method", "case", "platform", "surface", "reference")} == {
            "method": "toy-method", "case": "gemm-4x8x16-fp32", "platform": "cpu", "surface": "cpp",
            "reference": "torch",
        }  # fmt: skip
        (stopped,) = events(run, Stopped)
        assert stopped.reason == "finished"
        assert not left()

    def test_its_output_is_kept(self, optimize: Any, tmp_path: Path) -> None:
        optimize("print('hello'); sys.stderr.write('there')")
        assert sorted((tmp_path / "out.log").read_text().split()) == ["hello", "there"]

    @pytest.mark.parametrize(
        ("program", "word", "text"),
        [
            ("pass", "nothing_submitted", "log"), ("sys.exit(3)", "optimizer_failed", "status 3"),
            ("submit('speed 1.0'); os.kill(os.getpid(), 9)", "optimizer_failed", "signal 9"),
            ("post('/v1/judge', {})", "optimizer_failed", "status 1"),
        ],
    )  # fmt: skip
    def test_early_ends_have_names(self, optimize: Any, events: Events, program: str, word: str, text: str) -> None:
        run, outcome = optimize(program)
        assert outcome.stopped == word
        assert text in outcome.message
        assert events(run, Stopped)[-1].reason == word

    def test_only_rubbish(self, optimize: Any, events: Events) -> None:
        program = "submit('rubbish')\ntry:\n    post('/v1/judge', [])\nexcept urllib.error.HTTPError:\n    pass"
        run, outcome = optimize(program)
        assert (outcome.stopped, outcome.best) == ("finished", None)
        assert [step.verdict.code.value for step in outcome.steps] == ["build_error.compile"]
        assert any(note.topic == "malformed" for note in events(run, Noted))

    def test_the_cap_ends_it(self, provider: Any, optimize: Any, events: Events, left: Left) -> None:
        provider.json(provider.message("speed 1.5", output_tokens=100))
        program = """
while True:
    try:
        submit(ask()["content"][0]["text"])
    except urllib.error.HTTPError as error:
        assert error.code == 402
        time.sleep(0.01)
"""
        run, outcome = optimize(program, limits=limits(budget_usd=0.002))
        assert (outcome.stopped, outcome.best_speedup) == ("budget_exhausted", 1.5)
        assert outcome.spent_usd <= 0.002
        assert [stopped.reason for stopped in events(run, Stopped)] == ["budget_exhausted"]
        assert not left()

    def test_a_crash_after_the_cap_is_the_caps_doing(self, provider: Any, optimize: Any) -> None:
        _, outcome = optimize("ask()", limits=limits(budget_usd=0.0))
        assert outcome.stopped == "budget_exhausted"

    def test_the_steps_end_it(self, optimize: Any) -> None:
        program = """
for place in range(99):
    try:
        submit(f"speed 1.{place}")
    except OSError:
        time.sleep(0.01)
"""
        _, outcome = optimize(program, limits=limits(max_steps=2))
        assert (outcome.stopped, len(outcome.steps)) == ("step_limit", 2)

    @pytest.mark.parametrize(("changes", "word"), [({"deadline_s": 0.5}, "deadline"), ({"silence_s": 0.5}, "silent")])
    def test_one_that_hangs(self, optimize: Any, changes: dict[str, float], word: str, left: Left) -> None:
        _, outcome = optimize("submit('speed 1.5')\ntime.sleep(60)", limits=limits(**changes))
        assert (outcome.stopped, outcome.best_speedup) == (word, 1.5)
        assert not left()

    def test_a_long_judgement_is_no_silence(self, optimize: Any, judge: Any) -> None:
        judge.delay_s = 1.0
        _, outcome = optimize("submit('speed 1.5')", limits=limits(silence_s=0.4))
        assert outcome.stopped == "finished"

    def test_one_that_ignores_being_asked_to_end(
        self, optimize: Any, monkeypatch: pytest.MonkeyPatch, left: Left
    ) -> None:
        monkeypatch.setattr("pytest_klineage.lab.external.processes.TERMINATE_S", 0.3)
        _, outcome = optimize(
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
            limits=limits(deadline_s=0.5),
        )
        assert outcome.stopped == "deadline"
        assert not left()

    def test_processes_that_run_on_are_found_and_ended(self, optimize: Any, events: Events, left: Left) -> None:
        program = """
submit('speed 1.5')
for detached in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=detached)
"""
        run, outcome = optimize(program)
        assert outcome.stopped == "finished"
        assert not left()
        notes = [note.text for note in events(run, Noted) if note.topic == "processes"]
        assert len(notes) == 1
        assert notes[0].startswith("2 of")

    def test_a_case_that_cannot_be_judged_here(self, optimize: Any, target: EvaluationTarget) -> None:
        root = KernelSource(surface=Surface.CPP, files=(SourceFile("k.cpp", "skipped.platform"),), entry="run")
        _, outcome = optimize("submit('speed 1.0')", target=msgspec.structs.replace(target, root=root))
        assert (outcome.stopped, len(outcome.steps)) == ("not_judged", 1)
        _, outcome = optimize("submit('skipped.missing_dependency'); time.sleep(60)")
        assert outcome.stopped == "not_judged"

    def test_a_fault_of_ours_goes_on_and_is_recorded(self, make_run: MakeRun, judge: Any, tmp_path: Path,
                                                     events: Events) -> None:  # fmt: skip
        judge.faults.append(HarnessError("the oracle died"))
        run = make_run()
        path = tmp_path / "optimizer.py"
        path.write_text(CLIENT + "submit('speed 1.0')")
        with pytest.raises(HarnessError, match="oracle"):
            run_optimizer(run, [sys.executable, str(path)], folder=tmp_path, log=tmp_path / "out.log")
        assert [(stopped.reason, stopped.message) for stopped in events(run, Stopped)] == [
            ("harness_failed", "the oracle died")
        ]

    def test_an_invalid_command(self, make_run: MakeRun, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="nonesuch"):
            run_optimizer(make_run(), ["nonesuch-program"], folder=tmp_path, log=tmp_path / "out.log")

    def test_the_root_is_step_0(self, optimize: Any, target: EvaluationTarget) -> None:
        root = KernelSource(surface=Surface.CPP, files=(SourceFile("naive.cpp", "speed 0.5"),), entry="run")
        _, outcome = optimize("submit('speed 0.4')", target=msgspec.structs.replace(target, root=root))
        assert [(step.number, step.speedup) for step in outcome.steps] == [(0, 0.5), (1, 0.4)]
        assert outcome.best_speedup == 0.5


class TestEnvironment:
    def test_no_key_of_ours_reaches_it(self, optimize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OTHER_API_KEY"):
            monkeypatch.setenv(name, "the-real-key")
        run, _ = optimize("json.dump(dict(os.environ), open('env.json', 'w'))")
        found = json.loads((tmp_path / "env.json").read_text())
        assert "the-real-key" not in found.values()
        assert found["ANTHROPIC_BASE_URL"] == found["KLINEAGE_URL"] == run.url
        assert found["OPENAI_BASE_URL"] == f"{run.url}/v1"
        assert found["ANTHROPIC_API_KEY"] == found["OPENAI_API_KEY"] == run.key
        assert "127.0.0.1" in found["NO_PROXY"]

    def test_the_stand_in_comes_first(self, make_run: MakeRun) -> None:
        path = make_run(stand_in=True).environment({"PYTHONPATH": "mine"})["PYTHONPATH"].split(os.pathsep)
        assert Path(path[0], "flashinfer_bench", "__init__.py").is_file()
        assert path[1:] == ["mine"]
        assert "PYTHONPATH" not in make_run().environment({})


class TestBeginning:
    def test_a_trajectory_is_not_overwritten(self, make_run: MakeRun, setup: Any, judge: Any,
                                             prices: Any) -> None:  # fmt: skip
        run = make_run()
        with pytest.raises(UsageError, match="exists"):
            ExternalRun(setup, judge, prices, run.path)

    def test_a_port_that_is_taken(self, make_run: MakeRun) -> None:
        port = int(make_run().url.rpartition(":")[2])
        with pytest.raises(UsageError, match="port"):
            make_run(port=port)

    def test_a_model_without_a_price(self, make_run: MakeRun, setup: Any) -> None:
        with pytest.raises(UsageError, match="no price"):
            make_run(proxy=msgspec.structs.replace(setup.proxy, model="other"))
