"""Gated delta rule for sm_90 in TileLang: chunks of 64 tokens, prepared in parallel, then walked by a chain per head.

The first kernel has for every chunk and value head what depends on keys, queries and gates alone: the inverse of
I + tril(beta K K^T o G, -1), times beta, and scale tril(Q K^T o G). The second has the state's transpose in registers,
64 values by all keys; each product's sums become the next one's left operand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
import torch

CHUNK, PART, STAGES = 64, 16, 3
MAX_ELEMENTS = 1 << 31
VALUES = 64
"""Value columns of a block: the rows of a warpgroup's product."""
PREPARE = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
WALK = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


@dataclass(frozen=True)
class Problem:
    """Sizes of one call, and the types of its tensors."""

    key_heads: int
    heads: int
    width: int
    tokens: int

    @property
    def chunks(self):
        """Chunks of a head, the last with tokens that do not exist: zeros, with betas and gates of 0."""
        return -(-self.tokens // CHUNK)

    def keys(self):
        return T.Tensor((self.tokens, self.key_heads, self.width), "bfloat16")

    def values(self):
        return T.Tensor((self.tokens, self.heads, self.width), "bfloat16")

    def gates(self):
        return T.Tensor((self.tokens, self.heads), "float32")

    def tile(self):
        """Of scratch memory: a square of tokens for each chunk."""
        return T.Tensor((self.heads, self.chunks, CHUNK, CHUNK), "bfloat16")

    def decay(self):
        """Of scratch memory: e^gamma of each token, and e^(gamma_end - gamma)."""
        return T.Tensor((self.heads, self.chunks, 2 * CHUNK), "float32")

    def state(self):
        return T.Tensor((self.heads, self.width, self.width), "float32")


def program(body, **tensors):
    """A TileLang program. Types in the signature of a body that does not name their sizes are not found by TileLang."""
    body.__annotations__ = tensors
    return T.prim_func(body)


@T.macro
def gated(product, gamma, weight):
    """Multiply product[i, j] by weight(i) e^(gamma_i - gamma_j), where gates of later tokens are not looked at."""
    for i, j in T.Parallel(CHUNK, CHUNK):
        product[i, j] = T.if_then_else(i >= j, weight(i) * T.exp(T.min(gamma[i] - gamma[j], 0.0)) * product[i, j], 0.0)


@T.macro
def split(tx, product, near, below, blocks):
    """The matrix's 16x16 blocks on the diagonal to `near`, what is below them to `below`; inverses of I + near."""
    column = T.alloc_local((PART,), "float32")
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


@T.macro
def invert(product, below, blocks, less, more):
    """product = (I + blocks below)^-1 blocks: with M = blocks below, which is nilpotent, (I - M)(I + M M) blocks."""
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


def prepare(key_heads, heads, width, tokens, scale=None):
    """The program that fills inverse and inner [HV, chunks, 64, 64] and decay [HV, chunks, 128].

    The inverse: 16x16 blocks on the diagonal by substitution in fp32, all else by fp16 products with fp32 sums.
    """
    p = Problem(key_heads, heads, width, tokens)
    factor = width**-0.5 if scale is None else scale

    def fill(Q, K, G, Beta, inverse, inner, decay):
        with T.Kernel(p.chunks, heads, threads=128) as (chunk, head):
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
            gated(product, gamma, lambda i: factor)
            # Cast by a loop of its own: in one that also casts, TileLang 0.1.8 takes gamma[i] for gamma[j].
            T.copy(product, answer)
            T.copy(answer, inner[head, chunk, :, :])
            T.gemm(k, k, product, transpose_B=True, clear_accum=True)
            gated(product, gamma, lambda i: beta[i])
            split(tx, product, near, below, blocks)
            invert(product, below, blocks, less, more)
            for i, j in T.Parallel(CHUNK, CHUNK):
                answer[i, j] = product[i, j] * beta[j]
            T.copy(answer, inverse[head, chunk, :, :])

    return program(
        fill, Q=p.keys(), K=p.keys(), G=p.gates(), Beta=p.gates(), inverse=p.tile(), inner=p.tile(), decay=p.decay()
    )


@T.macro
def shared(p):
    """A chunk's tiles in each stage, a tile of outputs, and their barriers."""
    k = T.alloc_shared((STAGES, CHUNK, p.width), "bfloat16")
    q = T.alloc_shared((STAGES, CHUNK, p.width), "bfloat16")
    v = T.alloc_shared((STAGES * CHUNK, VALUES), "bfloat16")
    t = T.alloc_shared((STAGES, CHUNK, CHUNK), "bfloat16")
    s = T.alloc_shared((STAGES, CHUNK, CHUNK), "bfloat16")
    e = T.alloc_shared((STAGES, 2 * CHUNK), "float32")
    o = T.alloc_shared((CHUNK, VALUES), "bfloat16")
    full, empty = T.alloc_barrier([128] * STAGES), T.alloc_barrier([128] * STAGES)
    o_full, o_empty = T.alloc_barrier(128), T.alloc_barrier(128)
    # Read by columns: swizzled rows lie in different banks.
    T.annotate_layout({v: tilelang.layout.make_swizzled_layout(v)})
    return SimpleNamespace(k=k, q=q, v=v, t=t, s=s, e=e, o=o, full=full, empty=empty, o_full=o_full, o_empty=o_empty)


@T.macro
def produce(p, m, head, part, K, Q, V, inverse, inner, decay):
    """All tiles of each chunk into their stage; behind the last chunk the last again."""
    for chunk in T.serial(p.chunks + 1):
        stage, last = chunk % STAGES, T.min(chunk, p.chunks - 1)
        first, key = last * CHUNK, head * p.key_heads // p.heads
        T.mbarrier_wait_parity(m.empty[stage], (chunk // STAGES + 1) % 2)
        T.copy(K[first : first + CHUNK, key, :], m.k[stage, :, :])
        T.copy(Q[first : first + CHUNK, key, :], m.q[stage, :, :])
        T.copy(
            V[first : first + CHUNK, head, part * VALUES : (part + 1) * VALUES],
            m.v[stage * CHUNK : (stage + 1) * CHUNK, :],
        )
        T.copy(inverse[head, last, :, :], m.t[stage, :, :])
        T.copy(inner[head, last, :, :], m.s[stage, :, :])
        T.copy(decay[head, last, :], m.e[stage, :])
        T.mbarrier_arrive(m.full[stage])


@T.macro
def deliver(p, m, head, part, Out):
    """Store the outputs of each chunk."""
    for chunk in T.serial(p.chunks):
        T.mbarrier_wait_parity(m.o_full, chunk % 2)
        T.copy(m.o, Out[chunk * CHUNK : (chunk + 1) * CHUNK, head, part * VALUES : (part + 1) * VALUES])
        T.mbarrier_arrive(m.o_empty)


@T.macro
def advance(p, m, state, factor):
    """Walk over all chunks. x, rest, fresh and out are transposes: [values, tokens]."""
    rounded = T.alloc_fragment((VALUES, p.width), "bfloat16")
    x = T.alloc_fragment((VALUES, CHUNK), "float32")
    out = T.alloc_fragment((VALUES, CHUNK), "float32")
    rest = T.alloc_fragment((VALUES, CHUNK), "bfloat16")
    fresh = T.alloc_fragment((VALUES, CHUNK), "bfloat16")
    end = T.alloc_local((1,), "float32")
    T.copy(state, rounded)
    T.mbarrier_wait_parity(m.full[0], 0)
    T.gemm(rounded, m.k[0, :, :], x, transpose_B=True, clear_accum=True)
    for chunk in T.serial(p.chunks):
        stage, ahead = chunk % STAGES, (chunk + 1) % STAGES
        T.gemm(rounded, m.q[stage, :, :], out, transpose_B=True, clear_accum=True, wg_wait=-1)
        for i, j in T.Parallel(VALUES, CHUNK):
            x[i, j] = T.cast(m.v[stage * CHUNK + j, i], "float32") - m.e[stage, j] * x[i, j]
        T.copy(x, rest)
        T.gemm(rest, m.t[stage, :, :], x, transpose_B=True, clear_accum=True)
        T.copy(x, fresh)
        for i, j in T.Parallel(VALUES, CHUNK):
            x[i, j] = x[i, j] * m.e[stage, CHUNK + j]
            out[i, j] = out[i, j] * (m.e[stage, j] * factor)
        T.copy(x, rest)
        end[0] = m.e[stage, CHUNK - 1]
        for i, j in T.Parallel(VALUES, p.width):
            state[i, j] = state[i, j] * end[0]
        T.gemm(rest, m.k[stage, :, :], state, wg_wait=-1)
        T.gemm(fresh, m.s[stage, :, :], out, transpose_B=True, wg_wait=-1)
        T.wait_wgmma(1)
        T.copy(state, rounded)
        # The next chunk begins before this one's outputs leave. Behind the last there is one more to begin.
        T.mbarrier_wait_parity(m.full[ahead], (chunk + 1) // STAGES % 2)
        T.gemm(rounded, m.k[ahead, :, :], x, transpose_B=True, clear_accum=True, wg_wait=-1)
        T.wait_wgmma(1)
        T.mbarrier_arrive(m.empty[stage])
        T.mbarrier_wait_parity(m.o_empty, (chunk + 1) % 2)
        for i, j in T.Parallel(VALUES, CHUNK):
            m.o[j, i] = T.cast(out[i, j], "bfloat16")
        T.fence_proxy_async()
        T.mbarrier_arrive(m.o_full)
        T.wait_wgmma(0)


def walk(key_heads, heads, width, tokens, start, scale=None):
    """The program that has o and the final state from `prepare`'s tiles. `start`: whether state0 is given.

    Groups: one multiplies and has the state, one loads three chunks ahead, one stores outputs.
    """
    p = Problem(key_heads, heads, width, tokens)
    factor = width**-0.5 if scale is None else scale

    def follow(Q, K, V, inverse, inner, decay, State0, Out, State):
        with T.Kernel(width // VALUES, heads, threads=384) as (part, head):
            m = shared(p)
            state = T.alloc_fragment((VALUES, width), "float32")
            with T.ws(1):
                T.dec_max_nreg(24)
                produce(p, m, head, part, K, Q, V, inverse, inner, decay)
            with T.ws(2):
                T.dec_max_nreg(24)
                deliver(p, m, head, part, Out)
            with T.ws(0):
                T.inc_max_nreg(240)
                for i, j in T.Parallel(VALUES, width):
                    state[i, j] = State0[head, j, part * VALUES + i] if start else T.float32(0)
                advance(p, m, state, factor)
                for i, j in T.Parallel(VALUES, width):
                    State[head, j, part * VALUES + i] = state[i, j]

    return program(
        follow, Q=p.keys(), K=p.keys(), V=p.values(), inverse=p.tile(), inner=p.tile(), decay=p.decay(),
        State0=p.state(), Out=p.values(), State=p.state(),
    )  # fmt: skip


@functools.cache
def compiled(make, *arguments):
    """A kernel of one shape, built when it is first asked for."""
    return tilelang.compile(make(*arguments), pass_configs=PREPARE if make is prepare else WALK)


def check(q, k, v, g, beta, o, state):
    """Raise ValueError outside of the domain."""
    (tokens, key_heads, width), heads = q.shape, v.shape[1]
    if not all(tensor.dtype == torch.bfloat16 for tensor in (q, k, v, o)):
        raise ValueError(f"q, k, v and o in bf16 only; got {q.dtype}, {k.dtype}, {v.dtype}, {o.dtype}")
    if not all(tensor.dtype == torch.float32 for tensor in (g, beta, state)):
        raise ValueError(f"g, beta and the state in fp32 only; got {g.dtype}, {beta.dtype}, {state.dtype}")
    if width not in (64, 128) or v.shape[2] != width or heads % key_heads:
        raise ValueError(f"heads of 64 or 128, HV a multiple of HQK; got {tuple(q.shape)}, {tuple(v.shape)}")
    if tokens * heads * max(width, CHUNK) >= MAX_ELEMENTS:
        raise ValueError(f"fewer than 2^31 elements: TileLang counts in 32 bits; got {tuple(v.shape)}")
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
