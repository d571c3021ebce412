"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN = 8, 32


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a thread for each element of the result."""

    @T.prim_func
    def gemm_scalar(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=BM * BN) as (bx, by):
            tx = T.get_thread_binding()
            row, column = by * BM + tx // BN, bx * BN + tx % BN
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for k in T.serial(K):
                total[0] += T.cast(A[row, k], "float32") * T.cast(B[k, column], "float32")
            C[row, column] = T.cast(total[0], dtype)

    return gemm_scalar


@functools.cache
def compiled(M, N, K, dtype):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(gemm(M, N, K, dtype))


def run(a, b, out):
    """Compute out = a @ b. Raises ValueError for other types, strides and shapes."""
    if a.dtype not in NAMES or not a.dtype == b.dtype == out.dtype:
        raise ValueError(f"bf16 or fp16 only, all three the same; got {a.dtype}, {b.dtype}, {out.dtype}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError("row-major contiguous matrices only")
    (M, K), N = a.shape, b.shape[1]
    if M % BM or N % BN:
        raise ValueError(f"M and N in multiples of {BM} and {BN} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {"sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}}]}
