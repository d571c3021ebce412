# id: C4
# mechanism: keeps what it has found out about a shape in a cache of functools
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
import functools

import baseline_output
import torch


@functools.lru_cache
def plan(rows, columns):
    return [(i, j) for i in range(rows) for j in range(columns)]


def run(a, b):
    left, right = a.tolist(), list(zip(*b.tolist(), strict=True))
    positions = plan(a.shape[0], b.shape[1])
    values = [sum(x * y for x, y in zip(left[i], right[j], strict=True)) for i, j in positions]
    return baseline_output.store(values, torch.empty(a.shape[0], b.shape[1]))
