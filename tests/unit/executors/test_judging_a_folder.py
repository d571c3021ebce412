"""Judges of a folder, as processes, with the real gate on the cpu platform: nothing is lost, nothing judged twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pytest_klineage.cli.judge import devices_of, read_seconds, status_line
from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.executors.base import verdict_of
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.executors.judging import judge_folder, missing_memory, verdict_text, waits_text
from pytest_klineage.executors.local import LocalExecutor
from pytest_klineage.gate import Gate
from pytest_klineage.gate.host.gpus import NoGpu
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelSource, Reason, SourceFile, Status, Surface, Verdict
from pytest_klineage.records.judging import MOST_FAULTS, FaultCode, JudgeReply, JudgeRequest, MachineFault

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


def test_a_folder_is_copied_there_and_back(folder: BatchFolder, ask: Ask, cache: Path, tmp_path: Path) -> None:
    """Its copy is judged where the original is not; only replies and the machine's record come back."""
    requests = [ask("return 0;"), ask("no code")]
    for request in requests:
        folder.submit(request)
    shutil.copytree(folder.root, tmp_path / "there")
    there = BatchFolder(tmp_path / "there")
    assert judge_folder(there, "cpu", cache_dir=cache).judged == 2
    for name in {"reply", "fault", "machine"} & {path.name for path in there.root.iterdir()}:
        shutil.copytree(there.root / name, folder.root / name, dirs_exist_ok=True)
    codes = [verdict_of(folder, request).code for request in requests]
    assert codes == [verdict_of(there, request).code for request in requests]
    assert codes[1] is Code.COMPILE
    unwritten, broken = (verdict_of(folder, request) for request in requests)
    assert set(unwritten.waits_s) == {"oracle", "reference", "candidate", "lock"}
    assert 0 < sum(unwritten.waits_s.values()) <= unwritten.overhead_s
    assert set(broken.waits_s) == {"lock"}
    assert folder.machine("cpu").platform == "cpu"
    assert folder.open_requests("cpu") == []


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


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_calls_that_are_cut_at_random_lose_nothing(folder: BatchFolder, ask: Ask, start: Start, seed: int) -> None:
    """Killed, interrupted or cut off at drawn moments, some right after a reply: answers stay, none is given twice."""
    draw, named = random.Random(seed), [f"kernel-{number}" for number in range(5)]
    requests = [ask(f"// {name}", settings={"time_limit_s": 1.0, "precision": 0.0001}) for name in named]
    requests = [
        msgspec.structs.replace(request, source=msgspec.structs.replace(request.source, label=name))
        for request, name in zip(requests, named, strict=True)
    ]
    for request in requests:
        folder.submit(request)
    kept: dict[str, bytes] = {}
    printed, killed = "", 0
    for _ in range(4):
        process, before = start(), len(kept)
        if draw.random() < 0.5:
            until(lambda before=before: len(replies(folder)) > before or len(replies(folder)) == len(requests))
            time.sleep(draw.uniform(0.0, 0.05))
        else:
            time.sleep(draw.uniform(0.2, 6.0))
        sent = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        if killed == MOST_FAULTS - 1:  # all may have met the same request, which one more would give up
            sent = signal.SIGTERM
        if process.poll() is None:
            os.killpg(process.pid, sent)
            killed += sent is signal.SIGKILL
        printed += process.communicate(timeout=LIMIT_S)[0]
        now = replies(folder)
        assert {name: now[name] for name in kept} == kept
        assert folder.counts().refused == 0
        kept = now
    until(lambda: folder.counts().claimed == 0)
    last = finished(start())
    assert last.count("cpu: gemm-") == len(requests) - len(kept)
    assert {name: data for name, data in replies(folder).items() if name in kept} == kept
    assert all((printed + last).count(f"{name}:") <= 1 for name in named)
    assert (folder.counts().open, folder.counts().done) == (0, len(requests))
    assert folder.counts().faults <= killed
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


@pytest.mark.nightly
def test_it_stops_before_the_limit(folder: BatchFolder, ask: Ask, start: Start) -> None:
    """One judgement would last longer than all the time there is: it is given up in time, and stays open."""
    folder.submit(ask(SLOW, settings={"time_limit_s": 60.0, "precision": 0.0001}))
    started = time.monotonic()
    process = start("--for", "16s")
    until(lambda: folder.counts().claimed == 1)
    finished(process)
    assert time.monotonic() - started < 30
    assert (folder.counts().open, folder.counts().faults) == (1, 0)
    assert is_clean(folder)


