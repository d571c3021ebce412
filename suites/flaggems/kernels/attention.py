"""Attention in TileLang: a tile of queries per block, keys and values by TMA in a ring, softmax in registers.

Causal tiles with the most keys start first, and mask the diagonal's tiles alone. The query heads of one key head run
next to each other. config.py beside this file has the tile, the stages and the threads.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
from config import CONFIG, SHAPES

BM, BN = CONFIG["block_m"], CONFIG["block_n"]
STAGES, THREADS = CONFIG["stages"], CONFIG["threads"]
LOG2_E = 1.4426950408889634


def attention(batch, heads, tokens, width, key_heads, causal, dtype):
    """o = softmax(q k^T / sqrt(width)) v, under the causal mask where asked."""
    scale = LOG2_E * width**-0.5
    tiles = -(-tokens // BM)

    @T.prim_func
    def attend(
        Q: T.Tensor((batch, heads, tokens, width), dtype), K: T.Tensor((batch, key_heads, tokens, width), dtype),
        V: T.Tensor((batch, key_heads, tokens, width), dtype), Out: T.Tensor((batch, heads, tokens, width), dtype),
    ):  # fmt: skip
        with T.Kernel(heads, batch, tiles, threads=THREADS) as (head, b, turn):
            q = T.alloc_shared((BM, width), dtype)
            k = T.alloc_shared((BN, width), dtype)
            v = T.alloc_shared((BN, width), dtype)
            o = T.alloc_shared((BM, width), dtype)
            scores = T.alloc_fragment((BM, BN), "float32")
            weights = T.alloc_fragment((BM, BN), dtype)
            sums = T.alloc_fragment((BM, width), "float32")
            top = T.alloc_fragment((BM,), "float32")
            before = T.alloc_fragment((BM,), "float32")
            factor = T.alloc_fragment((BM,), "float32")
            row = T.alloc_fragment((BM,), "float32")
            total = T.alloc_fragment((BM,), "float32")
            first = (tiles - 1 - turn) * BM if causal else turn * BM
            T.copy(Q[b, head, first : first + BM, :], q)
            T.fill(sums, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            keys = T.min(first + BM, tokens) if causal else tokens
            for step in T.Pipelined(T.ceildiv(keys, BN), num_stages=STAGES):
                T.copy(K[b, head * key_heads // heads, step * BN : (step + 1) * BN, :], k)
                # The product is added to 0, or to -inf where a key does not count.
                if causal:
                    for i, j in T.Parallel(BM, BN):
                        scores[i, j] = T.if_then_else(first + i >= step * BN + j, 0.0, -T.infinity("float32"))
                else:
                    for i, j in T.Parallel(BM, BN):
                        scores[i, j] = T.if_then_else(step * BN + j < tokens, 0.0, -T.infinity("float32"))
                T.gemm(q, k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i in T.Parallel(BM):
                    top[i] = T.max(top[i], before[i])
                    factor[i] = T.exp2((before[i] - top[i]) * scale)
                for i, j in T.Parallel(BM, BN):
                    scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
                T.reduce_sum(scores, row, dim=1)
                for i in T.Parallel(BM):
                    total[i] = total[i] * factor[i] + row[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(BM, width):
                    sums[i, j] *= factor[i]
                T.copy(V[b, head * key_heads // heads, step * BN : (step + 1) * BN, :], v)
                T.gemm(weights, v, sums, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(BM, width):
                sums[i, j] /= total[i]
            T.copy(sums, o)
            T.copy(o, Out[b, head, first : first + BM, :])

    return attend


PASSES = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@functools.cache
def compiled(*arguments):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(attention(*arguments), pass_configs=PASSES)


def run(q, k, v, out, causal=0):
    """out = attention of every head."""
    compiled(*q.shape, k.shape[1], bool(causal), str(q.dtype).removeprefix("torch."))(q, k, v, out)


def built(name, *shape):
    """What a launch at a shape builds."""
    *sizes, element = shape
    arguments = dict(zip(("batch", "heads", "tokens", "width", "key_heads"), sizes, strict=True))
    extra = {"causal": name == "causal_attention", "dtype": {"bf16": "bfloat16", "fp16": "float16"}[element]}
    return {"kernel": attention, "arguments": arguments | extra, "options": {"pass_configs": PASSES}}


COMPILE = {key: [built(*shape) for shape in SHAPES] for key in ("sm90", "sm120")}
