"""A recorded optimization replays to its kernels: judged again or not, whatever ended it, and not after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.conversation import PROMPT_SET
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers import session as session_module
from pytest_klineage.lab.optimizers.klineage import OWN
from pytest_klineage.lab.optimizers.methods import MethodSettings, make_method
from pytest_klineage.lab.optimizers.replaying import best_made, best_recorded, read_recorded, replayed
from pytest_klineage.lab.optimizers.session import optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelSource, Noted, SourceFile, Surface, TrajectoryLine, to_json

CASE = make_case("gemm", (16, 16, 16), "fp32", "torch", at_least=0.01)
Record = Callable[..., str]


def kernel(line: str) -> KernelSource:
    """A kernel of which the pretended judge says `line`."""
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", f"// {line}\n"),), entry="run")


def whole(line: str) -> str:
    """A reply with such a kernel."""
    return f"PLAN: go on\n\n```cpp\n// {line}\n```\n"


ROOT = kernel("slower.than_required 0.10")
SCRIPT = [
    whole("accepted.faster 1.50"),
    "no kernel here",
    whole("wrong_value.mismatch"),
    whole("accepted.faster 1.50"),
    whole("slower.than_required 0.80"),
]


@pytest.fixture
def record(scripted: type, judge: Any) -> Record:
    """Records a run of generated-only. Returns why it ended."""

    def run(path: Path, *, script: list[str], max_steps: int, limit_usd: float = 1.0) -> str:
        task = Task(case=CASE, platform="cpu", surface=Surface.CPP, root=ROOT, instructions="the contract", seed=3)
        settings = {"method": "generated-only", "platform": "cpu", "surface": "cpp", "seed": "3"}
        with Session.begin(path, scripted(list(script)), limit_usd=limit_usd, name="run", settings=settings) as session:
            method = make_method("generated-only", MethodSettings(max_steps=max_steps))
            stopped = optimize(task, method, session, judge, max_steps=max_steps).stopped
        judge.judged.clear()
        return stopped

    return run


def test_a_replay_judges_the_recorded_kernels_and_no_others(tmp_path: Path, record: Record, judge: Any) -> None:
    path = tmp_path / "run.jsonl"
    assert record(path, script=SCRIPT, max_steps=5) == "step_limit"
    recorded = read_recorded(path)
    assert recorded.steps == 5
    assert recorded.case == CASE
    outcome = replayed(recorded, ROOT, tmp_path / "again.jsonl", judge)
    assert judge.judged == [
        "// slower.than_required 0.10", "// accepted.faster 1.50", "// wrong_value.mismatch",
        "// slower.than_required 0.80",
    ]  # fmt: skip
    assert [item.agrees for item in outcome.rejudged] == [True] * 4
    best = best_made(outcome)
    assert best is not None
    assert best.files[0].text.startswith("// accepted.faster 1.50")


def test_without_a_judge_recorded_verdicts_are_enough(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run.jsonl", script=SCRIPT, max_steps=5)
    outcome = replayed(read_recorded(tmp_path / "run.jsonl"), ROOT, tmp_path / "again.jsonl")
    assert outcome.rejudged == ()
    assert outcome.best_speedup == 1.5


def test_a_run_that_its_budget_ended_replays_to_where_it_was(tmp_path: Path, record: Record, judge: Any) -> None:
    path = tmp_path / "run.jsonl"
    assert record(path, script=SCRIPT, max_steps=9, limit_usd=0.025) == "budget_exhausted"
    recorded = read_recorded(path)
    assert recorded.steps == 2
    assert len(replayed(recorded, ROOT, tmp_path / "again.jsonl", judge).observations) == 3


def test_words_may_change_with_the_prompt_set(tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    record(path, script=SCRIPT, max_steps=5)
    monkeypatch.setattr(session_module, "malformed_text", lambda why: "no kernel")
    with pytest.raises(UsageError, match="no reply to this prompt"):
        replayed(read_recorded(path), ROOT, tmp_path / "strict.jsonl")
    old = f'"prompt_set":{PROMPT_SET - 1}'.encode()
    path.write_bytes(path.read_bytes().replace(f'"prompt_set":{PROMPT_SET}'.encode(), old, 1))
    assert replayed(read_recorded(path), ROOT, tmp_path / "again.jsonl").best_speedup == 1.5


def test_the_root_belongs_to_no_method(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "run.jsonl"
    record(path, script=["nothing", whole("wrong_value.mismatch")], max_steps=2)
    recorded = read_recorded(path)
    assert recorded.best_speedup is None
    outcome = replayed(recorded, ROOT, tmp_path / "again.jsonl")
    assert outcome.best == ROOT
    assert best_made(outcome) is None
    assert best_recorded(tmp_path, "generated-only", CASE, "cpu") is None


def test_the_best_of_several_runs_is_found(tmp_path: Path, record: Record) -> None:
    for number, speed in enumerate(("1.20", "1.70", "0.90")):
        folder = tmp_path / str(number)
        folder.mkdir()
        record(folder / "run.jsonl", script=[whole(f"accepted.faster {speed}")], max_steps=1)
    (tmp_path / "notes.jsonl").write_text('{"no": "trajectory"}\n')
    found = best_recorded(tmp_path, "generated-only", CASE, "cpu")
    assert found is not None
    assert found.path.parent.name == "1"
    assert best_recorded(tmp_path, "klineage", CASE, "cpu") is None
    assert best_recorded(tmp_path, "generated-only", CASE, "sm90") is None
    assert best_recorded(tmp_path / "nowhere", "generated-only", CASE, "cpu") is None


def test_a_run_with_cards_of_the_very_case_is_left_out(tmp_path: Path, record: Record) -> None:
    for name, speed in {"other": "1.20", "own": "1.70"}.items():
        record(tmp_path / f"{name}.jsonl", script=[whole(f"accepted.faster {speed}")], max_steps=1)
    line = TrajectoryLine(at="2026-11-30T00:00:00Z", event=Noted(topic="cards", text=f"own-tile{OWN}"))
    with (tmp_path / "own.jsonl").open("ab") as file:
        file.write(to_json(line) + b"\n")
    found = best_recorded(tmp_path, "generated-only", CASE, "cpu")
    assert found is not None
    assert found.path.stem == "other"
    (tmp_path / "other.jsonl").unlink()
    assert best_recorded(tmp_path, "generated-only", CASE, "cpu") is None


@pytest.mark.parametrize("root", [kernel("slower.than_required 0.20"), None], ids=["another", "none"])
def test_another_root_is_refused(tmp_path: Path, record: Record, root: KernelSource | None) -> None:
    record(tmp_path / "run.jsonl", script=SCRIPT, max_steps=1)
    with pytest.raises(UsageError, match="began with another kernel than is there now"):
        replayed(read_recorded(tmp_path / "run.jsonl"), root, tmp_path / "again.jsonl")


def test_what_holds_nothing_is_refused(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run.jsonl", script=SCRIPT, max_steps=1)
    begun = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "begun.jsonl").write_bytes(begun)
    with pytest.raises(UsageError, match="holds no judged kernel"):
        read_recorded(tmp_path / "begun.jsonl")
    recorded = read_recorded(tmp_path / "run.jsonl")
    only_root = msgspec.structs.replace(recorded, events=recorded.events[:4])
    assert only_root.steps == 0
    with pytest.raises(UsageError, match="holds no step"):
        replayed(only_root, ROOT, tmp_path / "again.jsonl")
