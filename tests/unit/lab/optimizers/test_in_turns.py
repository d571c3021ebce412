"""A run whose verdicts come from a folder and its replies from files: to the byte the trajectory of one go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import Waiting, WaitsForReply, WaitsForVerdict
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.executors.judging import judge_folder
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.lab.llm.exchange import ExchangeBackend
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import Judge, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface, Verdict

QUICK = {"time_limit_s": 0.3, "precision": 0.5, "seeds": 1, "busy_limit": 1.0, "flush_bytes": 1 << 20}
GEMM = """#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    for (int64_t i = 0; i < c.shape[0]; ++i)
        for (int64_t j = 0; j < c.shape[1]; ++j) {
            double sum = START;
            for (int64_t k = 0; k < a.shape[1]; ++k)
                sum += (double)((const float *)a.data)[i * a.stride[0] + k * a.stride[1]]
                     * ((const float *)b.data)[k * b.stride[0] + j * b.stride[1]];
            ((float *)c.data)[i * c.stride[0] + j * c.stride[1]] = (float)sum;
        }
    return 0;
}
"""
STEPS = 4


def fenced(text: str) -> str:
    return f"PLAN: go on\n\n```cpp\n{text}```\n"


REPLIES = {
    1: fenced(GEMM.replace("START", "1.0")),
    2: "no kernel in this one",
    3: fenced(GEMM.replace("START", "0.00")),
    4: fenced(GEMM.replace("START", "0.00")),
}
"""A wrong kernel, none, a right one, and the same one again."""


@pytest.fixture
def real(task: Task) -> Task:
    root = KernelSource(
        surface=Surface.CPP, files=(SourceFile("kernel.cpp", GEMM.replace("START", "0.0")),), entry="run", label="root"
    )
    return msgspec.structs.replace(task, root=root)


def turn(task: Task, path: Path, exchange: Path, judge: Judge) -> OptimizationResult:
    """One go at the run: begun, or taken up where it waits."""
    backend = ExchangeBackend(
        exchange, Prices.load(), model="unbilled", poll_s=0.01, settle_s=0.0, deadline_s=1.0, waits=False
    )
    session = (
        Session.resume(path, backend, note=False)
        if path.exists()
        else Session.begin(path, backend, limit_usd=1.0, name="run")
    )
    with session:
        return optimize(task, CardMethod("generated-only"), session, judge, max_steps=STEPS)


def rounds(
    task: Task, path: Path, exchange: Path, folder: BatchFolder, cache: Path
) -> tuple[OptimizationResult, list[type]]:
    """Goes until it is done: prompts are answered and kernels judged after each."""
    gate = ExecutorGate(folder, "cpu", GateSettings(**QUICK))
    waited: list[type] = []
    while len(waited) < 4 * STEPS:
        try:
            return turn(task, path, exchange, gate.judge), waited
        except Waiting as waiting:
            waited.append(type(waiting))
            answer(exchange)
            judge_folder(folder, "cpu", cache_dir=cache)
    raise AssertionError("it does not end")


def answer(exchange: Path) -> None:
    for prompt in exchange.glob("*-prompt.md"):
        number = int(prompt.name[:4])
        prompt.with_name(f"{number:04d}-reply.md").write_text(REPLIES[number])


def content(path: Path) -> bytes:
    """A trajectory without the times at which things happened."""
    return re.sub(rb'"(at|seconds)":("[^"]*"|[\d.e-]+)', rb'"\1":0', path.read_bytes())


def test_rounds_make_the_trajectory_of_one_go(real: Task, tmp_path: Path) -> None:
    folder, cache = BatchFolder(tmp_path / "batch"), tmp_path / "cache"
    outcome, waited = rounds(real, tmp_path / "rounds.jsonl", tmp_path / "exchange", folder, cache)
    assert (outcome.stopped, len(outcome.observations)) == ("step_limit", STEPS + 1)
    assert waited == [
        WaitsForVerdict, WaitsForReply, WaitsForVerdict, WaitsForReply, WaitsForReply, WaitsForVerdict, WaitsForReply,
    ]  # fmt: skip
    assert folder.counts().done == 3

    verdicts = {request.source.digest: folder.lookup(request) for request in folder._requests() if request is not None}

    def replayed(case: KernelCase, source: KernelSource) -> Verdict:
        reply = verdicts[source.digest]
        assert reply is not None
        assert reply.verdict is not None
        return reply.verdict

    exchange = tmp_path / "exchange-2"
    one_go = tmp_path / "one.jsonl"
    again = in_one_go(real, one_go, exchange, replayed)
    assert content(one_go) == content(tmp_path / "rounds.jsonl")
    assert [seen.feedback for seen in again.observations] == [seen.feedback for seen in outcome.observations]


def in_one_go(task: Task, path: Path, exchange: Path, judge: Judge) -> OptimizationResult:
    """The same run, never interrupted: replies are written when it comes to wait for them."""

    class Answering(ExchangeBackend):
        def _await(self, answer_file: Path) -> bytes:
            answer(exchange)
            return super()._await(answer_file)

    backend = Answering(exchange, Prices.load(), model="unbilled", poll_s=0.01, settle_s=0.0, deadline_s=30.0)
    with Session.begin(path, backend, limit_usd=1.0, name="run") as session:
        return optimize(task, CardMethod("generated-only"), session, judge, max_steps=STEPS)


def test_waiting_is_no_end(real: Task, tmp_path: Path) -> None:
    """Nothing is recorded of it, however often the command is run."""
    path, gate = tmp_path / "run.jsonl", ExecutorGate(BatchFolder(tmp_path / "batch"), "cpu", GateSettings(**QUICK))
    contents = set()
    for _ in range(3):
        with pytest.raises(WaitsForVerdict):
            turn(real, path, tmp_path / "exchange", gate.judge)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    assert not [line for line in read_trajectory(path)[0] if type(line.event).__name__ in ("Stopped", "Judged")]


def test_a_reply_that_is_there_is_taken_at_once(real: Task, tmp_path: Path, judge: Callable[..., Verdict]) -> None:
    exchange = tmp_path / "exchange"
    root = msgspec.structs.replace(
        real, root=KernelSource(surface=Surface.CPP, files=(SourceFile("k.cpp", "// accepted.same 1\n"),), entry="run")
    )
    with pytest.raises(WaitsForReply) as waiting:
        turn(root, tmp_path / "run.jsonl", exchange, judge)
    assert waiting.value.where == str(exchange)
    (exchange / "0001-reply.md").write_text("// nothing")
    with pytest.raises(WaitsForReply, match=r"0002-reply\.md is not written yet"):
        turn(root, tmp_path / "run.jsonl", exchange, judge)
