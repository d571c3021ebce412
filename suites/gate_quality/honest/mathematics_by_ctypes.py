# id: C7
# mechanism: calls the C library's own functions by ctypes
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
import ctypes

import baseline_output
import torch

libm = ctypes.CDLL("libm.so.6")
libm.fma.restype = ctypes.c_double
libm.fma.argtypes = [ctypes.c_double] * 3


def dot(row, column):
    total = 0.0
    for x, y in zip(row, column, strict=True):
        total = libm.fma(x, y, total)
    return total


def run(a, b):
    columns = list(zip(*b.tolist(), strict=True))
    return baseline_output.store(
        [dot(row, c) for row in a.tolist() for c in columns], torch.empty(a.shape[0], b.shape[1])
    )
