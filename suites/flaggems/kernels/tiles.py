"""Products of matrices in TileLang: a tile per block, TMA loads in a ring, wgmma, results through shared memory.

One structure for mm, addmm, bmm and grouped_mm; config.py beside this file has the tile, the stages and the threads.
Rows of a group need not fill tiles: blocks beyond the last tile of all groups end without a step.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
from config import CONFIG, SHAPES

BM, BN, BK = CONFIG["block_m"], CONFIG["block_n"], CONFIG["block_k"]
STAGES, THREADS = CONFIG["stages"], CONFIG["threads"]
PANEL = 8
"""Rows of tiles that run next to each other, for L2."""


def mm(M, K, N, dtype):
    """c = a b."""

    @T.prim_func
    def mm_tile(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=THREADS) as (column, row):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            result = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            T.use_swizzle(panel_size=PANEL)
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(K, BK), num_stages=STAGES):
                T.copy(A[row * BM, step * BK], left)
                T.copy(B[step * BK, column * BN], right)
                T.gemm(left, right, sums)
            T.copy(sums, result)
            T.copy(result, C[row * BM, column * BN])

    return mm_tile


def addmm(M, N, K, dtype):
    """c = bias + a b; the bias is read when the product is done, into the buffer that the result leaves by."""

    @T.prim_func
    def addmm_tile(
        bias: T.Tensor((M, N), dtype),
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((K, N), dtype),
        C: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=THREADS) as (column, row):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            result = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            T.use_swizzle(panel_size=PANEL)
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(K, BK), num_stages=STAGES):
                T.copy(A[row * BM, step * BK], left)
                T.copy(B[step * BK, column * BN], right)
                T.gemm(left, right, sums)
            T.copy(bias[row * BM, column * BN], result)
            for i, j in T.Parallel(BM, BN):
                sums[i, j] += T.cast(result[i, j], "float32")
            T.copy(sums, result)
            T.copy(result, C[row * BM, column * BN])

    return addmm_tile


def bmm(batch, M, K, N, dtype):
    """c[b] = a[b] b[b]."""

    @T.prim_func
    def bmm_tile(
        A: T.Tensor((batch, M, K), dtype), B: T.Tensor((batch, K, N), dtype), C: T.Tensor((batch, M, N), dtype)
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), batch, threads=THREADS) as (column, row, matrix):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            result = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(K, BK), num_stages=STAGES):
                T.copy(A[matrix, row * BM : (row + 1) * BM, step * BK : (step + 1) * BK], left)
                T.copy(B[matrix, step * BK : (step + 1) * BK, column * BN : (column + 1) * BN], right)
                T.gemm(left, right, sums)
            T.copy(sums, result)
            T.copy(result, C[matrix, row * BM : (row + 1) * BM, column * BN : (column + 1) * BN])

    return bmm_tile


def grouped_mm(M, K, groups, N, dtype):
    """Rows of group g of a times b[g]; `ends` has the end of every group's rows."""

    @T.prim_func
    def grouped_tile(
        A: T.Tensor((M, K), dtype), B: T.Tensor((groups, K, N), dtype), ends: T.Tensor((groups,), "int32"),
        C: T.Tensor((M, N), dtype),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM) + groups, threads=THREADS) as (column, row):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            result = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            # Tiles before the present group; the tile's group, its first row, and the end of the group's rows.
            before, group = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            first, end = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            before[0], group[0], first[0], end[0] = 0, 0, 0, 0
            for g in T.serial(groups):
                begin = T.if_then_else(g == 0, 0, ends[T.max(g - 1, 0)])
                tiles = T.ceildiv(ends[g] - begin, BM)
                if row >= before[0] and row < before[0] + tiles:
                    group[0] = g
                    first[0] = begin + (row - before[0]) * BM
                    end[0] = ends[g]
                before[0] = before[0] + tiles
            T.clear(sums)
            for step in T.Pipelined(T.if_then_else(end[0] > first[0], T.ceildiv(K, BK), 0), num_stages=STAGES):
                T.copy(A[first[0] : first[0] + BM, step * BK : (step + 1) * BK], left)
                T.copy(B[group[0], step * BK : (step + 1) * BK, column * BN : (column + 1) * BN], right)
                T.gemm(left, right, sums)
            T.copy(sums, result)
            for i, j in T.Parallel(BM, BN):
                if first[0] + i < end[0] and column * BN + j < N:
                    C[first[0] + i, column * BN + j] = result[i, j]

    return grouped_tile


MADE = {"mm": mm, "addmm": addmm, "bmm": bmm, "grouped_mm": grouped_mm}
NAMES = {"mm": ("M", "K", "N"), "addmm": ("M", "N", "K"), "bmm": ("batch", "M", "K", "N"),
         "grouped_mm": ("M", "K", "groups", "N")}  # fmt: skip


@functools.cache
def compiled(name, *arguments):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(MADE[name](*arguments))


def type_of(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def run_mm(a, b, out):
    """out = a b."""
    compiled("mm", *a.shape, b.shape[1], type_of(a))(a, b, out)


def run_addmm(bias, a, b, out):
    """out = bias + a b."""
    compiled("addmm", *bias.shape, a.shape[1], type_of(a))(bias, a, b, out)


def run_bmm(a, b, out):
    """out[i] = a[i] b[i]."""
    compiled("bmm", *a.shape, b.shape[2], type_of(a))(a, b, out)


def run_grouped_mm(a, b, ends, out):
    """Rows of group g of out = those of a times b[g]."""
    compiled("grouped_mm", *a.shape, b.shape[0], b.shape[2], type_of(a))(a, b, ends, out)


def built(name, *shape):
    """What a launch at a shape builds."""
    *sizes, element = shape
    arguments = dict(zip(NAMES[name], sizes, strict=True))
    return {"kernel": MADE[name], "arguments": arguments | {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[element]}}


COMPILE = {key: [built(*shape) for shape in SHAPES] for key in ("sm90", "sm120")}
