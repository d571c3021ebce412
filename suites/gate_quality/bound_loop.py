"""A plain timing loop: python bound_loop.py OPERATOR LIBRARY ENTRY FLUSH_BYTES CALLS, prints milliseconds as JSON.

One side after the other in this process, whose OpenMP threads the environment binds: a flush, then a call between two
reads of the clock. Nothing is checked here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from pytest_klineage.operators import DEFAULT_REGIME, operator, paper_case
from pytest_klineage.records import KernelCase
from pytest_klineage.references import reference
from pytest_klineage.surfaces.native import NativeKernel
from pytest_klineage.worker.arena import SharedArena

WARMUP = 5


def filled(case: KernelCase) -> SharedArena:
    """Arguments of the case with random inputs."""
    chosen = operator(case.operator)
    arena = SharedArena(chosen.signature(case))
    made = chosen.make_inputs(case, torch.Generator().manual_seed(1), DEFAULT_REGIME)
    for name, tensor in arena.inputs(0).items():
        tensor.copy_(made[name])
    return arena


def timed(call: Callable[[], object], flush: numpy.ndarray, calls: int) -> list[float]:
    """Milliseconds of every call. The flush is by one thread, of another library than the calls'."""
    for _ in range(WARMUP):
        call()
    found = []
    for _ in range(calls):
        flush += 1.0
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e6)
    return found


def main(name: str, library: str, entry: str, flush_bytes: str, calls: str) -> None:
    """Time both sides and print them."""
    case = paper_case(name, "cpu", "torch")
    arena, flush = filled(case), numpy.zeros(int(flush_bytes) // 4, dtype=numpy.float32)
    inputs, outputs = arena.inputs(0), arena.outputs(0)
    run_reference = reference(case.reference).prepare(case)
    native = NativeKernel(Path(library), entry).bind(arena.memory, arena.arena.slots[0], arena.arena.scalars)
    found = {
        "reference": timed(lambda: run_reference(inputs, outputs), flush, int(calls)),
        "candidate": timed(native, flush, int(calls)),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
