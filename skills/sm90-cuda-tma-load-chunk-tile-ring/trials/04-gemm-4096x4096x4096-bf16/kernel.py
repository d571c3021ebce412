"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN, BK, STAGES = 128, 128, 64, 4
PASSES = {}  # the defaults: TMA loads and stores, a producer warp group beside the consumers


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a tile a block."""

    @T.prim_func
    def gemm_tile(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=256) as (bx, by):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            staging = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            T.annotate_layout({staging: tilelang.layout.make_swizzled_layout(staging)})
            T.clear(sums)
            for step in T.Pipelined(K // BK, num_stages=STAGES):
                T.copy(A[by * BM, step * BK], left)
                T.copy(B[step * BK, bx * BN], right)
                T.gemm(left, right, sums)
            T.copy(sums, staging)
            T.copy(staging, C[by * BM, bx * BN])

    return gemm_tile


@functools.cache
def compiled(M, N, K, dtype):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(gemm(M, N, K, dtype), pass_configs=PASSES)


def run(a, b, out):
    """Compute out = a @ b. Raises ValueError for other types, strides and shapes."""
    if a.dtype not in NAMES or not a.dtype == b.dtype == out.dtype:
        raise ValueError(f"bf16 or fp16 only, all three the same; got {a.dtype}, {b.dtype}, {out.dtype}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError("row-major contiguous matrices only")
    if a.data_ptr() % 16 or b.data_ptr() % 16 or out.data_ptr() % 16:
        raise ValueError("matrices that start at a multiple of 16 bytes only")
    (M, K), N = a.shape, b.shape[1]
    if M % BM or N % BN or K % BK:
        raise ValueError(f"M, N and K in multiples of {BM}, {BN} and {BK} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {
    "sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}, "options": {"pass_configs": PASSES}}]
}
