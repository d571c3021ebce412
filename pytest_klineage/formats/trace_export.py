"""FlashInfer-Trace out: cases as definitions, kernels as solutions, verdicts as traces."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from pytest_klineage.formats.imported import Unsupported
from pytest_klineage.formats.trace_import import NATIVE, OURS, SHORT, parameters_of
from pytest_klineage.formats.trace_records import (
    Axis,
    BuildSpec,
    Evaluation,
    Solution,
    SolutionFile,
    Trace,
    TraceDefinition,
    TraceTensor,
    Workload,
    WorkloadInput,
)
from pytest_klineage.operators import OPERATORS, operator_of
from pytest_klineage.records import Code, KernelCase, KernelSource, Status, Verdict

LONG = {short: long for long, short in SHORT.items()}
STATUSES = {
    Status.WRONG_SHAPE: "INCORRECT_SHAPE", Status.WRONG_DTYPE: "INCORRECT_DTYPE", Status.TIMEOUT: "TIMEOUT",
    Status.WRONG_VALUE: "INCORRECT_NUMERICAL", Status.BUILD_ERROR: "COMPILE_ERROR",
    Status.RUNTIME_ERROR: "RUNTIME_ERROR", Status.CHEAT: "RUNTIME_ERROR", Status.WRAPPER: "RUNTIME_ERROR",
}  # fmt: skip
"""What is not scored. The format has no word for a cheat or a wrapper: the log says it."""
PASSED, INCORRECT = "PASSED", "INCORRECT_NUMERICAL"
UNKNOWN = "NaN"
"""As the format writes a number that is not known. The gate measures errors in units of rounding instead."""
SURFACES = {surface: language for language, surface in NATIVE.items() if language != "c++"}


def definition_name(case: KernelCase) -> str:
    """The name of a case's definition."""
    return f"klineage_{case.id}".replace("-", "_").replace("=", "_")


def definition_of(case: KernelCase) -> TraceDefinition:
    """A case as a definition, all axes fixed. Raises Unsupported where the format has no words for it."""
    chosen = operator_of(case)
    if not chosen.tensor_axes:
        known = ", ".join(name for name, other in OPERATORS.items() if other.tensor_axes)
        raise Unsupported(case.id, f"{case.operator} is not one call of PyTorch; known: {known}")
    if "layout" in case.options:
        raise Unsupported(case.id, f"the layout {case.options['layout']}: the format knows no strides")
    signature, sizes, tensors = chosen.signature(case), dict[str, int](), dict[str, TraceTensor]()
    for spec in (*signature.inputs, *signature.outputs):
        # Attention's keys may have fewer heads than its queries: such an axis is the tensor's own.
        axes = tuple(
            axis if sizes.setdefault(axis, size) == size else f"{axis}_{spec.name}"
            for axis, size in zip(chosen.tensor_axes[spec.name], spec.shape, strict=True)
        )
        sizes |= dict(zip(axes, spec.shape, strict=True))
        tensors[spec.name] = TraceTensor(shape=axes, dtype=LONG[spec.dtype])
    names = [spec.name for spec in signature.inputs]
    return TraceDefinition(
        name=definition_name(case), op_type=case.operator,
        axes={axis: Axis(type="const", value=size) for axis, size in sizes.items()},
        inputs={name: tensors[name] for name in names},
        outputs={spec.name: tensors[spec.name] for spec in signature.outputs},
        reference=f"import torch\n\n\ndef run({', '.join(names)}):\n    {chosen.in_torch(case, in_order=True)}\n",
    )  # fmt: skip


def workload_of(case: KernelCase) -> Workload:
    """The workload of a case's definition: every axis is fixed there, every input drawn at random."""
    names = [spec.name for spec in operator_of(case).signature(case).inputs]
    return Workload(axes={}, inputs={name: WorkloadInput(type="random") for name in names}, uuid=case.id)


