"""GEMM in Triton, naive: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, a 32x32 tile per warp, no pipeline."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 32
OPTIONS = {"num_warps": 1, "num_stages": 1}


@triton.jit
def gemm_naive(a, b, c, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK).to(tl.int64)
        left = tl.load(a + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        sums = tl.dot(left, right, sums)
    tl.store(c + m * N + n, sums.to(c.dtype.element_ty), mask=(m < M) & (n < N))


def run(a, b, out):
    """Compute out = a @ b for contiguous matrices of at least one element."""
    (M, K), N = a.shape, b.shape[1]
    gemm_naive[(triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))](a, b, out, M, N, K, BLOCK, **OPTIONS)


SPEC = {
    "kernel": gemm_naive,
    "signature": dict.fromkeys("abc", "*bf16:16") | dict.fromkeys("MNK", "i32:16"),
    "constexprs": {"BLOCK": BLOCK},
    "options": OPTIONS,
}
COMPILE = {"sm90": [SPEC], "sm120": [SPEC]}
