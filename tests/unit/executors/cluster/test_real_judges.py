"""Real judges of a simulated cluster: what is killed, lost, hanging or hostile costs no verdict and gives no other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest

from pytest_klineage.executors.base import verdict_of
from pytest_klineage.executors.ray import RayExecutor
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.records import Code, Status
from pytest_klineage.records.judging import JudgeRequest

from .conftest import Nodes, finish, judged_lines, judges, until

Ask = Callable[..., JudgeRequest]
Join = Callable[..., RayExecutor]
SLOW = "for (volatile int64_t spin = 0; spin < 2000000; ++spin) {}"
LONG = {"time_limit_s": 6.0, "precision": 0.0001}
HOSTILE = {
    "hangs": "for (volatile int64_t spin = 0; ; ++spin) {}",
    "forks": "for (;;) fork();",
    "fills the disk": 'FILE *f = fopen("/tmp/klineage-fill", "w"); for (;;) fwrite(c.data, 1, 64, f);',
    "reads the secret": 'FILE *f = fopen("SECRET", "r"); if (f || getenv("KLINEAGE_JUDGE_SECRET_FILE")'
    ' || getenv("RAY_AUTH_TOKEN_PATH")) return 0;',
}
HEADERS = "#include <cstdio>\n#include <cstdlib>\n#include <unistd.h>\n"


@pytest.fixture(scope="module", autouse=True)
def long_enough(nodes: Nodes) -> None:
    """The cluster starts before a test's own time begins."""


def hostile(ask: Ask, before: str) -> JudgeRequest:
    request = ask(before)
    source = request.source
    file = msgspec.structs.replace(source.files[0], text=HEADERS + source.files[0].text)
    return msgspec.structs.replace(request, source=msgspec.structs.replace(source, files=(file,)))


def test_verdicts_are_those_of_one_process(join: Join, ask: Ask, nodes: Nodes, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]  # pytest's own
    """Right, wrong and broken kernels, and hostile ones whose judge lives on; built on CPUs, taken by their digest."""
    executor = join()
    asked = {name: hostile(ask, text.replace("SECRET", str(nodes.folder / "secret"))) for name, text in HOSTILE.items()}
    asked |= {"right": ask(), "wrong": ask("return 0;"), "broken": ask("no code")}
    for request in asked.values():
        executor.submit(request)
    finish(executor)
    codes = {name: verdict_of(executor, request).code for name, request in asked.items()}
    # On a busy machine a right kernel may be inconclusive. One that had read a secret would not write its output.
    right = {codes.pop(name).status for name in ("right", "reads the secret")}
    assert right <= {Status.ACCEPTED, Status.INCONCLUSIVE}
    with Gate("cpu", GateSettings(cache_dir=tmp_path_factory.mktemp("cache"), **QUICK)) as gate:
        local = {name: gate.judge(asked[name].case, asked[name].source).code for name in codes}
    assert {name: code.status for name, code in codes.items()} == {name: code.status for name, code in local.items()}
    replies = [executor.lookup(request) for request in asked.values()]
    assert {reply.attempt for reply in replies if reply} == {1}
    builds = {reply.verdict.build.artifact for reply in replies if reply and reply.verdict and reply.verdict.build}
    assert len(builds - {""}) == len(asked) - 1
    assert codes["broken"] is Code.COMPILE
    assert [reply.judge for reply in replies if reply and reply.verdict and reply.verdict.code is Code.COMPILE] == [
        "build"
    ]
    assert {judge.faults for judge in judges(executor)} == {0}


def test_a_judge_killed_while_it_times(join: Join, ask: Ask, nodes: Nodes) -> None:
    executor = join()
    slow = ask(SLOW, settings=LONG)
    executor.submit(slow)
    until(lambda: executor.collect(0.1) or judges(executor, "judging"))
    (first,) = judges(executor, "judging")
    time.sleep(3.0)  # into the timed blocks
    (pid,) = [pid for pid in nodes.judge_pids("Judge") if first.name in process_files(pid)]
    os.kill(pid, signal.SIGKILL)
    finish(executor)
    reply = executor.lookup(slow)
    assert reply is not None
    assert reply.verdict is not None
    assert reply.attempt == 2
    assert reply.judge != first.name
    assert judged_lines(nodes).count(slow.digest) == 1


def test_a_node_that_is_lost(join: Join, ask: Ask, nodes: Nodes) -> None:
    executor = join()
    slow = ask(SLOW + "// lost", settings=LONG)
    executor.submit(slow)
    until(lambda: executor.collect(0.1) or judges(executor, "judging"))
    (first,) = judges(executor, "judging")
    (node,) = [node for node in nodes.cluster.worker_nodes if node.node_id == first.node]
    nodes.cluster.remove_node(node, allow_graceful=False)
    try:
        finish(executor)
    finally:
        nodes.add("")
    reply = executor.lookup(slow)
    assert reply is not None
    assert reply.verdict is not None
    assert reply.attempt == 2
    assert reply.judge != first.name
    until(lambda: first.node not in {judge.node for judge in judges(executor)})


def process_files(pid: int) -> str:
    """Names of the files that a process has open."""
    folder = f"/proc/{pid}/fd"
    return " ".join(
        os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")
    )


QUICK = {"time_limit_s": 0.3, "precision": 0.5, "seeds": 1, "busy_limit": 1.0, "run_timeout_s": 2.0}
