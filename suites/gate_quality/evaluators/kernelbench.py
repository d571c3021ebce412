"""A verdict as KernelBench's batch script comes to it (commit 423217d), written again. A process judges one kernel.

Five seeds, compared with the reference in its own precision (absolute and relative 1e-2 for 16-bit types). Then the
candidate and after it the reference: warm-up calls, one call that is thrown away, 100 calls, each from an idle device
with a cleared L2, between CUDA events. The mean, rounded to three significant digits.
"""

from __future__ import annotations

from typing import Any

from evaluators.problem import Clock, Judged, Problem, Request, Run, mean
from evaluators.process import serve

SEEDS = 5
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2}
"""Absolute and relative, by data type."""
WARMUP, REFERENCE_WARMUP = 3, 5
TRIALS = 100
CLEAR_BYTES = 256 << 20


class EventClock:
    """Every call by itself: wait, clear the L2, start, call, stop, wait."""

    name = "CUDA events"

    def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
        """Milliseconds; the first timed call is thrown away."""
        import torch

        new_event: Any = torch.cuda.Event
        for _ in range(warmup):
            run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        times = []
        for _ in range(count + 1):
            torch.cuda.synchronize()
            start, stop = new_event(enable_timing=True), new_event(enable_timing=True)
            clear_l2()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times.append(float(start.elapsed_time(stop)))
        return times[1:]


def clear_l2() -> None:
    """Fill memory that is new every time."""
    import torch

    torch.empty(CLEAR_BYTES // 8, dtype=torch.int64, device="cuda").fill_(1)


def judge(problem: Problem, clock: Clock) -> Judged:
    """Check, then time the candidate and the reference, one after the other, on one set of inputs."""
    for number in range(SEEDS):
        if why := difference(problem, number):
            return Judged(correct=False, why=why)
    inputs = problem.inputs(0)
    candidate = clock.samples(problem.candidate(inputs, problem.output()), warmup=WARMUP, count=TRIALS)
    reference = clock.samples(problem.reference(inputs, problem.output()), warmup=REFERENCE_WARMUP, count=TRIALS)
    reference_ms, candidate_ms = three_digits(mean(reference)), three_digits(mean(candidate))
    return Judged(
        correct=True, clock=clock.name, reference_ms=reference_ms, candidate_ms=candidate_ms,
        speedup=reference_ms / candidate_ms, reference_samples_ms=tuple(reference),
        candidate_samples_ms=tuple(candidate),
    )  # fmt: skip


def difference(problem: Problem, number: int) -> str:
    """How the candidate's output differs from the reference's on one set of inputs; empty when it is close enough."""
    import torch

    inputs, expected, actual = problem.inputs(number), problem.output(), problem.output()
    problem.reference(inputs, expected)()
    problem.candidate(inputs, actual)()
    if problem.device == "cuda":
        torch.cuda.synchronize()
    tolerance = TOLERANCES[problem.case.dtype]
    if torch.allclose(expected, actual, rtol=tolerance, atol=tolerance):
        return ""
    largest = float((expected.float() - actual.float()).abs().max())
    return f"seed {number}: the outputs differ by up to {largest:g}"


def three_digits(value: float) -> float:
    """Rounded to three significant digits."""
    return float(f"{value:.3g}")


def answer(request: Request) -> Judged:
    """Judge on the GPU."""
    return judge(Problem(request), EventClock())


if __name__ == "__main__":
    serve(Request, answer)
