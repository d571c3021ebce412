"""Attention for sm_90 in TileLang: one producer group, two consumer groups of 64 query rows, blocks that stay.

The scores of the next keys are issued before the product with the present values, whose time hides their softmax. The
producer runs ahead into the next tile while the consumers write the present one. Barriers are written here, so are the
parities: the rings keep turning from tile to tile.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
BM, BN, STAGES = 128, 128, 2
MULTIPROCESSORS = 132
LOG2_E = 1.4426950408889634
LOWEST = -1e30
"""A maximum before the first keys; finite, so that differences of two are not NaN."""
PASSES = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def attention(batch, heads, tokens, width, key_heads, causal=False, by_token=False, scale=None, dtype="float16"):
    """o = softmax(scale q k^T) v of [batch, heads, tokens, width], or of [batch, tokens, heads, width]."""
    tiles = -(-tokens // BM)
    work = batch * heads * tiles
    blocks = min(work, MULTIPROCESSORS)
    exponent = LOG2_E * (width**-0.5 if scale is None else scale)

    def place(turn, bx):
        """Of a tile: the row of batch and head, the first query. Causal tiles with the most keys come first."""
        tile = turn * blocks + bx
        if causal:
            return tile % (batch * heads), (tiles - 1 - tile // (batch * heads)) * BM
        return tile // tiles, tile % tiles * BM

    def rows(tensor, count, head, first, size):
        """A tile of a tensor with `count` heads, for a row of batch and query head."""
        b, h = head // heads, head % heads * count // heads
        return tensor[b, first : first + size, h, :] if by_token else tensor[b, h, first : first + size, :]

    def steps(first):
        """Tiles of keys that a tile of queries needs."""
        return T.ceildiv(T.min(first + BM, tokens), BN) if causal else -(-tokens // BN)

    def masked(first, step):
        """Whether a tile of keys has one that some query must not see."""
        return (step + 1) * BN > T.min(first + 1, tokens) if causal else (step + 1) * BN > tokens

    def seen(query, key):
        return T.And(key < tokens, key <= query) if causal else key < tokens

    @T.macro
    def arrive(tx, barriers, slot):
        """A warp has read what a barrier guards."""
        if tx % 32 == 0:
            T.mbarrier_arrive(barriers[slot])

    @T.macro
    def soften(scores, top, before, factor, row, total, first, step):
        """Turn scores into weights, with what the running maximum did to earlier sums in `factor`."""
        if masked(first, step):
            for i, j in T.Parallel(BM, BN):
                scores[i, j] = T.if_then_else(seen(first + i, step * BN + j), scores[i, j], -T.infinity("float32"))
        T.copy(top, before)
        T.reduce_max(scores, top, dim=1, clear=False)
        for i in T.Parallel(BM):
            factor[i] = T.exp2((before[i] - top[i]) * exponent)
        for i, j in T.Parallel(BM, BN):
            scores[i, j] = T.exp2(scores[i, j] * exponent - top[i] * exponent)
        T.reduce_sum(scores, row, dim=1)
        for i in T.Parallel(BM):
            total[i] = total[i] * factor[i] + row[i]

    def attend(Q, K, V, Out):
        with T.Kernel(blocks, threads=384) as bx:
            q = T.alloc_shared((BM, width), dtype)
            k = T.alloc_shared((STAGES, BN, width), dtype)
            v = T.alloc_shared((STAGES, BN, width), dtype)
            o = T.alloc_shared((BM, width), dtype)
            scores = T.alloc_fragment((BM, BN), "float32")
            weights = T.alloc_fragment((BM, BN), dtype)
            sums = T.alloc_fragment((BM, width), "float32")
            top = T.alloc_fragment((BM,), "float32")
            before = T.alloc_fragment((BM,), "float32")
            factor = T.alloc_fragment((BM,), "float32")
            row = T.alloc_fragment((BM,), "float32")
            total = T.alloc_fragment((BM,), "float32")
            tx = T.get_thread_binding()
            count = T.alloc_local((1,), "int32")  # tiles of keys since the start of the block
            q_full = T.alloc_barrier(128)
            q_empty = T.alloc_barrier(8)
            k_full = T.alloc_barrier([128] * STAGES)
            k_empty = T.alloc_barrier([8] * STAGES)
            v_full = T.alloc_barrier([128] * STAGES)
            v_empty = T.alloc_barrier([8] * STAGES)
            count[0] = 0
            with T.ws(2):
                T.dec_max_nreg(24)
                for turn in T.serial(T.ceildiv(work - bx, blocks)):
                    head, first = place(turn, bx)
                    T.mbarrier_wait_parity(q_empty, (turn + 1) % 2)
                    T.copy(rows(Q, heads, head, first, BM), q)
                    T.mbarrier_arrive(q_full)
                    for step in T.serial(steps(first)):
                        T.mbarrier_wait_parity(k_empty[count[0] % STAGES], (count[0] // STAGES + 1) % 2)
                        T.copy(rows(K, key_heads, head, step * BN, BN), k[count[0] % STAGES, :, :])
                        T.mbarrier_arrive(k_full[count[0] % STAGES])
                        T.mbarrier_wait_parity(v_empty[count[0] % STAGES], (count[0] // STAGES + 1) % 2)
                        T.copy(rows(V, key_heads, head, step * BN, BN), v[count[0] % STAGES, :, :])
                        T.mbarrier_arrive(v_full[count[0] % STAGES])
                        count[0] = count[0] + 1
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for turn in T.serial(T.ceildiv(work - bx, blocks)):
                    head, first = place(turn, bx)
                    T.fill(sums, 0)
                    T.fill(total, 0)
                    T.fill(top, LOWEST)
                    T.mbarrier_wait_parity(q_full, turn % 2)
                    T.mbarrier_wait_parity(k_full[count[0] % STAGES], count[0] // STAGES % 2)
                    T.gemm(
                        q, k[count[0] % STAGES, :, :], scores, transpose_B=True, clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )  # fmt: skip
                    arrive(tx, k_empty, count[0] % STAGES)
                    soften(scores, top, before, factor, row, total, first, 0)
                    T.copy(scores, weights)
                    for step in T.serial(1, steps(first)):
                        T.mbarrier_wait_parity(k_full[(count[0] + 1) % STAGES], (count[0] + 1) // STAGES % 2)
                        T.gemm(
                            q, k[(count[0] + 1) % STAGES, :, :], scores, transpose_B=True, clear_accum=True, wg_wait=-1,
                            policy=T.GemmWarpPolicy.FullRow,
                        )  # fmt: skip
                        T.mbarrier_wait_parity(v_full[count[0] % STAGES], count[0] // STAGES % 2)
                        T.gemm(weights, v[count[0] % STAGES, :, :], sums, wg_wait=-1, policy=T.GemmWarpPolicy.FullRow)
                        T.wait_wgmma(1)
                        arrive(tx, k_empty, (count[0] + 1) % STAGES)
                        soften(scores, top, before, factor, row, total, first, step)
                        T.wait_wgmma(0)
                        arrive(tx, v_empty, count[0] % STAGES)
                        for i, j in T.Parallel(BM, width):
                            sums[i, j] *= factor[i]
                        T.copy(scores, weights)
                        count[0] = count[0] + 1
                    arrive(tx, q_empty, 0)
                    T.mbarrier_wait_parity(v_full[count[0] % STAGES], count[0] // STAGES % 2)
                    T.gemm(weights, v[count[0] % STAGES, :, :], sums, policy=T.GemmWarpPolicy.FullRow)
                    arrive(tx, v_empty, count[0] % STAGES)
                    count[0] = count[0] + 1
                    for i, j in T.Parallel(BM, width):
                        sums[i, j] /= total[i]
                    # The thread that stored the last tile has waited for its reads; the others learn of it here.
                    T.sync_threads(1, 256)
                    T.copy(sums, o)
                    T.sync_threads(1, 256)
                    T.copy(o, rows(Out, heads, head, first, BM))

    def tensor(count):
        return T.Tensor((batch, tokens, count, width) if by_token else (batch, count, tokens, width), dtype)

    # Types in the signature of a body that does not name their sizes are not found by TileLang. Each tensor needs an
    # object of its own: one type for two of them makes one tensor.
    names = {"Q": heads, "K": key_heads, "V": key_heads, "Out": heads}
    attend.__annotations__ = {name: tensor(count) for name, count in names.items()}
    return T.prim_func(attend)


@functools.cache
def compiled(*arguments):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(attention(*arguments), pass_configs=PASSES)


def run(q, k, v, out, scale=None, causal=0, window=0):
    """Fill out with the attention of every head. Raises ValueError outside of the domain."""
    (batch, heads, tokens, width), key_heads = q.shape, k.shape[1]
    if q.dtype not in NAMES or not q.dtype == k.dtype == v.dtype == out.dtype:
        raise ValueError(f"fp16 or bf16 only, all four the same; got {q.dtype}, {k.dtype}, {v.dtype}, {out.dtype}")
    if width not in (64, 128) or window or k.shape != v.shape or k.shape[2] != tokens or heads % key_heads:
        raise ValueError(
            f"heads of 64 or 128, as many keys as queries, no window; got {tuple(q.shape)}, {tuple(k.shape)}"
        )
    by_token = not q.is_contiguous()
    if by_token:
        q, k, v, out = (tensor.transpose(1, 2) for tensor in (q, k, v, out))
    if not all(tensor.is_contiguous() for tensor in (q, k, v, out)):
        raise ValueError("all four contiguous as [B,H,S,D], or all as [B,S,H,D]")
    attend = compiled(batch, heads, tokens, width, key_heads, bool(causal), by_token, scale, NAMES[q.dtype])
    # TileLang compares all strides, also those of one element, which a view has as it expects them.
    attend(*(tensor.view(tensor.shape) for tensor in (q, k, v, out)))


COMPILE = {
    "sm90": [
        {
            "kernel": attention,
            "arguments": {"batch": 8, "heads": 64, "tokens": 2048, "width": 128, "key_heads": 64},
            "options": {"pass_configs": PASSES},
        }
    ]
}
