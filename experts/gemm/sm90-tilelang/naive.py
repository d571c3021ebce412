"""GEMM in TileLang, naive: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, a 64x64 tile per block, no pipeline."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T


def gemm(M, N, K, dtype="bfloat16", block=64, block_k=32, threads=128):
    """The TileLang program of one shape."""

    @T.prim_func
    def gemm_naive(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=threads) as (column, row):
            left = T.alloc_shared((block, block_k), dtype)
            right = T.alloc_shared((block_k, block), dtype)
            sums = T.alloc_fragment((block, block), "float32")
            T.clear(sums)
            for step in T.serial(T.ceildiv(K, block_k)):
                T.copy(A[row * block, step * block_k], left)
                T.copy(B[step * block_k, column * block], right)
                T.gemm(left, right, sums)
            T.copy(sums, C[row * block, column * block])

    return gemm_naive


@functools.cache
def compiled(M, N, K, dtype):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(gemm(M, N, K, dtype))


def run(a, b, out):
    """Compute out = a @ b for contiguous matrices."""
    compiled(a.shape[0], b.shape[1], a.shape[1], str(a.dtype).removeprefix("torch."))(a, b, out)


SPEC = {"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}}
COMPILE = {"sm90": [SPEC], "sm120": [SPEC]}
