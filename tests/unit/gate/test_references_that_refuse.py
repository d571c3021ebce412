"""A reference that does not take a case, in real processes: a verdict with the next step, and a clean start after it.

The workers' torch reference is a stand-in, which they import when they start; the number of rows says what it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from pytest_klineage.errors import HarnessError
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelCase, KernelSource, Status
from pytest_klineage.references import REFERENCES

Cpp = Callable[..., KernelSource]
Python = Callable[[str], KernelSource]

STAND_IN = """
from pytest_klineage.references import torch as own
from pytest_klineage.references.refusals import UnsupportedCase

right, versions, called = own.PREPARE["gemm"], own.TorchReference.versions, []


def prepare(case):
    rows = case.shape["M"]
    if rows == 65:
        raise UnsupportedCase("no variant of the reference runs: eager: RuntimeError: odd\\nrows")
    if rows == 66:
        raise ValueError("rows must come in fours")
    if rows == 67:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def call(inputs, outputs):
        called.append(rows)
        if rows == 68:
            raise NotImplementedError("addmm is not implemented for 68 rows")
        if rows == 69 and len(called) > 4:
            raise RuntimeError("addmm was interrupted")
        return right(case)(inputs, outputs)

    return call


own.PREPARE["gemm"] = prepare
own.TorchReference.versions = lambda self: {**versions(self), "version_note": "fla 9 runs; install 0.5.0"}
"""


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate whose workers have the stand-in."""
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    settings = GateSettings(
        time_limit_s=0.3,
        precision=0.3,
        busy_limit=1.0,
        spread_limit=1e6,
        seeds=2,
        flush_bytes=1 << 20,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    with pytest.MonkeyPatch.context() as patch, Gate("cpu", settings) as gate:
        patch.setenv("PYTHONPATH", paths)
        yield gate


def rows(count: int) -> KernelCase:
    return make_case("gemm", (count, 64, 64), "fp32", "torch", at_least=1e-6)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (65, "no variant of the reference runs: eager: RuntimeError: odd rows"),
        (66, "ValueError: rows must come in fours"),
        (68, "NotImplementedError: addmm is not implemented for 68 rows"),
    ],
    ids=["typed", "when-prepared", "when-called"],
)
def test_a_refusal_is_a_verdict_and_the_next_case_starts_afresh(
    count: int, said: str, refusing: Gate, cpp: Cpp
) -> None:
    assert refusing.judge(rows(64), cpp()).status is Status.ACCEPTED
    processes = refusing._context.processes
    before = {processes.oracle().process, processes.template("torch").process}
    verdict = refusing.judge(rows(count), cpp())
    assert (verdict.status, verdict.code) == (Status.SKIPPED, Code.SKIPPED_REFERENCE)
    assert verdict.reasons[0].message == (
        f"the reference torch cannot run gemm-{count}x64x64-fp32 on cpu: {said}; "
        "no other reference takes it on cpu: choose another case, or compare with a kernel (against=)"
    )
    assert (verdict.case, verdict.label) == (rows(count), "unit")
    assert all(process.poll() is not None for process in before)
    assert refusing.judge(rows(64), cpp()).status is Status.ACCEPTED


def test_a_kernel_in_its_place_is_the_step_that_helps(refusing: Gate, cpp: Cpp) -> None:
    assert refusing.judge(rows(65), cpp(), reference_source=cpp()).scored


@pytest.mark.parametrize(("count", "said"), [(67, "can't allocate memory"), (69, "addmm was interrupted")])
def test_a_fault_and_a_failure_after_it_ran_are_no_refusals(count: int, said: str, refusing: Gate, cpp: Cpp) -> None:
    with pytest.raises(HarnessError, match=rf"the reference torch failed: (?s:.*){said}"):
        refusing.judge(rows(count), cpp())


def test_a_kernel_that_takes_the_references_place_cannot_refuse(refusing: Gate, cpp: Cpp, python: Python) -> None:
    against = python("def run(a, b):\n    raise ValueError('not today')\n")
    with pytest.raises(HarnessError, match="not today"):
        refusing.judge(rows(64), cpp(), reference_source=against)


def test_another_version_is_a_note_on_the_verdict(refusing: Gate, cpp: Cpp) -> None:
    verdict = refusing.judge(rows(64), cpp())
    assert verdict.status is Status.ACCEPTED
    assert verdict.notes == ("fla 9 runs; install 0.5.0",)
    assert refusing.judge(rows(64), cpp(), reference_source=cpp()).notes == ()


def test_what_is_known_beforehand_starts_nothing(gate: Gate, cpp: Cpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(REFERENCES["torch"]), "limits", lambda *_: "it takes no gemm today")
    monkeypatch.setattr("pytest_klineage.gate.judge.Judgement", None)
    verdict = gate.judge(rows(64), cpp())
    assert verdict.code is Code.SKIPPED_REFERENCE
    assert "cannot run gemm-64x64x64-fp32 on cpu: it takes no gemm today; no other" in verdict.reasons[0].message


def test_the_next_step_names_who_takes_the_case(gate: Gate, cpp: Cpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "platform", "sm120")
    monkeypatch.setattr("pytest_klineage.surfaces.cpp.CppBackend.platforms", ("sm120",))
    case = make_case("fmha", (1, 1, 64, 256), "fp16", "cudnn")
    verdict = gate.judge(case, cpp())
    assert verdict.code is Code.SKIPPED_REFERENCE
    assert verdict.reasons[0].message == (
        "the reference cudnn cannot run fmha-1x1x64x256-fp16 on sm120: its attention takes D up to 128 in steps of 8, "
        "not 256; choose another ref=: torch, flashinfer, vendor"
    )
