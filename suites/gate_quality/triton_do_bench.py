"""What triton.testing.do_bench says of a reference, in a process of its own: one case in, one answer out, as JSON.

Started as `python -m triton_do_bench` by test_gpu_references.py, which then has the gate time the same call.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import msgspec
from evaluators.process import serve

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import KernelCase
from pytest_klineage.references import Variant, reference
from pytest_klineage.worker.reference_kernel import prepared_on_gpu, trial_of

if TYPE_CHECKING:
    from pytest_klineage.references import Trial
    from pytest_klineage.references.base import Call

WARMUP_MS, REP_MS = 25, 100


class CaseToTime(msgspec.Struct, frozen=True, kw_only=True):
    """Which reference is to be timed."""

    case: KernelCase
    platform: str


class DoBenched(msgspec.Struct, frozen=True, kw_only=True):
    """What do_bench measured, in milliseconds; or what is not installed."""

    milliseconds: float = 0.0
    """The median."""
    samples_ms: tuple[float, ...] = ()
    variant: str = ""
    """Which of the reference's variants was the fastest in this process."""
    triton: str = ""
    """Its version."""
    absent: str = ""
    """What is missing; then there are no samples."""


def timed(call: Call, trial: Trial, do_bench: Any) -> list[float]:
    """Milliseconds of every call, on inputs in the library's own convention, converted before."""
    inputs, outputs = trial.inputs, trial.outputs
    if isinstance(call, Variant):
        inputs = inputs if call.convert is None else call.convert(inputs)
        call = call.call

    def run() -> object:
        return call(inputs, outputs)

    # The median of all is what return_mode="median" gives; here the samples are kept too.
    return [float(sample) for sample in do_bench(run, warmup=WARMUP_MS, rep=REP_MS, return_mode="all")]


def answer(question: CaseToTime) -> DoBenched:
    """Prepare the reference as the gate's worker does, then time it."""
    case = question.case
    try:
        import triton
        import triton.testing

        call = prepared_on_gpu(case, question.platform)
    except (MissingDependency, ModuleNotFoundError) as error:
        return DoBenched(absent=str(error))
    samples = timed(call, trial_of(case, question.platform), triton.testing.do_bench)
    return DoBenched(
        milliseconds=statistics.median(samples), samples_ms=tuple(samples), triton=str(triton.__version__),
        variant=reference(case.reference).describe(case).get("variant", ""),
    )  # fmt: skip


if __name__ == "__main__":
    serve(CaseToTime, answer)
