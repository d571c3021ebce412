"""What triton.testing.do_bench says of a reference, in a process of its own: one case in, one answer out, as JSON.

Started as `python -m triton_do_bench` by test_gpu_references.py, which then has the gate time the same call. It is
timed plainly first, then with what the gate does differently: on several inputs, and on a stream of its own.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import msgspec
from evaluators.process import serve

from pytest_klineage.errors import MissingDependency
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, operator_of
from pytest_klineage.records import KernelCase
from pytest_klineage.references import Variant, reference
from pytest_klineage.worker.reference_kernel import TRIAL_SEED, prepared_on_gpu, trial_of

if TYPE_CHECKING:
    import torch

    from pytest_klineage.references import TrialTensors
    from pytest_klineage.references.base import Call

WARMUP_MS, REP_MS = 25, 100
OTHER_INPUTS = 8
"""So many sets of inputs of other seeds are timed on a stream of their own."""


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
    others_ms: tuple[float, ...] = ()
    """The medians of other inputs, on a stream of their own; a record older than these has none."""

    @property
    def like_the_gate_ms(self) -> float | None:
        """The median of those medians; None where there are none."""
        return statistics.median(self.others_ms) if self.others_ms else None


def timed(call: Call, trial: TrialTensors, do_bench: Any) -> list[float]:
    """Milliseconds of every call, on inputs in the library's own convention, converted before."""
    inputs, outputs = trial.inputs, trial.outputs
    if isinstance(call, Variant):
        inputs = inputs if call.convert is None else call.convert(inputs)
        call = call.call

    def run() -> object:
        return call(inputs, outputs)

    # The median of all is what return_mode="median" gives; here the samples are kept too.
    return [float(sample) for sample in do_bench(run, warmup=WARMUP_MS, rep=REP_MS, return_mode="all")]


def times_of_others(
    call: Call, case: KernelCase, trial: TrialTensors, do_bench: Any, stream: torch.cuda.Stream | None
) -> tuple[float, ...]:
    """The median of each of some other inputs, on the stream: do_bench fills, calls and records on the current one."""
    import torch

    medians = []
    for seed in range(TRIAL_SEED + 1, TRIAL_SEED + 1 + OTHER_INPUTS):
        refill(trial, case, seed)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        # A stream of None changes nothing. do_bench waits for the device at its end: the next refill comes after it.
        with torch.cuda.stream(stream):
            medians.append(statistics.median(timed(call, trial, do_bench)))
    return tuple(medians)


def refill(trial: TrialTensors, case: KernelCase, seed: int) -> None:
    """Overwrite the inputs with those of another seed, made as `trial_of` makes its own; there is one set at a time."""
    import torch

    random = torch.Generator(trial.device).manual_seed(seed)
    made = operator_of(case).make_inputs(case, random, DEFAULT_DISTRIBUTION)
    for name, tensor in trial.inputs.items():
        tensor.copy_(made[name])


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Another stream than the default one, as the gate's worker has; None on a CPU."""
    import torch

    # torch has no types here.
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def answer(question: CaseToTime) -> DoBenched:
    """Prepare the reference as the gate's worker does, once; then time it, plainly first."""
    case = question.case
    try:
        import triton
        import triton.testing

        call = prepared_on_gpu(case, question.platform)
    except (MissingDependency, ModuleNotFoundError) as error:
        return DoBenched(absent=str(error))
    trial, do_bench = trial_of(case, question.platform), triton.testing.do_bench
    samples = timed(call, trial, do_bench)
    others = times_of_others(call, case, trial, do_bench, new_stream(trial.device))
    return DoBenched(
        milliseconds=statistics.median(samples), samples_ms=tuple(samples), triton=str(triton.__version__),
        variant=reference(case.reference).describe(case).get("variant", ""), others_ms=others,
    )  # fmt: skip


if __name__ == "__main__":
    serve(CaseToTime, answer)
