"""Requests and their digests; replies that answer another request are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import BadRecord
from pytest_klineage.operators import make_case
from pytest_klineage.records import (
    Code,
    KernelSource,
    Reason,
    SourceFile,
    Surface,
    Verdict,
    from_json,
    to_json,
)
from pytest_klineage.records.case import Definition
from pytest_klineage.records.codec import finite_json
from pytest_klineage.records.judging import CarriedFile, FaultCode, JudgeReply, JudgeRequest, MachineFault

CASE = make_case("gemm", (8, 8, 8), "fp32", "torch")


def source(text: str = "one", label: str = "") -> KernelSource:
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), entry="run", label=label)


def request_for(**fields: Any) -> JudgeRequest:
    settings = {"precision": 0.01, "also_policies": ("paper",), "seed": None}
    return JudgeRequest(**({"case": CASE, "source": source(), "platform": "cpu", "settings": settings} | fields))


def verdict_on(request: JudgeRequest, **fields: Any) -> Verdict:
    reason = Reason(code=Code.MISMATCH, message="wrong", evidence={"error": float("inf")})
    base = Verdict(case=request.case, status=reason.code.status, reasons=(reason,), source_digest=request.source.digest)
    return msgspec.structs.replace(base, **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"case": make_case("gemm", (8, 8, 16), "fp32", "torch")},
        {"case": make_case("gemm", (8, 8, 8), "fp32", "torch", at_least=2.0)},
        {"source": source("two")},
        {"platform": "sm90"},
        {"settings": {"precision": 0.02, "also_policies": ("paper",), "seed": None}},
        {"reference_source": source("rival")},
        {"platforms": ("cpu",)},
        {"repeat": 1},
        {"screen_against": 1.0},
        {"files": (CarriedFile(name="refs.py", digest="0", text=""),)},
    ],
    ids=lambda change: "-".join(change),
)
def test_all_that_decides_a_verdict_is_in_the_digest(change: dict[str, Any]) -> None:
    assert request_for(**change).digest != request_for().digest


@pytest.mark.parametrize(
    "change",
    [
        {"priority": 5},
        {"source": source(label="another name")},
        {"files": (CarriedFile(name="ops.py", digest="0", text=""),)},
    ],
    ids=lambda change: "-".join(change),
)
def test_names_priorities_and_an_operators_file_are_not(change: dict[str, Any]) -> None:
    """The case has the digest of its operator's file."""
    case = msgspec.structs.replace(CASE, definition=Definition(source="ops.py:double", digest="0"))
    assert request_for(case=case, **change).digest == request_for(case=case).digest


def test_the_digest_survives_json() -> None:
    request = request_for(reference_source=source("rival"))
    again = from_json(to_json(request), JudgeRequest)
    assert (again.digest, again.reference_source) == (request.digest, request.reference_source)


def test_a_request_of_before_carries_nothing() -> None:
    plain = msgspec.json.decode(to_json(request_for()))
    assert plain.pop("files") == []
    old = from_json(msgspec.json.encode(plain), JudgeRequest)
    assert (old.files, old.digest) == ((), request_for().digest)


def test_a_reply_survives_json_with_infinite_errors() -> None:
    request = request_for()
    reply = JudgeReply(request=request.digest, verdict=verdict_on(request))
    again = from_json(finite_json(reply), JudgeReply)
    again.check_answers(request)
    assert again.verdict is not None
    assert again.verdict.reasons[0].evidence["error"] > 1e300


def test_a_reply_to_another_request_is_refused() -> None:
    request, other = request_for(), request_for(repeat=1)
    with pytest.raises(BadRecord, match=r"a reply to the request \w+ stands for"):
        JudgeReply(request=other.digest, verdict=verdict_on(other)).check_answers(request)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source_digest": source("two").digest}, "is about the kernel"),
        ({"case": make_case("gemm", (8, 8, 16), "fp32", "torch")}, "is about gemm"),
    ],
)
def test_a_verdict_on_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    request = request_for()
    with pytest.raises(BadRecord, match=said):
        JudgeReply(request=request.digest, verdict=verdict_on(request, **change)).check_answers(request)


def test_a_screening_is_no_full_judgement() -> None:
    """Nor is a full judgement a wrong answer to a request for a screening: a wrong kernel is never timed."""
    full, short = request_for(), request_for(screen_against=1.5)
    with pytest.raises(BadRecord, match="is a screening, and a full judgement"):
        JudgeReply(request=full.digest, verdict=verdict_on(full, screened=1.5)).check_answers(full)
    for screened in (1.5, None):
        JudgeReply(request=short.digest, verdict=verdict_on(short, screened=screened)).check_answers(short)


def test_a_reply_is_a_verdict_or_a_fault() -> None:
    request = request_for()
    fault = MachineFault(code=FaultCode.HARNESS, message="it broke")
    JudgeReply(request=request.digest, fault=fault).check_answers(request)
    for both in ({}, {"fault": fault, "verdict": verdict_on(request)}):
        with pytest.raises(BadRecord, match="and not both"):
            JudgeReply(request=request.digest, **both).check_answers(request)


def test_only_misuse_is_final() -> None:
    assert [code for code in FaultCode if MachineFault(code=code, message="").is_final] == [FaultCode.MISUSE]
