"""Gated delta rule for sm_90 in TileLang: chunks of 64 tokens, prepared in parallel, then walked by a chain per head.

The first kernel has for every chunk and value head what depends on keys, queries and gates alone: the inverse of
I + tril(beta K K^T o G, -1), times beta, and scale tril(Q K^T o G). The second has the state's transpose in registers,
64 values by all keys; each product's sums become the next one's left operand.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

CHUNK, PART, STAGES = 64, 16, 3
VALUES = 64
"""Value columns of a block: the rows of a warpgroup's product."""
PREPARE = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
WALK = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def program(body, **tensors):
    """A TileLang program. Types in the signature of a body that does not name their sizes are not found by TileLang."""
    body.__annotations__ = tensors
    return T.prim_func(body)


def prepare(key_heads, heads, width, tokens, scale=None):
    """inverse and inner [HV, chunks, 64, 64]; decay [HV, chunks, 128]: e^gamma of each token, e^(gamma_end - gamma).

    The inverse: 16x16 blocks on the diagonal by substitution in fp32, D. Then I + D A of the blocks below is nilpotent
    after four steps: its inverse is (I - M)(I + M M), in fp16 products with fp32 sums.
    """
    chunks = -(-tokens // CHUNK)
    factor = width**-0.5 if scale is None else scale

    def fill(Q, K, G, Beta, inverse, inner, decay):
        with T.Kernel(chunks, heads, threads=128) as (chunk, head):
            k = T.alloc_shared((CHUNK, width), "bfloat16")
            q = T.alloc_shared((CHUNK, width), "bfloat16")
            gamma = T.alloc_shared((CHUNK,), "float32")
            beta = T.alloc_shared((CHUNK,), "float32")
            near = T.alloc_shared((CHUNK, PART + 1), "float32")
            below = T.alloc_shared((CHUNK, CHUNK), "float16")
            blocks = T.alloc_shared((CHUNK, CHUNK), "float16")
            less = T.alloc_shared((CHUNK, CHUNK), "float16")
            more = T.alloc_shared((CHUNK, CHUNK), "float16")
            product = T.alloc_fragment((CHUNK, CHUNK), "float32")
            answer = T.alloc_fragment((CHUNK, CHUNK), "bfloat16")
            column = T.alloc_local((PART,), "float32")
            tx = T.get_thread_binding()
            first, key = chunk * CHUNK, head * key_heads // heads
            T.copy(K[first : first + CHUNK, key, :], k, disable_tma=True)
            T.copy(Q[first : first + CHUNK, key, :], q, disable_tma=True)
            if tx < CHUNK:
                gamma[tx] = T.if_then_else(first + tx < tokens, G[T.min(first + tx, tokens - 1), head], 0.0)
                beta[tx] = T.if_then_else(first + tx < tokens, Beta[T.min(first + tx, tokens - 1), head], 0.0)
            T.cumsum(gamma)
            if tx < CHUNK:
                decay[head, chunk, tx] = T.exp(gamma[tx])
                decay[head, chunk, CHUNK + tx] = T.exp(gamma[CHUNK - 1] - gamma[tx])
            T.gemm(q, k, product, transpose_B=True, clear_accum=True)
            # Not written to `answer` at once: TileLang 0.1.8 takes gamma[i] for gamma[j] in a loop that also casts.
            for i, j in T.Parallel(CHUNK, CHUNK):
                product[i, j] = T.if_then_else(
                    i >= j, factor * T.exp(T.min(gamma[i] - gamma[j], 0.0)) * product[i, j], 0.0
                )
            T.copy(product, answer)
            T.copy(answer, inner[head, chunk, :, :])
            T.gemm(k, k, product, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                product[i, j] = T.if_then_else(
                    i > j, beta[i] * T.exp(T.min(gamma[i] - gamma[j], 0.0)) * product[i, j], 0.0
                )
            for i, j in T.Parallel(CHUNK, CHUNK):
                below[i, j] = T.if_then_else(i // PART > j // PART, product[i, j], 0.0)
                blocks[i, j] = 0.0
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i // PART == j // PART:
                    near[i, j % PART] = product[i, j]
            if tx < CHUNK:
                for i in T.unroll(PART):
                    column[i] = T.if_then_else(i == tx % PART, 1.0, 0.0)
                    for j in T.unroll(i):
                        column[i] = column[i] - near[tx // PART * PART + i, j] * column[j]
                for i in T.unroll(PART):
                    blocks[tx // PART * PART + i, tx] = column[i]
            T.gemm(blocks, below, product, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                more[i, j] = product[i, j]
            T.gemm(more, more, product, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                less[i, j] = product[i, j] + T.if_then_else(i == j, 1.0, 0.0)
            T.gemm(less, blocks, product, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                below[i, j] = product[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                less[i, j] = T.if_then_else(i == j, 1.0, 0.0) - T.cast(more[i, j], "float32")
            T.gemm(less, below, product, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                answer[i, j] = product[i, j] * beta[j]
            T.copy(answer, inverse[head, chunk, :, :])

    def tile():
        return T.Tensor((heads, chunks, CHUNK, CHUNK), "bfloat16")

    return program(
        fill, Q=T.Tensor((tokens, key_heads, width), "bfloat16"), K=T.Tensor((tokens, key_heads, width), "bfloat16"),
        G=T.Tensor((tokens, heads), "float32"), Beta=T.Tensor((tokens, heads), "float32"), inverse=tile(), inner=tile(),
        decay=T.Tensor((heads, chunks, 2 * CHUNK), "float32"),
    )  # fmt: skip


def walk(key_heads, heads, width, tokens, start, scale=None):
    """o and the final state of every head, chunk by chunk, from `prepare`'s tiles. `start`: whether state0 is given.

    Groups: one multiplies and has the state, one loads three chunks ahead, one stores outputs. X, R and N are the
    transposes, [values, tokens], of the state's answer to the keys, what is left of the values, and the new values.
    """
    chunks = -(-tokens // CHUNK)
    factor = width**-0.5 if scale is None else scale

    @T.macro
    def load(K, Q, V, inverse, inner, decay, k, q, v, t, p, e, full, head, part, chunk):
        """All tiles of a chunk into their stage; behind the last chunk the last again."""
        stage, last = chunk % STAGES, T.min(chunk, chunks - 1)
        first, key = last * CHUNK, head * key_heads // heads
        T.copy(K[first : first + CHUNK, key, :], k[stage, :, :])
        T.copy(Q[first : first + CHUNK, key, :], q[stage, :, :])
        T.copy(
            V[first : first + CHUNK, head, part * VALUES : (part + 1) * VALUES],
            v[stage * CHUNK : (stage + 1) * CHUNK, :],
        )
        T.copy(inverse[head, last, :, :], t[stage, :, :])
        T.copy(inner[head, last, :, :], p[stage, :, :])
        T.copy(decay[head, last, :], e[stage, :])
        T.mbarrier_arrive(full[stage])

    def follow(Q, K, V, inverse, inner, decay, State0, Out, State):
        with T.Kernel(width // VALUES, heads, threads=384) as (part, head):
            k = T.alloc_shared((STAGES, CHUNK, width), "bfloat16")
            q = T.alloc_shared((STAGES, CHUNK, width), "bfloat16")
            v = T.alloc_shared((STAGES * CHUNK, VALUES), "bfloat16")
            t = T.alloc_shared((STAGES, CHUNK, CHUNK), "bfloat16")
            p = T.alloc_shared((STAGES, CHUNK, CHUNK), "bfloat16")
            e = T.alloc_shared((STAGES, 2 * CHUNK), "float32")
            o = T.alloc_shared((CHUNK, VALUES), "bfloat16")
            state = T.alloc_fragment((VALUES, width), "float32")
            rounded = T.alloc_fragment((VALUES, width), "bfloat16")
            x = T.alloc_fragment((VALUES, CHUNK), "float32")
            out = T.alloc_fragment((VALUES, CHUNK), "float32")
            rest = T.alloc_fragment((VALUES, CHUNK), "bfloat16")
            fresh = T.alloc_fragment((VALUES, CHUNK), "bfloat16")
            end = T.alloc_local((1,), "float32")
            T.annotate_layout({v: tilelang.layout.make_swizzled_layout(v)})
            full = T.alloc_barrier([128] * STAGES)
            empty = T.alloc_barrier([128] * STAGES)
            o_full = T.alloc_barrier(128)
            o_empty = T.alloc_barrier(128)
            with T.ws(1):
                T.dec_max_nreg(24)
                for chunk in T.serial(chunks + 1):
                    T.mbarrier_wait_parity(empty[chunk % STAGES], (chunk // STAGES + 1) % 2)
                    load(K, Q, V, inverse, inner, decay, k, q, v, t, p, e, full, head, part, chunk)
            with T.ws(2):
                T.dec_max_nreg(24)
                for chunk in T.serial(chunks):
                    T.mbarrier_wait_parity(o_full, chunk % 2)
                    T.copy(o, Out[chunk * CHUNK : (chunk + 1) * CHUNK, head, part * VALUES : (part + 1) * VALUES])
                    T.mbarrier_arrive(o_empty)
            with T.ws(0):
                T.inc_max_nreg(240)
                for i, j in T.Parallel(VALUES, width):
                    state[i, j] = State0[head, j, part * VALUES + i] if start else T.float32(0)
                T.copy(state, rounded)
                T.mbarrier_wait_parity(full[0], 0)
                T.gemm(rounded, k[0, :, :], x, transpose_B=True, clear_accum=True)
                for chunk in T.serial(chunks):
                    stage, ahead = chunk % STAGES, (chunk + 1) % STAGES
                    T.gemm(rounded, q[stage, :, :], out, transpose_B=True, clear_accum=True, wg_wait=-1)
                    for i, j in T.Parallel(VALUES, CHUNK):
                        x[i, j] = T.cast(v[stage * CHUNK + j, i], "float32") - e[stage, j] * x[i, j]
                    T.copy(x, rest)
                    T.gemm(rest, t[stage, :, :], x, transpose_B=True, clear_accum=True, wg_wait=0)
                    T.copy(x, fresh)
                    for i, j in T.Parallel(VALUES, CHUNK):
                        x[i, j] = x[i, j] * e[stage, CHUNK + j]
                        out[i, j] = out[i, j] * (e[stage, j] * factor)
                    T.copy(x, rest)
                    end[0] = e[stage, CHUNK - 1]
                    for i, j in T.Parallel(VALUES, width):
                        state[i, j] = state[i, j] * end[0]
                    T.gemm(rest, k[stage, :, :], state, wg_wait=-1)
                    T.gemm(fresh, p[stage, :, :], out, transpose_B=True, wg_wait=-1)
                    T.wait_wgmma(1)
                    T.copy(state, rounded)
                    # The next chunk begins before this one's outputs leave. Behind the last there is one more to begin.
                    T.mbarrier_wait_parity(full[ahead], (chunk + 1) // STAGES % 2)
                    T.gemm(rounded, k[ahead, :, :], x, transpose_B=True, clear_accum=True, wg_wait=-1)
                    T.wait_wgmma(1)
                    T.mbarrier_arrive(empty[stage])
                    T.mbarrier_wait_parity(o_empty, (chunk + 1) % 2)
                    for i, j in T.Parallel(VALUES, CHUNK):
                        o[j, i] = T.cast(out[i, j], "bfloat16")
                    T.fence_proxy_async()
                    T.mbarrier_arrive(o_full)
                    T.wait_wgmma(0)
                for i, j in T.Parallel(VALUES, width):
                    State[head, j, part * VALUES + i] = state[i, j]

    def tile():
        return T.Tensor((heads, chunks, CHUNK, CHUNK), "bfloat16")

    def matrix():
        return T.Tensor((heads, width, width), "float32")

    return program(
        follow, Q=T.Tensor((tokens, key_heads, width), "bfloat16"), K=T.Tensor((tokens, key_heads, width), "bfloat16"),
        V=T.Tensor((tokens, heads, width), "bfloat16"), inverse=tile(), inner=tile(),
        decay=T.Tensor((heads, chunks, 2 * CHUNK), "float32"), State0=matrix(),
        Out=T.Tensor((tokens, heads, width), "bfloat16"), State=matrix(),
    )  # fmt: skip


@functools.cache
def compiled(make, *arguments):
    """A kernel of one shape, built when it is first asked for."""
    return tilelang.compile(make(*arguments), pass_configs=PREPARE if make is prepare else WALK)


def check(q, k, v, g, beta, o, state):
    """Raise ValueError outside of the domain."""
    (_tokens, key_heads, width), heads = q.shape, v.shape[1]
    if not all(tensor.dtype == torch.bfloat16 for tensor in (q, k, v, o)):
        raise ValueError(f"q, k, v and o in bf16 only; got {q.dtype}, {k.dtype}, {v.dtype}, {o.dtype}")
    if not all(tensor.dtype == torch.float32 for tensor in (g, beta, state)):
        raise ValueError(f"g, beta and the state in fp32 only; got {g.dtype}, {beta.dtype}, {state.dtype}")
    if width not in (64, 128) or v.shape[2] != width or heads % key_heads:
        raise ValueError(f"heads of 64 or 128, HV a multiple of HQK; got {tuple(q.shape)}, {tuple(v.shape)}")
    if not all(tensor.is_contiguous() for tensor in (q, k, v, g, beta, o, state)):
        raise ValueError("contiguous tensors only")


def run(q, k, v, g, beta, state0=None, *, out, scale=None):
    """Fill out = (o, state). Raises ValueError outside of the domain."""
    o, state = out
    check(q, k, v, g, beta, o, state)
    start = state0 is not None
    if start and (state0.dtype != torch.float32 or not state0.is_contiguous()):
        raise ValueError("state0 in fp32, contiguous")
    (tokens, key_heads, width), heads = q.shape, v.shape[1]
    shape = (key_heads, heads, width, tokens)
    chunks = -(-tokens // CHUNK)
    tiles = torch.empty((2, heads, chunks, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    decay = torch.empty((heads, chunks, 2 * CHUNK), dtype=torch.float32, device=q.device)
    compiled(prepare, *shape, scale)(q, k, g, beta, tiles[0], tiles[1], decay)
    follow = compiled(walk, *shape, start, scale)
    follow(q, k, v, tiles[0], tiles[1], decay, state0 if start else state, o, state)


COMPILE = {
    "sm90": [
        {
            "kernel": prepare,
            "arguments": {"key_heads": 16, "heads": 48, "width": 128, "tokens": 4096},
            "options": {"pass_configs": PREPARE},
        },
        {
            "kernel": walk,
            "arguments": {"key_heads": 16, "heads": 48, "width": 128, "tokens": 4096, "start": False},
            "options": {"pass_configs": WALK},
        },
    ]
}
