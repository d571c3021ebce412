"""A verdict as flashinfer-bench comes to it (commit 40e6ca7), written again. One process judges many kernels.

This source is later than the release that pip installs, which times otherwise: flashinfer_bench_tool.py drives that.

The baseline first: three sets of inputs, the reference's outputs and times. Then the candidate: outputs of the right
shape and type, finite, with no element whose absolute and relative error both exceed 1e-2; 10 warm-up calls and 50
timed ones on each set. The median of each set, the mean of the medians.

The tool keeps one baseline for many candidates, and has it in the process beside the candidate's. Here every verdict
makes its own, or all speedups would share one measurement, and both are in one process.
"""

from __future__ import annotations

import functools
import statistics
from itertools import chain
from typing import TYPE_CHECKING

from evaluators.clocks import ClockFailure, QueuedClock, best_clock
from evaluators.problem import Clock, Judged, Problem, Request, mean
from evaluators.process import serve

if TYPE_CHECKING:
    import torch

    from evaluators.problem import Tensors

SETS = 3
WARMUP, ITERATIONS = 10, 50
ABSOLUTE, RELATIVE = 1e-2, 1e-2


def judge(problem: Problem, clock: Clock) -> Judged:
    """Make the baseline, check the candidate on every set, time it on every set."""
    sets = [problem.inputs(number) for number in range(SETS)]
    expected = [problem.output() for _ in sets]
    for inputs, output in zip(sets, expected, strict=True):
        problem.reference(inputs, output)()
    scratch = problem.output()
    reference = [clock.samples(problem.reference(inputs, scratch), warmup=WARMUP, count=ITERATIONS) for inputs in sets]
    for number, (inputs, output) in enumerate(zip(sets, expected, strict=True)):
        if why := objection(problem, inputs, output):
            return Judged(correct=False, why=f"set {number}: {why}", clock=clock.name)
    candidate = [clock.samples(problem.candidate(inputs, scratch), warmup=WARMUP, count=ITERATIONS) for inputs in sets]
    reference_ms = mean([statistics.median(samples) for samples in reference])
    candidate_ms = mean([statistics.median(samples) for samples in candidate])
    return Judged(
        correct=True, clock=clock.name, reference_ms=reference_ms, candidate_ms=candidate_ms,
        speedup=reference_ms / candidate_ms, reference_samples_ms=tuple(chain.from_iterable(reference)),
        candidate_samples_ms=tuple(chain.from_iterable(candidate)),
    )  # fmt: skip


def objection(problem: Problem, inputs: Tensors, expected: torch.Tensor) -> str:
    """What is wrong with the candidate's output on one set of inputs; empty when nothing is."""
    import torch

    actual = problem.output()
    problem.candidate(inputs, actual)()
    if problem.device == "cuda":
        torch.cuda.synchronize()
    return mismatch(actual, expected)


def mismatch(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Shape, type, non-finite numbers, then errors beyond both bounds; empty when all is well."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if not bool(actual.isfinite().all()):
        return "a number that is not finite"
    error = (actual.float() - expected.float()).abs()
    wrong = (error > ABSOLUTE) & (error > RELATIVE * expected.float().abs())
    count = int(wrong.sum())
    return f"{count} elements beyond both bounds, by up to {float(error.max()):g}" if count else ""


@functools.cache
def clock_of_this_process() -> Clock:
    """Chosen at the first verdict and kept."""
    return best_clock()


def answer(request: Request) -> Judged:
    """Judge on the GPU; by events where CUPTI fails on these kernels, which the verdict's clock then says."""
    problem = Problem(request)
    try:
        return judge(problem, clock_of_this_process())
    except ClockFailure as failure:
        return judge(problem, QueuedClock(str(failure)[:200]))


if __name__ == "__main__":
    serve(Request, answer)