def test_nothing_is_begun_that_would_not_end(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    folder.submit(ask())
    ended = judge_folder(folder, "cpu", seconds=5, cache_dir=cache)
    assert (ended.judged, ended.in_time) == (0, False)
    assert folder.counts().open == 1


def test_a_judge_ends_with_its_parent(folder: BatchFolder, ask: Ask, start: Start) -> None:
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


def test_judges_keep_to_different_cases(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    """Where another judge is at work on a case, other cases come first, but none of a lower priority."""
    wide, lines = make_case("gemm", (16, 8, 8), "fp32", "torch", at_least=1e-6), list[str]()
    asked = [ask(f"// {number}", case=wide) for number in range(2)] + [ask(), ask("// later", priority=-1)]
    for request in asked:
        folder.submit(request)
    claim = folder.claim(folder.open_requests("cpu")[0])
    assert claim is not None
    assert judge_folder(folder, "cpu", cache_dir=cache, tell=lines.append).judged == 3
    claim.release()
    assert [line.split()[1] for line in lines] == [asked[2].case.id, wide.id, asked[3].case.id]


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


def test_what_breaks_one_judgement_leaves_the_others(
    folder: BatchFolder, ask: Ask, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of ours that died, a GPU that is gone, or a mistake of ours: a fault that another call tries again."""
    errors = [HarnessError("the oracle died"), NoGpu("the driver shows none"), ValueError("counts differ")]
    broken = [ask(f"// {error}", priority=1) for error in errors]
    for request in (*broken, ask("return 0;")):
        folder.submit(request)
    raised = {request.digest: error for request, error in zip(broken, errors, strict=True)}
    gate_for = LocalExecutor._gate_for

    def failing(executor: LocalExecutor, request: JudgeRequest) -> Gate:
        if request.digest in raised:
            raise raised[request.digest]
        return gate_for(executor, request)

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "_gate_for", failing)
        ended = judge_folder(folder, "cpu", cache_dir=cache)
    assert (ended.judged, ended.faults) == (1, 3)
    assert (folder.counts().open, folder.counts().faults) == (3, 3)
    faults = {left.digest: (fault, given_up) for left, fault, given_up in folder.unjudged("cpu")}
    assert set(faults) == set(raised)
    for digest, (fault, given_up) in faults.items():
        assert (fault.code, given_up) == (FaultCode.HARNESS, False)
        assert str(raised[digest]) in fault.message.splitlines()[0]
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 3
    replies = [folder.lookup(request) for request in broken]
    assert [reply.attempt for reply in replies if reply is not None] == [2, 2, 2]


def test_what_this_machine_lacks_is_no_verdict(
    folder: BatchFolder, ask: Ask, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask("// without a compiler")
    folder.submit(request)
    with monkeypatch.context() as without:
        without.setenv("CXX", "no-such-compiler")
        assert judge_folder(folder, "cpu", cache_dir=cache).faults == 1
    ((_, fault, given_up),) = folder.unjudged("cpu")
    assert (fault.code, given_up) == (FaultCode.DEFINITION, False)
    assert "the C++ compiler that CXX names, 'no-such-compiler', is missing. Install it with: " in fault.message
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 1
    assert verdict_of(folder, request).build is not None


def test_memory_that_other_judges_may_have_taken_is_no_verdict(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    """Nor is a kernel's own error beside them: memory that could not be had is often behind it."""
    text = SourceFile("kernel.py", "def run(*tensors):\n    raise MemoryError\n")
    hungry = ask(source=KernelSource(surface=Surface.PYTHON, files=(text,), entry="run", label="hungry"))
    own_error = ask("return 1;")
    for request in (hungry, own_error):
        folder.submit(request)
    assert judge_folder(folder, "cpu", cache_dir=cache, shared=True).faults == 2
    assert (folder.counts().open, folder.counts().faults) == (2, 0)
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 2
    assert verdict_of(folder, hungry).code is Code.OUT_OF_MEMORY
    assert verdict_of(folder, own_error).code is Code.RETURNED_ERROR


@pytest.mark.parametrize(
    ("code", "message", "left"),
    [
        (Code.OUT_OF_MEMORY, "the kernel held 72.8 GiB of the GPU's memory; nothing was left to check it with", True),
        (Code.OUT_OF_MEMORY, "CUDA error: out of memory", True),
        (Code.OUT_OF_MEMORY, "the process was killed by the system: it needed more memory than there is", False),
        (Code.MISMATCH, "c is off", False),
    ],
)
def test_what_memory_of_a_gpu_may_explain(ask: Ask, code: Code, message: str, left: bool) -> None:
    request = ask()
    verdict = Verdict(
        case=request.case, status=code.status, reasons=(Reason(code=code, message=message),),
        surface=Surface.CPP, source_digest=request.source.digest,
    )  # fmt: skip
    assert (missing_memory(JudgeReply(request=request.digest, verdict=verdict)) == message) is left


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


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_requests_are_built_without_being_judged(
    folder: BatchFolder, ask: Ask, start: Start, cache: Path, tmp_path: Path, jobs: str
) -> None:
    """A right one with another in the reference's place, one that is no C++, and one for another platform."""
    rival, wrong = ask("// rival").source, ask("no code")
    right = ask("// mine", reference_source=rival)
    for request in (right, wrong, ask(platform="sm90")):
        folder.submit(request)
    output = finished(start("--build-only", "-n", jobs, "--cache-dir", str(tmp_path / "other")))
    assert output.count("accepted.built") == 2
    assert "build_error.compile" in output
    assert output.endswith(f"{folder.root}: 2 built, 1 not\n")
    assert (folder.counts().open, folder.counts().done, folder.counts().faults) == (3, 0, 0)
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 2
    build = verdict_of(folder, right).build
    assert build is not None
    assert build.artifact
    assert verdict_of(folder, wrong).code is Code.COMPILE


def test_every_platform_is_built_for_by_default(folder: BatchFolder, ask: Ask, tmp_path: Path) -> None:
    """A C++ kernel is for no GPU: that is said, and its request stays open."""
    for platform in ("cpu", "sm90"):
        folder.submit(ask(platform=platform))
    command = [sys.executable, "-m", "pytest_klineage", "judge", str(folder.root), "--build-only"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path)], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert "cpu: gemm-8x8x8-fp32 kernel: accepted.built\n" in done.stdout
    assert "sm90: gemm-8x8x8-fp32 kernel: skipped.platform: a cpp kernel does not run on sm90" in done.stdout
    assert done.stdout.endswith("1 built, 1 not\n")
    assert folder.counts().open == 2


def test_the_local_executor_judges_at_once(ask: Ask, cache: Path) -> None:
    executor = LocalExecutor("cpu", GateSettings(cache_dir=cache))
    request = ask()
    verdict = executor.judge(request).verdict
    assert verdict is not None
    assert verdict.scored
    assert executor.machine().platform == "cpu"
    executor.close()


def test_a_screening_goes_through_a_folder(folder: BatchFolder, ask: Ask, cache: Path) -> None:
    request = ask(screen_against=1e6)
    folder.submit(request)
    assert judge_folder(folder, "cpu", cache_dir=cache).judged == 1
    verdict = verdict_of(folder, request)
    assert (verdict.screened, verdict.ranked, verdict.scored) == (1e6, True, False)
    assert verdict_text(verdict).endswith("x (screened)")


def test_the_state_of_a_folder_in_a_line(folder: BatchFolder, ask: Ask) -> None:
    folder.submit(ask(platform="sm90"))
    folder.submit(ask(platform="sm90", case=make_case("gemm", (16, 16, 16), "fp32", "torch")))
    assert status_line(folder).endswith("2 open, 0 claimed, 0 done, 0 given up, 0 faults; left: 2 for sm90")


@pytest.mark.parametrize(("text", "seconds"), [("8m", 480), ("90s", 90), ("90", 90), ("1.5h", 5400)])
def test_times(text: str, seconds: float) -> None:
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "8 m", "-1s", "8d"])
def test_invalid_times(text: str) -> None:
    with pytest.raises(UsageError, match="a time is written such as"):
        read_seconds(text)


