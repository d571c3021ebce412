"""GEMM for sm_90 in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape.

128x256x64 tiles on two consumer warpgroups, three stages of TMA loads by a producer that TileLang splits off, tiles in
panels of ten for L2, results through shared memory.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def gemm(M, N, K, dtype="bfloat16", block_m=128, block_n=256, block_k=64, stages=3, threads=256):
    """The TileLang program of one shape."""

    @T.prim_func
    def gemm_tile(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (column, row):
            left = T.alloc_shared((block_m, block_k), dtype)
            right = T.alloc_shared((block_k, block_n), dtype)
            result = T.alloc_shared((block_m, block_n), dtype)
            sums = T.alloc_fragment((block_m, block_n), "float32")
            T.use_swizzle(panel_size=10)
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                T.copy(A[row * block_m, step * block_k], left)
                T.copy(B[step * block_k, column * block_n], right)
                T.gemm(left, right, sums)
            T.copy(sums, result)
            T.copy(result, C[row * block_m, column * block_n])

    return gemm_tile


@functools.cache
def compiled(M, N, K, dtype):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(gemm(M, N, K, dtype))


def run(a, b, out):
    """Compute out = a @ b. Raises ValueError for other types and strides."""
    if a.dtype not in NAMES or not a.dtype == b.dtype == out.dtype:
        raise ValueError(f"bf16 or fp16 only, all three the same; got {a.dtype}, {b.dtype}, {out.dtype}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError("row-major contiguous matrices only")
    compiled(a.shape[0], b.shape[1], a.shape[1], NAMES[a.dtype])(a, b, out)


COMPILE = {"sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}}]}
