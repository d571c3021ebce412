"""Attention for sm_90 in TileLang: one producer group, two consumer groups of 64 query rows, blocks that stay.

The scores of the next keys are issued before the product with the present values, whose time hides their softmax. The
producer runs ahead into the next tile while the consumers end the present one, and stores what they leave. Barriers are
written here, so are the parities: the rings keep turning from tile to tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
BM, BN, STAGES = 128, 128, 2
WARPS = 8
"""Of the two consumer groups."""
MULTIPROCESSORS = 132
VARIANT = 0
"""Which of VARIANTS runs; 0 is the program that was judged. NOTES.md says what the others are for."""
VARIANTS = {1: False, 2: True}
"""Whether weights are taken against the maximum of earlier keys, as long as they do not grow too large."""
LIMIT = 32768.0
"""Of some of a thread's weights: each stays below what fp16 can hold."""
CHUNK = 32
"""Keys whose weights are in fp32 at a time, beside their scores."""
LOG2_E = 1.4426950408889634
LOWEST = -1e30
"""A maximum before the first keys; finite, so that differences of two are not NaN."""
FULL_ROW = T.GemmWarpPolicy.FullRow
PASSES = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


@dataclass(frozen=True)
class Problem:
    """Sizes of one attention, and how its tiles are numbered."""

    batch: int
    heads: int
    tokens: int
    width: int
    key_heads: int
    causal: bool
    by_token: bool
    dtype: str

    @property
    def tiles(self):
        """Tiles of queries in a head."""
        return -(-self.tokens // BM)

    @property
    def work(self):
        """Tiles of queries in all."""
        return self.batch * self.heads * self.tiles

    @property
    def blocks(self):
        """Blocks that stay."""
        return min(self.work, MULTIPROCESSORS)

    def place(self, turn, bx):
        """Row of batch and head, and first query, of a block's tile. Causal tiles with the most keys come first."""
        tile = turn * self.blocks + bx
        if self.causal:
            lines = self.batch * self.heads
            return tile % lines, (self.tiles - 1 - tile // lines) * BM
        return tile // self.tiles, tile % self.tiles * BM

    def tensor(self, count):
        """The type of a tensor of `count` heads; a new object each time: one for two tensors makes them one."""
        shape = (self.tokens, count) if self.by_token else (count, self.tokens)
        return T.Tensor((self.batch, *shape, self.width), self.dtype)

    def rows(self, tensor, count, head, first, size):
        """A tile of a tensor of `count` heads, for a row of batch and query head."""
        b, h = head // self.heads, head % self.heads * count // self.heads
        return tensor[b, first : first + size, h, :] if self.by_token else tensor[b, h, first : first + size, :]

    def steps(self, first):
        """Tiles of keys that a tile of queries needs."""
        return T.ceildiv(T.min(first + BM, self.tokens), BN) if self.causal else -(-self.tokens // BN)

    def masked(self, first, step):
        """Whether a tile of keys has one that some query must not see."""
        return (step + 1) * BN > (T.min(first + 1, self.tokens) if self.causal else self.tokens)

    def seen(self, query, key):
        """Whether a query sees a key."""
        return T.And(key < self.tokens, key <= query) if self.causal else key < self.tokens


@T.macro
def shared(p, lanes=128):
    """Tiles in shared memory and their barriers: what is full is announced by loads, what is empty by warps."""
    q = T.alloc_shared((BM, p.width), p.dtype)
    o = T.alloc_shared((BM, p.width), p.dtype)
    k = T.alloc_shared((STAGES, BN, p.width), p.dtype)
    v = T.alloc_shared((STAGES, BN, p.width), p.dtype)
    q_full, q_empty = T.alloc_barrier(lanes), T.alloc_barrier(WARPS)
    o_full, o_empty = T.alloc_barrier(32 * WARPS), T.alloc_barrier(lanes)
    k_full, k_empty = T.alloc_barrier([lanes] * STAGES), T.alloc_barrier([WARPS] * STAGES)
    v_full, v_empty = T.alloc_barrier([lanes] * STAGES), T.alloc_barrier([WARPS] * STAGES)
    return SimpleNamespace(
        q=q, q_full=q_full, q_empty=q_empty, o=o, o_full=o_full, o_empty=o_empty,
        k=k, k_full=k_full, k_empty=k_empty, v=v, v_full=v_full, v_empty=v_empty,
    )  # fmt: skip


@T.macro
def fragments(p):
    """What the consumers have in registers: scores, sums of values, and of every row its maximum and total."""
    scores = T.alloc_fragment((BM, BN), "float32")
    weights = T.alloc_fragment((BM, BN), p.dtype)
    sums = T.alloc_fragment((BM, p.width), "float32")
    top = T.alloc_fragment((BM,), "float32")
    before = T.alloc_fragment((BM,), "float32")
    factor = T.alloc_fragment((BM,), "float32")
    row = T.alloc_fragment((BM,), "float32")
    total = T.alloc_fragment((BM,), "float32")
    return SimpleNamespace(
        scores=scores, weights=weights, sums=sums, top=top, before=before, factor=factor, row=row, total=total
    )


@T.macro
def load(p, source, count, head, step, tiles, full, empty, at):
    """One tile of keys or values into its stage."""
    T.mbarrier_wait_parity(empty[at % STAGES], (at // STAGES + 1) % 2)
    T.copy(p.rows(source, count, head, step * BN, BN), tiles[at % STAGES, :, :])
    T.mbarrier_arrive(full[at % STAGES])


@T.macro
def store(p, m, Out, turn, bx):
    """The result of one tile, when it is there."""
    head, first = p.place(turn, bx)
    T.mbarrier_wait_parity(m.o_full, turn % 2)
    T.copy(m.o, p.rows(Out, p.heads, head, first, BM))
    T.mbarrier_arrive(m.o_empty)


@T.macro
def produce(p, m, bx, own, count, Q, K, V, Out):
    """Load all tiles of a block, and store its results."""
    for turn in T.serial(own):
        head, first = p.place(turn, bx)
        T.mbarrier_wait_parity(m.q_empty, (turn + 1) % 2)
        T.copy(p.rows(Q, p.heads, head, first, BM), m.q)
        T.mbarrier_arrive(m.q_full)
        for step in T.serial(p.steps(first)):
            load(p, K, p.key_heads, head, step, m.k, m.k_full, m.k_empty, count[0])
            load(p, V, p.key_heads, head, step, m.v, m.v_full, m.v_empty, count[0])
            count[0] = count[0] + 1
            # The ring is full again: time to store the tile before, which is about to be ready.
            if turn > 0 and step == T.min(STAGES, p.steps(first)) - 1:
                store(p, m, Out, turn - 1, bx)
    store(p, m, Out, own - 1, bx)


@T.macro
def arrive(tx, barriers, slot):
    """A warp has read what a barrier guards."""
    if tx % 32 == 0:
        T.mbarrier_arrive(barriers[slot])


@T.macro
def soften(p, r, first, step, exponent):
    """Turn scores into weights in fp32, with what the running maximum did to earlier sums in `factor`."""
    if p.masked(first, step):
        for i, j in T.Parallel(BM, BN):
            r.scores[i, j] = T.if_then_else(p.seen(first + i, step * BN + j), r.scores[i, j], -T.infinity("float32"))
    T.copy(r.top, r.before)
    T.reduce_max(r.scores, r.top, dim=1, clear=False)
    for i in T.Parallel(BM):
        r.factor[i] = T.exp2((r.before[i] - r.top[i]) * exponent)
    for i, j in T.Parallel(BM, BN):
        r.scores[i, j] = T.exp2(r.scores[i, j] * exponent - r.top[i] * exponent)
    T.reduce_sum(r.scores, r.row, dim=1)
    for i in T.Parallel(BM):
        r.total[i] = r.total[i] * r.factor[i] + r.row[i]


@T.macro
def score(m, r, at):
    """Issue the product of the queries with a tile of keys."""
    T.mbarrier_wait_parity(m.k_full[at % STAGES], at // STAGES % 2)
    T.gemm(m.q, m.k[at % STAGES, :, :], r.scores, transpose_B=True, clear_accum=True, wg_wait=-1, policy=FULL_ROW)


@T.macro
def gather(m, r, at):
    """Issue the product of the weights with a tile of values."""
    T.mbarrier_wait_parity(m.v_full[at % STAGES], at // STAGES % 2)
    T.gemm(r.weights, m.v[at % STAGES, :, :], r.sums, wg_wait=-1, policy=FULL_ROW)


@T.macro
def consume(p, m, r, tx, bx, own, count, exponent):
    """Attend to every key of a block's tiles, one after the other."""
    for turn in T.serial(own):
        first = p.place(turn, bx)[1]
        T.fill(r.sums, 0)
        T.fill(r.total, 0)
        T.fill(r.top, LOWEST)
        T.mbarrier_wait_parity(m.q_full, turn % 2)
        score(m, r, count[0])
        T.wait_wgmma(0)
        arrive(tx, m.k_empty, count[0] % STAGES)
        soften(p, r, first, 0, exponent)
        T.copy(r.scores, r.weights)
        for step in T.serial(1, p.steps(first)):
            score(m, r, count[0] + 1)
            gather(m, r, count[0])
            T.wait_wgmma(1)
            arrive(tx, m.k_empty, (count[0] + 1) % STAGES)
            soften(p, r, first, step, exponent)
            T.wait_wgmma(0)
            arrive(tx, m.v_empty, count[0] % STAGES)
            for i, j in T.Parallel(BM, p.width):
                r.sums[i, j] *= r.factor[i]
            T.copy(r.scores, r.weights)
            count[0] = count[0] + 1
        arrive(tx, m.q_empty, 0)
        gather(m, r, count[0])
        T.wait_wgmma(0)
        arrive(tx, m.v_empty, count[0] % STAGES)
        count[0] = count[0] + 1
        for i, j in T.Parallel(BM, p.width):
            r.sums[i, j] /= r.total[i]
        T.mbarrier_wait_parity(m.o_empty, (turn + 1) % 2)
        T.copy(r.sums, m.o)
        T.fence_proxy_async()
        T.mbarrier_arrive(m.o_full)


def as_sums(columns):
    """Where the two groups hold some columns of scores: as they hold the sums of a product."""

    def place_of(i, j):
        return i // 64 * 128 + i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2

    return T.Fragment((BM, columns), forward_fn=place_of)


@T.macro
def late_fragments(p, guess):
    """As `fragments`; sums of weights stay apart by the eight columns that repeat in a row of scores."""
    scores = T.alloc_fragment((BM, BN), "float32")
    weights = T.alloc_fragment((BM, BN), p.dtype)
    others = T.alloc_fragment((BM, BN), p.dtype)
    chunk = T.alloc_fragment((BM, CHUNK), "float32")
    sums = T.alloc_fragment((BM, p.width), "float32")
    part = T.alloc_fragment((BM, 8), "float32")
    total = T.alloc_fragment((BM, 8), "float32")
    top = T.alloc_fragment((BM,), "float32")
    before = T.alloc_fragment((BM,), "float32")
    factor = T.alloc_fragment((BM,), "float32")
    row = T.alloc_fragment((BM,), "float32")
    large = T.alloc_fragment((32 * WARPS,), "int32")
    own = T.Fragment((32 * WARPS,), forward_fn=lambda i: (i, 0))
    T.annotate_layout({part: as_sums(8), total: as_sums(8), chunk: as_sums(CHUNK), large: own})
    return SimpleNamespace(
        scores=scores, weights=weights, others=others, chunk=chunk, sums=sums, part=part, total=total, top=top,
        before=before, factor=factor, row=row, large=large,
    )  # fmt: skip


@T.macro
def mask(p, r, first, step):
    """Hide the scores of keys that a query must not see."""
    if p.masked(first, step):
        for i, j in T.Parallel(BM, BN):
            r.scores[i, j] = T.if_then_else(p.seen(first + i, step * BN + j), r.scores[i, j], -T.infinity("float32"))


@T.macro
def raise_top(r, exponent):
    """Maxima of the scores so far, and what they do to earlier sums."""
    T.copy(r.top, r.before)
    T.reduce_max(r.scores, r.top, dim=1, clear=False)
    for i in T.Parallel(BM):
        r.factor[i] = T.exp2((r.before[i] - r.top[i]) * exponent)


@T.macro
def weigh(r, weights, exponent):
    """Weights against the present maxima beside the scores, and a thread's own sums of them."""
    T.clear(r.part)
    for at in T.unroll(BN // CHUNK):
        for i, j in T.Parallel(BM, CHUNK):
            r.chunk[i, j] = T.exp2(r.scores[i, at * CHUNK + j] * exponent - r.top[i] * exponent)
        for i, j in T.Parallel(BM, CHUNK):
            weights[i, at * CHUNK + j] = r.chunk[i, j]
        for i, j in T.Parallel(BM, 8):
            for k in T.unroll(CHUNK // 8):
                r.part[i, j] += r.chunk[i, k * 8 + j]


@T.macro
def weigh_in_place(r, exponent):
    """Scores become weights in fp32, and a thread's own sums of them."""
    for i, j in T.Parallel(BM, BN):
        r.scores[i, j] = T.exp2(r.scores[i, j] * exponent - r.top[i] * exponent)
    T.clear(r.part)
    for i, j in T.Parallel(BM, 8):
        for k in T.unroll(BN // 8):
            r.part[i, j] += r.scores[i, k * 8 + j]


@T.macro
def rescale(r):
    """Earlier sums of weights, as the new maxima want them."""
    for i, j in T.Parallel(BM, 8):
        r.total[i, j] *= r.factor[i]


@T.macro
def add_part(r):
    """The new weights into their sums."""
    for i, j in T.Parallel(BM, 8):
        r.total[i, j] += r.part[i, j]


@T.macro
def ask(m, r, at):
    """Issue the product of the queries with a tile of keys."""
    T.mbarrier_wait_parity(m.k_full[at % STAGES], at // STAGES % 2)
    T.gemm_v1(m.q, m.k[at % STAGES, :, :], r.scores, transpose_B=True, clear_accum=True, wg_wait=-1, policy=FULL_ROW)


@T.macro
def issue(m, r, weights, at):
    """Issue the product of some weights with a tile of values."""
    T.mbarrier_wait_parity(m.v_full[at % STAGES], at // STAGES % 2)
    T.gemm(weights, m.v[at % STAGES, :, :], r.sums, wg_wait=-1, policy=FULL_ROW)


@T.macro
def rescale_sums(p, r):
    """Earlier sums of values, as the new maxima want them."""
    for i, j in T.Parallel(BM, p.width):
        r.sums[i, j] *= r.factor[i]


@T.macro
def exact_step(p, m, r, tx, first, step, at, exponent):
    """The next scores, and the values of the keys before under their softmax."""
    ask(m, r, at)
    issue(m, r, r.weights, at - 1)
    T.wait_wgmma(1)
    arrive(tx, m.k_empty, at % STAGES)
    mask(p, r, first, step)
    raise_top(r, exponent)
    weigh_in_place(r, exponent)
    rescale(r)
    add_part(r)
    T.wait_wgmma(0)
    arrive(tx, m.v_empty, (at - 1) % STAGES)
    rescale_sums(p, r)
    T.copy(r.scores, r.weights)


@T.macro
def guessed_step(p, m, r, weights, following, tx, first, step, at, exponent):
    """The same against maxima of earlier keys; only when a warp's weights grow too large it takes the new ones."""
    ask(m, r, at)
    issue(m, r, weights, at - 1)
    T.wait_wgmma(1)
    arrive(tx, m.k_empty, at % STAGES)
    mask(p, r, first, step)
    weigh(r, following, exponent)
    # Every thread looks at its own four sums: of rows eight apart, two columns each.
    T.clear(r.large)
    for i in T.Parallel(32 * WARPS):
        for down in T.unroll(2):
            for right in T.unroll(2):
                r.large[i] = T.if_then_else(
                    r.part[i // 32 * 16 + i % 32 // 4 + 8 * down, i % 4 * 2 + right] <= LIMIT, r.large[i], 1
                )
    for i in T.Parallel(32 * WARPS):
        r.large[i] = T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), r.large[i])
    if r.large[tx] != 0:
        raise_top(r, exponent)
        weigh(r, following, exponent)
        rescale(r)
    add_part(r)
    T.wait_wgmma(0)
    arrive(tx, m.v_empty, (at - 1) % STAGES)
    if r.large[tx] != 0:
        rescale_sums(p, r)


@T.macro
def finish(p, m, r, weights, tx, turn, at):
    """The last values of a tile, and its result."""
    arrive(tx, m.q_empty, 0)
    issue(m, r, weights, at)
    T.reduce_sum(r.total, r.row, dim=1)
    for i in T.Parallel(BM):
        r.row[i] = 1.0 / r.row[i]
    T.wait_wgmma(0)
    arrive(tx, m.v_empty, at % STAGES)
    for i, j in T.Parallel(BM, p.width):
        r.sums[i, j] *= r.row[i]
    T.mbarrier_wait_parity(m.o_empty, (turn + 1) % 2)
    T.copy(r.sums, m.o)
    T.fence_proxy_async()
    T.mbarrier_arrive(m.o_full)


@T.macro
def consume_late(p, m, r, guess, tx, bx, own, count, exponent):
    """As `consume`, with sums of weights apart by columns until the end of a tile."""
    for turn in T.serial(own):
        first = p.place(turn, bx)[1]
        at = count[0] if p.causal else turn * p.steps(first)
        T.fill(r.sums, 0)
        T.fill(r.top, LOWEST)
        T.mbarrier_wait_parity(m.q_full, turn % 2)
        ask(m, r, at)
        T.wait_wgmma(0)
        arrive(tx, m.k_empty, at % STAGES)
        mask(p, r, first, 0)
        raise_top(r, exponent)
        if guess:
            weigh(r, r.weights, exponent)
        else:
            weigh_in_place(r, exponent)
            T.copy(r.scores, r.weights)
        T.copy(r.part, r.total)
        if guess:
            # Two steps at a time: a product reads one set of weights, the softmax under it writes the other.
            for pair in T.serial((p.steps(first) - 1) // 2):
                guessed_step(p, m, r, r.weights, r.others, tx, first, 2 * pair + 1, at + 2 * pair + 1, exponent)
                guessed_step(p, m, r, r.others, r.weights, tx, first, 2 * pair + 2, at + 2 * pair + 2, exponent)
            if p.steps(first) % 2 == 0:
                guessed_step(
                    p, m, r, r.weights, r.others, tx, first, p.steps(first) - 1, at + p.steps(first) - 1, exponent
                )
                finish(p, m, r, r.others, tx, turn, at + p.steps(first) - 1)
            else:
                finish(p, m, r, r.weights, tx, turn, at + p.steps(first) - 1)
        else:
            for step in T.serial(1, p.steps(first)):
                exact_step(p, m, r, tx, first, step, at + step, exponent)
            finish(p, m, r, r.weights, tx, turn, at + p.steps(first) - 1)
        if p.causal:
            count[0] = count[0] + p.steps(first)


@T.macro
def feed(p, m, tx, bx, own, count, Q, K, V):
    """Load all tiles of a block."""
    for turn in T.serial(own):
        head, first = p.place(turn, bx)
        T.mbarrier_wait_parity(m.q_empty, (turn + 1) % 2)
        T.copy(p.rows(Q, p.heads, head, first, BM), m.q)
        T.mbarrier_arrive(m.q_full)
        for step in T.serial(p.steps(first)):
            load(p, K, p.key_heads, head, step, m.k, m.k_full, m.k_empty, count[0])
            load(p, V, p.key_heads, head, step, m.v, m.v_full, m.v_empty, count[0])
            count[0] = count[0] + 1


def attention(batch, heads, tokens, width, key_heads, causal=False, by_token=False, scale=None, dtype="float16"):
    """o = softmax(scale q k^T) v of [batch, heads, tokens, width], or of [batch, tokens, heads, width]."""
    p = Problem(batch, heads, tokens, width, key_heads, causal, by_token, dtype)
    exponent = LOG2_E * (width**-0.5 if scale is None else scale)

    def attend_late(Q, K, V, Out):
        guess = VARIANTS[VARIANT]
        with T.Kernel(p.blocks, threads=384) as bx:
            m = shared(p, 32)
            r = late_fragments(p, guess)
            count = T.alloc_local((1,), "int32")  # tiles of keys since the start of the block
            tx, own = T.get_thread_binding(), T.ceildiv(p.work - bx, p.blocks)
            count[0] = 0
            with T.ws(2):
                T.dec_max_nreg(24)
                if tx < 32 * WARPS + 32:
                    feed(p, m, tx, bx, own, count, Q, K, V)
                if tx >= 32 * WARPS + 96:
                    for turn in T.serial(own):
                        store(p, m, Out, turn, bx)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                consume_late(p, m, r, guess, tx, bx, own, count, exponent)

    def attend(Q, K, V, Out):
        with T.Kernel(p.blocks, threads=384) as bx:
            m = shared(p)
            r = fragments(p)
            count = T.alloc_local((1,), "int32")  # tiles of keys since the start of the block
            tx, own = T.get_thread_binding(), T.ceildiv(p.work - bx, p.blocks)
            count[0] = 0
            with T.ws(2):
                T.dec_max_nreg(24)
                produce(p, m, bx, own, count, Q, K, V, Out)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                consume(p, m, r, tx, bx, own, count, exponent)

    # Types in the signature of a body that does not name their sizes are not found by TileLang.
    names = {"Q": heads, "K": key_heads, "V": key_heads, "Out": heads}
    program = attend_late if VARIANT else attend
    program.__annotations__ = {name: p.tensor(count) for name, count in names.items()}
    return T.prim_func(program)


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