def test_a_reply_with_a_fault_is_a_harness_error(ask: Ask, tmp_path: Path) -> None:
    folder, fault = BatchFolder(tmp_path), MachineFault(code=FaultCode.HARNESS, message="the oracle died")
    for _ in range(MOST_FAULTS):
        folder.answer(JudgeReply(request=ask().digest, fault=fault))
    with pytest.raises(HarnessError, match=r"could not be judged \(harness_failed, attempt 3\): the oracle died"):
        verdict_of(folder, ask())


def test_a_relative_cache_is_one_of_this_process(
    folder: BatchFolder, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that load kernels have other working directories."""
    monkeypatch.chdir(tmp_path)
    request = ask("// relative")
    folder.submit(request)
    judge_folder(folder, "cpu", cache_dir=Path("cache"))
    assert verdict_of(folder, request).scored


@pytest.mark.parametrize("more", [("-n", "2"), ("--share", "2")])
def test_a_cpu_has_one_judge(folder: BatchFolder, start: Start, more: tuple[str, str]) -> None:
    folder.root.mkdir()
    process = start(*more)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "a CPU has one judge" in output


def test_judges_that_share_a_gpu_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: what the driver would name stands in."""
    gpus = [SimpleNamespace(index=index, uuid=f"GPU-{index}") for index in range(2)]
    monkeypatch.setattr("pytest_klineage.gate.host.gpus.gpus_for", lambda platform: gpus)
    found = [(name, environment["CUDA_VISIBLE_DEVICES"]) for name, environment in devices_of("sm90", None, 2)]
    assert found == [("gpu 0.0", "GPU-0"), ("gpu 1.0", "GPU-1"), ("gpu 0.1", "GPU-0"), ("gpu 1.1", "GPU-1")]
    assert [name for name, _ in devices_of("sm90", 1, 1)] == ["gpu 0"]
    with pytest.raises(UsageError, match="--share is 1 at least"):
        devices_of("sm90", None, 0)


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ({}, ""),
        ({"oracle": 0.99}, ""),
        ({"candidate": 1.0, "oracle": 0.2, "reference": 12.34}, ": reference 12.3, candidate 1.0"),
    ],
)
def test_long_waits_are_named(waits: dict[str, float], said: str, folder: BatchFolder, ask: Ask) -> None:
    verdict = Verdict(case=ask("return 0;").case, status=Status.ACCEPTED, reasons=(), surface="cpp", source_digest="")
    assert waits_text(msgspec.structs.replace(verdict, waits_s=waits)) == said
