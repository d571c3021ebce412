"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN, BK = 32, 32, 32

# Plain loads by all threads of the block: no bulk copies, no producer warps.
PASSES = {
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a thread for each element of the result, operand tiles in shared memory."""

    @T.prim_func
    def gemm_tiles(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=BM * BN) as (bx, by):
            tx = T.get_thread_binding()
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for s in T.serial(K // BK):
                T.copy(A[by * BM, s * BK], left)
                T.copy(B[s * BK, bx * BN], right)
                for k in T.serial(BK):
                    total[0] += T.cast(left[tx // BN, k], "float32") * T.cast(right[k, tx % BN], "float32")
            C[by * BM + tx // BN, bx * BN + tx % BN] = T.cast(total[0], dtype)

    return gemm_tiles


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
    (M, K), N = a.shape, b.shape[1]
    if M % BM or N % BN or K % BK:
        raise ValueError(f"M, N and K in multiples of {BM}, {BN} and {BK} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {"sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}, "pass_configs": PASSES}]}
