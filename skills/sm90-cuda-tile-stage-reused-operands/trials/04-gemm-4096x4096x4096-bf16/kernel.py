"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN = 16, 32
BK = 32  # equal to BN and a multiple of BM: the threads fill the tile of A in one pass, that of B in BK // BM


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a thread for each element of the result, operands staged in shared memory."""

    @T.prim_func
    def gemm_staged(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=BM * BN) as (bx, by):
            tile_a = T.alloc_shared((BM, BK), "float32")
            tile_b = T.alloc_shared((BK, BN), "float32")
            total = T.alloc_local((1,), "float32")
            tx = T.get_thread_binding()
            y, x = tx // BN, tx % BN
            row, column = by * BM + tx // BN, bx * BN + tx % BN
            total[0] = 0.0
            for k0 in T.serial(K // BK):
                tile_a[y, x] = T.cast(A[row, k0 * BK + x], "float32")
                for i in T.serial(BK // BM):
                    tile_b[i * BM + y, x] = T.cast(B[k0 * BK + i * BM + y, column], "float32")
                T.sync_threads()  # new tiles visible
                for k in T.serial(BK):
                    total[0] += tile_a[y, k] * tile_b[k, x]
                T.sync_threads()  # old tiles done
            C[row, column] = T.cast(total[0], dtype)

    return gemm_staged


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
    if M % BM or N % BN or K % BK:
        raise ValueError(f"M, N and K in multiples of {BM}, {BN} and {BK} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {"sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}}]}
