"""GEMM for sm_90 in Triton: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation, any M, N and K.

128x256x64 tiles on two warpgroups, four stages. Where rows are multiples of 16 bytes, tiles come and go by TMA through
tensor descriptors, which fill what lies outside with zeros and drop it when storing; elsewhere they come by masked
loads. Tiles are walked in bands of eight rows, so that the blocks that run together share their rows and columns in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_M, BLOCK_N, BLOCK_K, BAND = 128, 256, 64, 8
MASKED_N = 128
"""Columns of a tile that is loaded by pointers: their addresses take registers."""
SIZES = ("M", "N", "K")
"""One build serves all shapes: neither kernel gains by knowing that a size is divisible by 16."""
OPTIONS = {"num_warps": 8, "num_stages": 4}
MASKED_OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def tile_at(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """Row and column of a block's tile: in bands of BAND rows, column by column inside of a band."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = index // (BAND * columns) * BAND
    height = tl.minimum(rows - first, BAND)
    inside = index % (BAND * columns)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=SIZES)
def gemm_tma(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    row, column = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, BAND)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        sums = tl.dot(a.load([row * BLOCK_M, k]), b.load([k, column * BLOCK_N]), sums)
    c.store([row * BLOCK_M, column * BLOCK_N], sums.to(c.dtype))


@triton.jit(do_not_specialize=SIZES)
def gemm_masked(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    row, column = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, BAND)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = column * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        left = tl.load(a + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        sums = tl.dot(left, right, sums)
    tl.store(c + m * N + n, sums.to(c.dtype.element_ty), mask=(m < M) & (n < N))


def run(a, b, out):
    """Compute out = a @ b. Raises ValueError for other types, shapes and strides."""
    if a.dtype not in (torch.bfloat16, torch.float16) or not a.dtype == b.dtype == out.dtype:
        raise ValueError(f"bf16 or fp16 only, all three the same; got {a.dtype}, {b.dtype}, {out.dtype}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError("row-major contiguous matrices only")
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K or tuple(out.shape) != (M, N):
        raise ValueError(f"shapes do not match: {tuple(a.shape)} x {tuple(b.shape)} = {tuple(out.shape)}")
    if M == 0 or N == 0:
        return
    aligned = K > 0 and N % 8 == 0 and K % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, out))
    if aligned:
        grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
        tiles = (
            TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]),
            TensorDescriptor.from_tensor(b, [BLOCK_K, BLOCK_N]),
            TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N]),
        )
        gemm_tma[grid](*tiles, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, BAND, **OPTIONS)
    else:
        grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, MASKED_N),)
        gemm_masked[grid](a, b, out, M, N, K, BLOCK_M, MASKED_N, BLOCK_K, BAND, **MASKED_OPTIONS)


TILE = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "BAND": BAND}
COMPILE = {
    "sm90": [
        {
            "kernel": gemm_tma,
            "signature": {
                "a": "tensordesc<bf16[128, 64]>", "b": "tensordesc<bf16[64, 256]>", "c": "tensordesc<bf16[128, 256]>",
                "M": "i32", "N": "i32", "K": "i32",
            },
            "constexprs": TILE,
            "options": OPTIONS,
        },
        {
            "kernel": gemm_masked,
            "signature": {"a": "*bf16:16", "b": "*bf16:16", "c": "*bf16:16", "M": "i32", "N": "i32", "K": "i32"},
            "constexprs": TILE | {"BLOCK_N": MASKED_N},
            "options": MASKED_OPTIONS,
        },
    ],
}  # fmt: skip
