"""A plain timing loop: python bound_loop.py OPERATOR LIBRARY ENTRY FLUSH_BYTES PAIRS, prints milliseconds as JSON.

Both sides in turns in this process, whose OpenMP threads the environment binds: a flush, then a call between two reads
of the clock. Nothing is checked here.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch

from pytest_klineage.operators import DEFAULT_DISTRIBUTION, operator, paper_case
from pytest_klineage.records import KernelCase
from pytest_klineage.references import reference
from pytest_klineage.surfaces.native import NativeKernel
from pytest_klineage.worker.host.arena import SharedArena

WARMUP = 5
PROCESSORS = {int(number) for number in re.findall(r"\d+", os.environ.get("OMP_PLACES", "0"))}
"""All that the threads are bound to; OpenMP has bound this one to its place when PyTorch was imported."""


def filled(case: KernelCase) -> SharedArena:
    """Arguments of the case with random inputs."""
    chosen = operator(case.operator)
    arena = SharedArena(chosen.signature(case))
    made = chosen.make_inputs(case, torch.Generator().manual_seed(1), DEFAULT_DISTRIBUTION)
    for name, tensor in arena.inputs(0).items():
        tensor.copy_(made[name])
    return arena


def timed(sides: Sequence[Callable[[], object]], flush: numpy.ndarray, pairs: int) -> list[list[float]]:
    """Milliseconds of every call of each side.

    In turns, first second second first: what slows a virtual machine for a second or two hits both alike. The flush is
    by this thread on another processor, as the gate's is by another process: operands lie in memory then, while the
    code that is called may still lie in its own processor's cache.
    """
    own = os.sched_getaffinity(0)
    other = PROCESSORS - own or PROCESSORS
    for side in sides:
        for _ in range(WARMUP):
            side()
    found: list[list[float]] = [[] for _ in sides]
    for number in range(pairs):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            os.sched_setaffinity(0, other)
            flush += 1.0
            os.sched_setaffinity(0, own)
            start = time.perf_counter_ns()
            sides[index]()
            found[index].append((time.perf_counter_ns() - start) / 1e6)
    return found


def main(name: str, library: str, entry: str, flush_bytes: str, pairs: str) -> None:
    """Time both sides and print them."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    case = paper_case(name, "cpu", "torch")
    arena, flush = filled(case), numpy.zeros(int(flush_bytes) // 4, dtype=numpy.float32)
    inputs, outputs = arena.inputs(0), arena.outputs(0)
    run_reference = reference(case.reference).prepare(case)
    native = NativeKernel(Path(library), entry).bind(arena.memory, arena.arena.slots[0], arena.arena.scalars)
    reference_ms, candidate_ms = timed((lambda: run_reference(inputs, outputs), native), flush, int(pairs))
    sys.stdout.write(json.dumps({"reference": reference_ms, "candidate": candidate_ms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
