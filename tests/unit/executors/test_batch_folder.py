"""A folder of requests: what is written when, who may judge, what is refused. Nothing is judged here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, HarnessError, UsageError, WaitsForVerdict
from pytest_klineage.executors.base import ExecutorGate, gate_settings, verdict_of
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.gate.settings import DEFENCES, MOST_CONFIDENCE, GateSettings
from pytest_klineage.records import Code, Machine, Reason, Verdict, from_json, to_json
from pytest_klineage.records.case import Definition
from pytest_klineage.records.judging import MOST_FAULTS, CarriedFile, FaultCode, JudgeReply, JudgeRequest, MachineFault

Ask = Callable[..., JudgeRequest]
HOLDER = """
import sys, time
from itertools import pairwise
from pathlib import Path
from pytest_klineage.executors.batch import BatchFolder
folder = BatchFolder(Path(sys.argv[1]))
claim = folder.claim(folder.open_requests("cpu")[0])
print("claimed" if claim else "refused", flush=True)
time.sleep(60)
"""


def answered(request: JudgeRequest, message: str = "wrong") -> JudgeReply:
    reason = Reason(code=Code.MISMATCH, message=message)
    verdict = Verdict(
        case=request.case, status=reason.code.status, reasons=(reason,), source_digest=request.source.digest
    )
    return JudgeReply(request=request.digest, verdict=verdict)


def faulty(request: JudgeRequest, code: FaultCode = FaultCode.HARNESS) -> JudgeReply:
    return JudgeReply(request=request.digest, fault=MachineFault(code=code, message="it broke", device="cpu"))


def holding(folder: BatchFolder) -> subprocess.Popen[str]:
    """Another process that has claimed the first request."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder.root)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    with process:
        os.kill(process.pid, signal.SIGKILL)


