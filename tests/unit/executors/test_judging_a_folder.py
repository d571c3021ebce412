"""Judges of a folder, as processes, with the real gate on the cpu platform: nothing is lost, nothing judged twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.judge import read_seconds, status_line
from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.executors.base import verdict_of
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.executors.judging import judge_folder
from pytest_klineage.executors.local import LocalExecutor
from pytest_klineage.gate import Gate
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code
from pytest_klineage.records.judging import JudgeRequest

Ask = Callable[..., JudgeRequest]
Start = Callable[..., subprocess.Popen[str]]
LIMIT_S = 120.0
SLOW = "for (volatile int64_t spin = 0; spin < 2000000; ++spin) {}"
"""Some milliseconds in each call, so that a judgement lasts long enough to be cut."""
HANGS = "for (volatile int64_t spin = 0; ; ++spin) {}"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(folder: BatchFolder, cache: Path) -> Start:
    """Starts `pytest-klineage judge` in a session of its own, as a batch system does."""

    def judge(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pytest_klineage", "judge", str(folder.root), "--platform", "cpu"]
        return subprocess.Popen(
            [*command, "--cache-dir", str(cache), *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    return judge


def finished(process: subprocess.Popen[str]) -> str:
    """What it printed; it must end by itself, and well."""
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def replies(folder: BatchFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder.root / "reply").glob("*.json")}


def is_clean(folder: BatchFolder) -> bool:
    """No claim is left, and no half of a file."""
    names = [path.name for path in folder.root.rglob("*") if path.is_file()]
    return not list((folder.root / "claim").iterdir()) and not [name for name in names if name.endswith(".part")]


def test_a_round_is_judged_whatever_its_kernels_do(folder: BatchFolder, ask: Ask, start: Start) -> None:
    """A right one, a wrong one, one that hangs, one that crashes, one that is no C++: five verdicts, one judge."""
    requests = {
        "right": ask(),
        "wrong": ask("for (int64_t i = 0; i < 64; ++i) ((float *)c.data)[i] = 7; return 0;"),
        "hangs": ask(HANGS),
        "crashes": ask("*(volatile int *)8 = 1;"),
        "no code": ask("no code"),
        "against itself": ask(reference_source=ask().source),
    }
    for request in requests.values():
        folder.submit(request)
    output = finished(start())
    codes = {name: verdict_of(folder, request).code for name, request in requests.items()}
    right = codes.pop("right"), codes.pop("against itself")
    assert {code.status.value for code in right} <= {"accepted", "inconclusive"}
    assert codes == {
        "wrong": Code.MISMATCH, "hangs": Code.TIMEOUT_RUN, "crashes": Code.CRASH, "no code": Code.COMPILE,
    }  # fmt: skip
    assert output.count("cpu: gemm-") == len(requests)
    assert output.splitlines()[-1].endswith("0 open, 0 claimed, 6 done, 0 given up, 0 faults")
    assert is_clean(folder)
    assert finished(start()).count("cpu: gemm-") == 0


def test_a_judge_killed_while_it_times_loses_nothing(folder: BatchFolder, ask: Ask, start: Start) -> None:
    quick = [ask(f"// {number}") for number in range(2)]
    slow = ask(SLOW, settings={"time_limit_s": 6.0, "precision": 0.0001}, priority=-1)
    for request in (*quick, slow):
        folder.submit(request)
    process = start()
    until(lambda: len(replies(folder)) == len(quick) and folder.counts().claimed == 1)
    time.sleep(4.0)  # into the timed blocks
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = replies(folder)
    assert len(before) == len(quick)
    until(lambda: folder.counts().claimed == 0)
    shorter = start()
    until(lambda: folder.counts().faults == 1)
    output = finished(shorter)
    assert output.count("cpu: gemm-") == 1
    assert {name: data for name, data in replies(folder).items() if name in before} == before
    assert folder.lookup(slow).attempt == 2  # type: ignore[union-attr]  # it is there: three are done
    assert folder.counts().done == 3
    assert is_clean(folder)


def test_calls_that_are_cut_at_random_lose_nothing(folder: BatchFolder, ask: Ask, start: Start) -> None:
    """Whenever a judge is killed, what it has answered stays as it is, and the rest is judged by the next ones."""
    requests = [ask(f"// {number}", settings={"time_limit_s": 1.0, "precision": 0.0001}) for number in range(5)]
    for request in requests:
        folder.submit(request)
    kept: dict[str, bytes] = {}
    for _ in range(3):
        process = start()
        time.sleep(random.uniform(0.5, 7.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        now = replies(folder)
        assert {name: now[name] for name in kept} == kept
        kept = now
    until(lambda: folder.counts().claimed == 0)
    output = finished(start())
    assert output.count("cpu: gemm-") == len(requests) - len(kept)
    assert {name: data for name, data in replies(folder).items() if name in kept} == kept
    assert folder.counts().done == len(requests)
    assert all(verdict_of(folder, request).scored for request in requests)
    assert is_clean(folder)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_clean_folder(
    folder: BatchFolder, ask: Ask, start: Start, sent: signal.Signals
) -> None:
    folder.submit(ask(SLOW, settings={"time_limit_s": 30.0, "precision": 0.0001}))
    process = start()
    until(lambda: folder.counts().claimed == 1)
    time.sleep(1.0)
    os.killpg(process.pid, sent)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert (folder.counts().open, folder.counts().faults) == (1, 0)
    assert is_clean(folder)


def test_it_stops_before_the_limit(folder: BatchFolder, ask: Ask, start: Start) -> None:
    """One judgement would last longer than all the time there is: it is given up in time, and stays open."""
    folder.submit(ask(SLOW, settings={"time_limit_s": 60.0, "precision": 0.0001}))
    started = time.monotonic()
    finished(start("--for", "16s"))
    assert time.monotonic() - started < 20
    assert (folder.counts().open, folder.counts().faults) == (1, 0)
    assert is_clean(folder)


def test_nothing_is_begun_that_would_not_end(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    folder.submit(ask())
    ended = judge_folder(folder, "cpu", seconds=5, cache_dir=cache)
    assert (ended.judged, ended.in_time) == (0, False)
    assert folder.counts().open == 1


def test_a_judge_ends_with_who_started_it(folder: BatchFolder, ask: Ask, start: Start) -> None:
    for number in range(6):
        folder.submit(ask(f"// {number}", settings={"time_limit_s": 1.0, "precision": 0.0001}))
    process = start()
    until(lambda: len(replies(folder)) == 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)  # its pipe closes when the judge has ended, too
    assert 1 <= len(replies(folder)) <= 3
    assert is_clean(folder)


def test_two_judges_share_the_work(folder: BatchFolder, ask: Ask, start: Start) -> None:
    requests = [ask(f"// {number}") for number in range(6)]
    for request in requests:
        folder.submit(request)
    outputs = [finished(process) for process in [start(), start()]]
    assert [output.count("cpu: gemm-") for output in outputs] != [0, 0]
    assert sum(output.count("cpu: gemm-") for output in outputs) == len(requests)
    assert folder.counts().done == len(requests)


def test_what_cannot_be_is_a_fault_that_no_machine_repairs(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    odd = msgspec.structs.replace(ask(), settings={"precision": 7.0})
    foreign = msgspec.structs.replace(ask(), settings={"cache_dir": "elsewhere"})
    for request in (odd, foreign):
        folder.submit(request)
    assert judge_folder(folder, "cpu", cache_dir=cache).faults == 2
    for request, said in ((odd, "precision must lie between"), (foreign, "settings that no judge takes: cache_dir")):
        with pytest.raises(UsageError, match=said):
            verdict_of(folder, request)


def test_a_judge_refuses_what_is_for_another_platform(ask: Ask) -> None:
    reply = LocalExecutor("cpu").judge(ask(platform="sm90"))
    assert reply.fault is not None
    assert "the request asks for sm90" in reply.fault.message


def test_a_fault_of_the_machine_is_left_to_another_call(
    folder: BatchFolder, ask: Ask, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask()
    folder.submit(request)
    with monkeypatch.context() as broken:
        broken.setattr(LocalExecutor, "_gate_for", _broken)
        assert judge_folder(folder, "cpu", cache_dir=cache).faults == 1
    assert (folder.counts().open, folder.counts().faults) == (1, 1)
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 1
    assert folder.lookup(request).attempt == 2  # type: ignore[union-attr]  # it was judged one line above


def test_artifacts_that_were_built_ahead_are_used(folder: BatchFolder, ask: Ask, cache: Path, tmp_path: Path) -> None:
    request = ask("// built ahead")
    folder.submit(request)
    artifacts = folder.root / "artifacts"
    with Gate("cpu", GateSettings(stage="compile", artifacts=artifacts, cache_dir=tmp_path / "other")) as builder:
        built = builder.judge(request.case, request.source)
    assert built.code is Code.ACCEPTED_BUILT
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 1
    build = verdict_of(folder, request).build
    assert build is not None
    assert build.artifact


def test_the_local_executor_judges_at_once(ask: Ask, cache: Path) -> None:
    executor = LocalExecutor("cpu", GateSettings(cache_dir=cache))
    verdict = verdict_of(executor, ask())
    assert verdict.scored
    assert executor.machine().platform == "cpu"
    executor.close()


def test_the_state_of_a_folder_in_a_line(folder: BatchFolder, ask: Ask) -> None:
    folder.submit(ask(platform="sm90"))
    folder.submit(ask(platform="sm90", case=make_case("gemm", (16, 16, 16), "fp32", "torch")))
    assert status_line(folder).endswith("2 open, 0 claimed, 0 done, 0 given up, 0 faults; left: 2 for sm90")


@pytest.mark.parametrize(("text", "seconds"), [("8m", 480), ("90s", 90), ("90", 90), ("1.5h", 5400)])
def test_times(text: str, seconds: float) -> None:
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "8 m", "-1s", "8d"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="a time is written such as"):
        read_seconds(text)


def test_a_reply_with_a_fault_is_a_harness_error(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalExecutor, "_gate_for", _broken)
    with pytest.raises(HarnessError, match=r"could not be judged \(harness_failed, attempt 1\): the oracle died"):
        verdict_of(LocalExecutor("cpu"), ask())


def _broken(executor: LocalExecutor, request: JudgeRequest) -> Gate:
    raise HarnessError("the oracle died")


def test_a_relative_cache_is_one_of_this_process(
    folder: BatchFolder, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that load kernels have other working directories."""
    monkeypatch.chdir(tmp_path)
    request = ask("// relative")
    folder.submit(request)
    judge_folder(folder, "cpu", cache_dir=Path("cache"))
    assert verdict_of(folder, request).scored
