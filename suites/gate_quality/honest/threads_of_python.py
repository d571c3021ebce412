# id: C11
# mechanism: a pool of Python threads for the rows
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
from concurrent.futures import ThreadPoolExecutor

import baseline_output
import torch


def run(a, b):
    columns = list(zip(*b.tolist(), strict=True))
    with ThreadPoolExecutor(2) as pool:
        rows = pool.map(lambda row: [sum(x * y for x, y in zip(row, c, strict=True)) for c in columns], a.tolist())
        values = [value for row in rows for value in row]
    return baseline_output.store(values, torch.empty(a.shape[0], b.shape[1]))