def test_a_request_waits_until_it_is_answered(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    with pytest.raises(WaitsForVerdict) as waiting:
        verdict_of(folder, request)
    assert waiting.value.where == str(folder.root)
    assert folder.open_requests("cpu") == [request]
    folder.answer(answered(request))
    assert verdict_of(folder, request).code is Code.MISMATCH
    assert folder.open_requests("cpu") == []


def test_two_names_of_one_kernel_share_a_verdict(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    other = msgspec.structs.replace(request, source=msgspec.structs.replace(request.source, label="mine"))
    folder.submit(request)
    folder.submit(other)
    folder.answer(answered(request))
    assert verdict_of(folder, other).label == "mine"
    assert folder.counts().done == 1


def test_the_first_reply_stays(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    folder.answer(answered(request, "first"))
    folder.answer(answered(request, "second"))
    assert verdict_of(folder, request).reasons[0].message == "first"


def test_a_replayed_reply_is_refused(folder: BatchFolder, ask: Ask) -> None:
    """An old verdict under the name of another request."""
    old, new = ask(), ask("// changed")
    folder.answer(answered(old))
    (folder.root / "reply" / f"{new.digest}.json").write_bytes(
        (folder.root / "reply" / f"{old.digest}.json").read_bytes()
    )
    with pytest.raises(BadRecord, match="is refused: a reply to the request"):
        verdict_of(folder, new)


def test_a_verdict_on_another_kernel_is_refused(folder: BatchFolder, ask: Ask) -> None:
    old, new = ask(), ask("// changed")
    folder.answer(msgspec.structs.replace(answered(old), request=new.digest))
    with pytest.raises(BadRecord, match="about the kernel"):
        verdict_of(folder, new)


def test_a_damaged_reply_is_refused(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.answer(answered(request))
    (folder.root / "reply" / f"{request.digest}.json").write_text('{"request": ')
    with pytest.raises(BadRecord, match="not a valid JudgeReply"):
        verdict_of(folder, request)


def test_a_request_with_a_wrong_name_is_not_judged(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    path = folder.root / "request" / f"{request.digest}.json"
    path.write_bytes(to_json(ask("// changed")))
    assert folder.open_requests("cpu") == []
    assert folder.counts().refused == 1


def test_other_platforms_are_left_to_their_judges(folder: BatchFolder, ask: Ask) -> None:
    folder.submit(ask(platform="sm90"))
    assert folder.open_requests("cpu") == []
    assert len(folder.open_requests("sm90")) == 1
    assert folder.counts().platforms == (("sm90", 1),)


def test_higher_priorities_come_first(folder: BatchFolder, ask: Ask) -> None:
    requests = [ask(f"// {number}", priority=number) for number in (1, 3, 2)]
    for request in requests:
        folder.submit(request)
    assert [request.priority for request in folder.open_requests("cpu")] == [3, 2, 1]


def test_what_failed_before_comes_last(folder: BatchFolder, ask: Ask) -> None:
    first, second = ask("// a", priority=1), ask("// b")
    for request in (first, second):
        folder.submit(request)
    folder.answer(faulty(first))
    assert folder.open_requests("cpu") == [second, first]


def test_one_judge_at_a_time(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    process = holding(folder)
    assert folder.claim(request) is None
    assert (folder.counts().open, folder.counts().claimed) == (0, 1)
    killed(process)
    claim = folder.claim(request)
    assert claim is not None
    claim.release()


def test_a_judge_that_died_is_a_fault_and_the_request_is_open(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    killed(holding(folder))
    assert folder.counts().open == 1
    claim = folder.claim(request)
    assert claim is not None
    assert folder.counts().faults == 1
    folder.answer(answered(request))
    claim.release()
    assert folder.lookup(request).attempt == 2  # type: ignore[union-attr]  # it was answered one line above


def test_a_request_that_kills_judges_is_given_up(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    for _ in range(MOST_FAULTS):
        killed(holding(folder))
    assert folder.claim(request) is None
    with pytest.raises(HarnessError, match="judge_died, attempt 3"):
        verdict_of(folder, request)
    assert folder.counts().failed == 1
    assert folder.retry() == 1
    assert folder.open_requests("cpu") == [request]


def test_a_released_claim_leaves_nothing(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    for _ in range(MOST_FAULTS + 1):
        claim = folder.claim(request)
        assert claim is not None
        claim.release()
        claim.release()
    assert list((folder.root / "claim").iterdir()) == []
    assert folder.counts().faults == 0


def test_faults_of_machines_are_retried_and_misuse_is_not(folder: BatchFolder, ask: Ask) -> None:
    broken, wrong = ask(), ask("// changed")
    for request in (broken, wrong):
        folder.submit(request)
    folder.answer(faulty(broken))
    folder.answer(faulty(wrong, FaultCode.MISUSE))
    assert folder.open_requests("cpu") == [broken]
    with pytest.raises(UsageError, match="it broke"):
        verdict_of(folder, wrong)
    with pytest.raises(WaitsForVerdict):
        verdict_of(folder, broken)


def test_an_open_request_carries_what_was_asked_last(folder: BatchFolder, ask: Ask) -> None:
    """One of before carries nothing; the run that asks again adds its operator's file, and takes none away."""
    case = msgspec.structs.replace(ask().case, definition=Definition(source="ops.py:double", digest="0"))
    none, first, second = (
        msgspec.structs.replace(ask(), case=case, files=files)
        for files in ((), *((CarriedFile(name="ops.py", digest=text, text=text),) for text in ("a", "b")))
    )
    for request, kept in ((none, ()), (first, first.files), (second, second.files), (none, second.files)):
        folder.submit(request)
        (found,) = folder.open_requests("cpu")
        assert found.files == kept
    folder.answer(answered(second))
    folder.submit(first)
    assert from_json((folder.root / "request" / f"{first.digest}.json").read_bytes(), JudgeRequest) == second


def test_what_faults_have_left_without_a_verdict(folder: BatchFolder, ask: Ask) -> None:
    requests = [ask(f"// {number}") for number in range(4)] + [ask(platform="sm90")]
    for request in requests:
        folder.submit(request)
    lost, wrong, judged, _, elsewhere = requests
    for request in (lost, judged, elsewhere):
        folder.answer(faulty(request, FaultCode.DEFINITION))
    folder.answer(faulty(wrong, FaultCode.MISUSE))
    folder.answer(answered(judged))
    left = {request.digest: (fault.code, given_up) for request, fault, given_up in folder.unjudged("cpu")}
    assert left == {lost.digest: (FaultCode.DEFINITION, False), wrong.digest: (FaultCode.MISUSE, True)}
    claim = folder.claim(lost)
    assert claim is not None
    assert [request for request, _, _ in folder.unjudged("cpu")] == [wrong]
    claim.release()


def test_half_written_files_are_not_read(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    folder.submit(request)
    for kind in ("request", "reply"):
        (folder.root / kind).mkdir(exist_ok=True)
        (folder.root / kind / f".{request.digest}.part").write_text("{")
    assert folder.open_requests("cpu") == [request]
    assert folder.lookup(request) is None


def test_requests_that_can_share_a_reference_follow_one_another(folder: BatchFolder, ask: Ask) -> None:
    cases = [msgspec.structs.replace(ask().case, max_spills=most) for most in (None, 0)]
    assert cases[0].id == cases[1].id
    for number in range(4):
        for case in cases:
            folder.submit(ask(f"// {number}", case=case, screen_against=1.0 if number else None))
    found = [(request.case.max_spills, request.screen_against) for request in folder.open_requests("cpu")]
    changes = sum(one != other for one, other in pairwise(most for most, _ in found))
    assert changes == 1
    assert [screen for _, screen in found] == 2 * [None, 1.0, 1.0, 1.0]


def test_the_gate_of_a_folder_asks_for_repetitions_apart(folder: BatchFolder, ask: Ask) -> None:
    request = ask()
    gate = ExecutorGate(folder, "cpu", GateSettings())
    for asking in (gate, gate.again(1), gate):
        with pytest.raises(WaitsForVerdict):
            asking.judge(request.case, request.source)
    assert sorted(found.repeat for found in folder.open_requests("cpu")) == [0, 1]


@pytest.mark.parametrize(("asked", "taken"), [(0.2, 0.2), (0.9, 0.5), (None, 0.5)])
def test_a_narrower_precision_travels(folder: BatchFolder, ask: Ask, asked: float | None, taken: float) -> None:
    """As the gate itself does, it takes the narrower one of the session's and the caller's."""
    request = ask()
    gate = ExecutorGate(folder, "cpu", GateSettings(precision=0.5))
    with pytest.raises(WaitsForVerdict):
        gate.judge(request.case, request.source, precision=asked)
    (found,) = folder.open_requests("cpu")
    assert found.settings["precision"] == taken


def test_the_machine_is_that_of_the_judge(folder: BatchFolder) -> None:
    gate = ExecutorGate(folder, "sm90", GateSettings())
    with pytest.raises(WaitsForVerdict, match=r"does not know its sm90 machine yet: .* judge .* --platform sm90"):
        gate.machine()
    assert folder.root.is_dir(), "the judge that the message asks for takes no folder that is not there"
    folder.note_machine(Machine(platform="sm90", device="NVIDIA H200"))
    folder.note_machine(Machine(platform="sm90", device="NVIDIA H100"))
    assert gate.machine().device == "NVIDIA H100"


def test_defences_cannot_be_switched_off_elsewhere(folder: BatchFolder) -> None:
    with pytest.raises(UsageError, match="has all defences"):
        ExecutorGate(folder, "cpu", GateSettings(defences=DEFENCES - {"audit"}))


def test_a_request_for_more_confidence_is_judged_with_the_most(ask: Ask) -> None:
    """It was valid when it was recorded, and keeps its name; an option that asks for it is refused."""
    recorded = msgspec.structs.replace(ask(), settings=ask().settings | {"confidence": 0.999})
    again = from_json(to_json(recorded), JudgeRequest)
    assert gate_settings(again, GateSettings()).confidence == MOST_CONFIDENCE
    assert again.digest == recorded.digest
    with pytest.raises(UsageError, match="confidence must lie between"):
        GateSettings(confidence=0.999)
