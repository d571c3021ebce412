"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN, BK, STAGES = 128, 128, 64, 4
THREADS = 256
# The only shared exchange is the ring, which is ordered by its mbarriers and one explicit block barrier per slice.
PASSES = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


@T.macro
def load(A, B, left, right, full, row, col, step):
    """Fill the stage of one slice by TMA; all threads run this, one issues the copies."""
    T.copy(A[row * BM : (row + 1) * BM, step * BK : (step + 1) * BK], left[step % STAGES, :, :])
    T.copy(B[step * BK : (step + 1) * BK, col * BN : (col + 1) * BN], right[step % STAGES, :, :])
    T.mbarrier_arrive(full[step % STAGES])


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a tile a block."""

    @T.prim_func
    def gemm_tile(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=THREADS) as (bx, by):
            left = T.alloc_shared((STAGES, BM, BK), dtype)
            right = T.alloc_shared((STAGES, BK, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            full = T.alloc_barrier([THREADS] * STAGES)
            T.clear(sums)
            for step in T.serial(min(STAGES - 1, K // BK)):
                load(A, B, left, right, full, by, bx, step)
            for step in T.serial(K // BK):
                T.mbarrier_wait_parity(full[step % STAGES], step // STAGES % 2)
                T.sync_threads()  # all are done with slice step - 1: its stage is free
                if step + STAGES - 1 < K // BK:
                    load(A, B, left, right, full, by, bx, step + STAGES - 1)
                T.gemm(left[step % STAGES, :, :], right[step % STAGES, :, :], sums)
            T.copy(sums, C[by * BM, bx * BN])

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
    (M, K), N = a.shape, b.shape[1]
    if M % BM or N % BN or K % BK:
        raise ValueError(f"M, N and K in multiples of {BM}, {BN} and {BK} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {
    "sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}, "options": {"pass_configs": PASSES}}]
}
