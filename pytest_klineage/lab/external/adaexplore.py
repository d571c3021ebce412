"""AdaExplore's contract: a PyTorch module as problem and candidate, /evaluate, and its words for what was found."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_klineage.lab.external.contracts import decoded
from pytest_klineage.lab.external.evaluating import EvaluationTarget, SubmissionStep
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.operators import operator_of
from pytest_klineage.records import Check, KernelSource, SourceFile, Status, Surface, Verdict

CANDIDATE = "candidate.py"
ADAPTER = """\
from candidate import ModelNew

_model = ModelNew()


def run({arguments}):
    result = _model({arguments})
    return tuple(result) if isinstance(result, list) else result
"""
"""Constructors take nothing: our problems hand every tensor to forward."""
NOT_COMPILED = frozenset({Status.BUILD_ERROR})
WRONG = frozenset({Status.WRONG_VALUE, Status.WRONG_SHAPE, Status.WRONG_DTYPE, Status.CHEAT, Status.WRAPPER})
SHOWN_DIFFERENCES = 5


class EvaluationQuery(msgspec.Struct, frozen=True):
    """The fields of a request that matter here; the others describe how their own judge would measure."""

    custom_model_src: str
    original_model_src: str = ""


def asked(data: bytes) -> EvaluationQuery:
    """The body of a request. Raises Refused."""
    return decoded(data, EvaluationQuery, "the contract is a JSON object with custom_model_src")


def source_of(given: EvaluationQuery, target: EvaluationTarget) -> KernelSource:
    """The module as a kernel of the target: its forward is called with the case's inputs, in order. Raises Refused."""
    if target.surface not in (Surface.PYTHON, Surface.TRITON, Surface.TILELANG):
        raise Refused(
            Refusal.INVALID, f"/evaluate takes Python modules, and this run is about {target.surface} kernels"
        )
    if not given.custom_model_src.strip():
        raise Refused(Refusal.INVALID, "custom_model_src is empty")
    names = [spec.name for spec in operator_of(target.case).signature(target.case).inputs]
    adapter = SourceFile("adapter.py", ADAPTER.format(arguments=", ".join(names)))
    return KernelSource(
        surface=target.surface, files=(adapter, SourceFile(CANDIDATE, given.custom_model_src)), entry="run"
    )


def reply(step: SubmissionStep) -> dict[str, Any]:
    """What /evaluate answers, in the words of AdaExplore's own judge."""
    verdict = step.shown
    device = verdict.machine.device if verdict.machine is not None else ""
    metadata: dict[str, Any] = {"hardware": device, "device": device}
    timing = verdict.timing if verdict.status in RIGHT else None
    if timing is None:
        metadata |= _why(verdict, step.feedback)
    else:
        metadata["correctness_trials"] = f"({len(verdict.checks)} / {len(verdict.checks)})"
    return {
        "compiled": verdict.status not in NOT_COMPILED,
        "correctness": verdict.status in RIGHT,
        "metadata": metadata,
        "runtime": timing.candidate_ms if timing else -1.0,
        "runtime_stats": _stats(verdict, device) if timing else {},
    }  # fmt: skip


def failed(refused: Refused) -> dict[str, Any]:
    """The answer to a request that holds no kernel: its loop treats any HTTP error as a broken judge."""
    metadata = {"compilation_error": str(refused), "compilation_error_name": refused.refusal.value}
    return {"compiled": False, "correctness": False, "metadata": metadata, "runtime": -1.0, "runtime_stats": {}}


def _why(verdict: Verdict, feedback: str) -> dict[str, Any]:
    """Its keys for what is wrong; differences only for wrong values, because its memory of rules looks for them."""
    name = verdict.code.value
    if verdict.status in NOT_COMPILED:
        return {"compilation_error": feedback, "compilation_error_name": name}
    if verdict.status not in WRONG:
        return {"runtime_error": feedback, "runtime_error_name": name}
    found: dict[str, Any] = {"correctness_issue": feedback, "correctness_issue_name": name}
    wrong = [check for check in verdict.checks if not check.passed]
    if verdict.status is Status.WRONG_VALUE and wrong:
        found["max_difference"] = [_difference(check) for check in wrong[:SHOWN_DIFFERENCES]]
        passed = len(verdict.checks) - len(wrong)
        found["correctness_trials"] = f"({passed} / {len(verdict.checks)})"
    return found


def _difference(check: Check) -> str:
    """In units of an rounding error, not of the numbers themselves."""
    return f"{check.error:.6f}"


def _stats(verdict: Verdict, device: str) -> dict[str, Any]:
    timing = verdict.timing
    if timing is None:
        return {}
    return {
        "mean": timing.candidate_ms, "hardware": device, "device": device, "fast_p": timing.speedup.estimate,
        "baseline_time": timing.reference_ms, "baseline_type": "measured",
    }  # fmt: skip