def solution_of(source: KernelSource, case: KernelCase, platform: str, *, author: str = "pytest-klineage") -> Solution:
    """A kernel as a solution. Native ones name klineage.h, and their flags, among their dependencies.

    Raises Unsupported for a module without text, and for a function that takes several outputs as one tuple.
    """
    if source.main is None:
        raise Unsupported(source.label or source.module, "an installed module, which has no text")
    native = source.surface in SURFACES
    passes = not native and (parameters_of(source.main.text, source.entry) or ())[-1:] == ("out",)
    if passes and len(operator_of(case).signature(case).outputs) > 1:
        raise Unsupported(source.label or source.main.name, "it takes its outputs as one tuple")
    return Solution(
        name=f"{source.label or 'kernel'}_{source.digest[:12]}", definition=definition_name(case), author=author,
        spec=BuildSpec(
            language=SURFACES.get(source.surface, source.surface.value), target_hardware=(platform,),
            entry_point=f"{source.main.name}::{source.entry}", destination_passing_style=None if native else passes,
            dependencies=(OURS, *source.flags) if native else None,
        ),
        sources=tuple(SolutionFile(file.name, file.text) for file in source.files),
    )  # fmt: skip


def trace_of(verdict: Verdict, *, solution: str = "") -> Trace | None:
    """A verdict as a trace; None for a skip, which says nothing about a kernel.

    The interval, the reason and the error in the gate's own units are in `correctness.extra` and in the log.
    """
    if verdict.status is Status.SKIPPED or verdict.code is Code.ACCEPTED_BUILT:
        return None
    status = PASSED if verdict.scored else STATUSES.get(verdict.status, "RUNTIME_ERROR")
    return Trace(
        definition=definition_name(verdict.case), workload=workload_of(verdict.case),
        solution=solution or f"{verdict.label or 'kernel'}_{verdict.source_digest[:12]}",
        evaluation=Evaluation(
            status=status, environment=_environment(verdict), timestamp=verdict.judged_at or "unknown",
            log=f"{verdict.code.value}: {verdict.reasons[0].message}",
            correctness=_correctness(verdict) if status in (PASSED, INCORRECT) else None,
            performance=_performance(verdict) if status == PASSED else None,
        ),
    )  # fmt: skip


def traces_jsonl(verdicts: Iterable[Verdict]) -> bytes:
    """Verdicts as lines of JSON; skips are left out."""
    found = (trace_of(verdict) for verdict in verdicts)
    return b"".join(msgspec.json.encode(trace) + b"\n" for trace in found if trace is not None)


def _environment(verdict: Verdict) -> dict[str, Any]:
    machine = verdict.machine
    if machine is None:
        return {"hardware": "unknown", "libs": {}}
    return {"hardware": machine.device, "libs": dict(machine.software)}


def _correctness(verdict: Verdict) -> dict[str, Any]:
    worst = max((check.error / check.bound for check in verdict.checks if check.bound > 0), default=None)
    extra: dict[str, Any] = {"klineage_code": verdict.code.value, "klineage_checks": len(verdict.checks)}
    if worst is not None and math.isfinite(worst):
        extra["klineage_worst_error_over_bound"] = worst
    if verdict.timing is not None:
        speedup = verdict.timing.speedup
        extra |= {
            "klineage_speedup_low": speedup.low, "klineage_speedup_high": speedup.high,
            "klineage_confidence": speedup.confidence, "klineage_policy": verdict.timing.policy,
        }  # fmt: skip
    return {"max_relative_error": UNKNOWN, "max_absolute_error": UNKNOWN, "extra": extra}


def _performance(verdict: Verdict) -> dict[str, Any] | None:
    timing = verdict.timing
    if timing is None:
        return None
    return {
        "latency_ms": timing.candidate_ms, "reference_latency_ms": timing.reference_ms,
        "speedup_factor": timing.speedup.estimate,
    }  # fmt: skip
