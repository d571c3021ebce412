"""GEMM in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape."""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN, KC = 16, 32, 64  # outputs of a block (one a thread), and the depth of the staged panels
VEC = 8  # elements of a panel row read at once
PAD = 8  # a row of B's panel is an odd count of 16-byte pieces
EA, EB = KC // BN, KC // BM  # elements that a thread brings into each panel


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape: a thread for each element of the result, panels in shared memory."""

    @T.prim_func
    def gemm_panels(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // BN, M // BM, threads=BM * BN) as (bx, by):
            tx = T.get_thread_binding()
            m, n = tx // BN, tx % BN
            A_panel = T.alloc_shared((BM, KC), dtype)
            B_panel = T.alloc_shared((BN, KC + PAD), dtype)
            A_fill = T.alloc_local((EA,), dtype)
            B_fill = T.alloc_local((EB,), dtype)
            A_piece = T.alloc_local((VEC,), dtype)
            B_piece = T.alloc_local((VEC,), dtype)
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for ko in T.serial(K // KC):
                # A is contiguous along k: the lanes of a warp take one row of the panel.
                for i in T.vectorized(EA):
                    A_fill[i] = A[by * BM + m, ko * KC + n * EA + i]
                # B is contiguous along its columns: the lanes of a warp take neighbouring columns.
                for i in T.unroll(EB):
                    B_fill[i] = B[ko * KC + m * EB + i, bx * BN + n]
                for i in T.vectorized(EA):
                    A_panel[m, n * EA + i] = A_fill[i]
                for i in T.vectorized(EB):
                    B_panel[n, m * EB + i] = B_fill[i]
                T.sync_threads()  # panels full
                for kk in T.serial(KC // VEC):
                    for i in T.vectorized(VEC):
                        A_piece[i] = A_panel[m, kk * VEC + i]
                    for i in T.vectorized(VEC):
                        B_piece[i] = B_panel[n, kk * VEC + i]
                    for i in T.unroll(VEC):
                        total[0] += T.cast(A_piece[i], "float32") * T.cast(B_piece[i], "float32")
                T.sync_threads()  # before refill
            C[by * BM + m, bx * BN + n] = T.cast(total[0], dtype)

    return gemm_panels


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
    if M % BM or N % BN or K % KC:
        raise ValueError(f"M, N and K in multiples of {BM}, {BN} and {KC} only, got {M}, {N}, {K}")
    compiled(M, N, K, NAMES[a.dtype])(a, b, out)


COMPILE = {"sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}}]}
