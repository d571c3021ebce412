"""Top-k for sm_90 in TileLang: a block per row, its keys in registers, the threshold by radix digits from the top.

A pass counts one digit of the keys that agree with the threshold so far, and finds the bin where the k-th largest
lies. The search ends early when that bin is needed whole. One block scan then places winners and ties: same inputs,
same bits. All barriers are written here, none by TileLang.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import tilelang
import tilelang.language as T
import torch

WORDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
INTEGERS = {32: torch.int32, 16: torch.int16}
DIGITS = {32: ((20, 12), (10, 10), (0, 10)), 16: ((4, 12), (0, 4))}
"""Lowest bit and width of each pass: twelve bits of a row of normal fp32 numbers leave about a hundred keys."""
MAX_COLUMNS = 16384
"""16 keys a thread. With 24 of them 1,024 threads spill; counts of keys must fit into 15 bits."""
MAX_ELEMENTS = 1 << 31
TIE = 65536
"""What a tie adds to a word that counts winners in its lower half."""
PASSES = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


@dataclass(frozen=True)
class Plan:
    """How a block divides a row: a thread has keys of `loads` vectors."""

    columns: int
    k: int
    word: int

    @property
    def threads(self):
        """About four keys each."""
        return next((count for count in (256, 512) if self.columns <= 4 * count), 1024)

    @property
    def vector(self):
        """Neighbours that are read at once."""
        return 4 if self.columns % 4 == 0 else 1

    @property
    def loads(self):
        return -(-self.columns // (self.vector * self.threads))

    @property
    def digits(self):
        return DIGITS[self.word]

    def first_bin(self, turn):
        """Where a pass has its counts; behind the last pass, how many there are."""
        return sum(1 << width for _low, width in self.digits[:turn])

    def place(self, tx, v):
        """Column of the first key of a vector."""
        return (v * self.threads + tx) * self.vector

    def ordered(self, bits):
        """Numbers in the order of signed integers, or back: all bits of negative ones but the sign are flipped."""
        return T.bitwise_xor(bits, T.shift_right(bits, 31) & ((1 << (self.word - 1)) - 1))

    def agrees(self, key, state, turn):
        """Whether a key has the threshold's digits so far."""
        return T.shift_right(key, sum(self.digits[turn])) == state[0] if turn else True

    def start(self, state, turn):
        """The lowest digit that a pass can find, with the threshold's digits before it."""
        width = self.digits[turn][1]
        return state[0] * (1 << width) if turn else T.int32(-(1 << (width - 1)))


@T.macro
def inclusive(lane, value):
    """Turn value[0] into the sum over this lane and those before it."""
    for step in T.unroll(5):
        moved = T.shfl_up(value[0], T.shift_left(1, step))
        if lane >= T.shift_left(1, step):
            value[0] = value[0] + moved


@T.macro
def exclusive(plan, tx, totals, turn, value, before):
    """Put the sum of value[0] over all earlier threads into before[0]. A word of totals[turn] for each warp."""
    others = T.alloc_local((1,), "int32")
    before[0] = value[0]
    inclusive(tx % 32, before)
    if tx % 32 == 31:
        totals[turn, tx // 32] = before[0]
    T.sync_threads()
    others[0] = 0
    if tx % 32 < plan.threads // 32:
        others[0] = totals[turn, tx % 32]
    inclusive(tx % 32, others)
    others[0] = T.shfl_sync(0xFFFFFFFF, others[0], T.max(tx // 32 - 1, 0))
    before[0] = before[0] - value[0]
    if tx >= 32:
        before[0] = before[0] + others[0]


@T.macro
def read(plan, tx, row, X, keys):
    """A thread's keys. Those behind the row's end are not looked at later."""
    raw = T.alloc_local((plan.vector,), f"int{plan.word}")
    for v in T.unroll(plan.loads):
        for j in T.unroll(plan.vector):
            raw[j] = T.cast(0, f"int{plan.word}")
        if plan.place(tx, v) < plan.columns:
            for j in T.vectorized(plan.vector):
                raw[j] = X[row, plan.place(tx, v) + j]
        for j in T.unroll(plan.vector):
            keys[v * plan.vector + j] = plan.ordered(T.cast(raw[j], "int32"))


@T.macro
def narrow(plan, tx, keys, counts, totals, found, state, turn):
    """One pass. state: the threshold so far, how many keys that agree with it are winners, how many agree."""
    low, width = plan.digits[turn]
    each = max(1, (1 << width) // plan.threads)
    last = plan.first_bin(turn + 1) - 1
    mine = T.alloc_local((each,), "int32")
    own = T.alloc_local((1,), "int32")
    before = T.alloc_local((1,), "int32")
    for v in T.unroll(plan.loads):
        for j in T.unroll(plan.vector):
            key = keys[v * plan.vector + j]
            if plan.place(tx, v) < plan.columns and plan.agrees(key, state, turn):
                T.atomic_add(counts[plan.first_bin(turn) + T.shift_right(key, low) - plan.start(state, turn)], 1)
    T.sync_threads()
    # Thread 0 has the largest digits; threads beyond the smallest have none.
    own[0] = 0
    for j in T.unroll(each):
        mine[j] = 0
        if tx * each < (1 << width):
            mine[j] = counts[last - (tx * each + j)]
        own[0] = own[0] + mine[j]
    exclusive(plan, tx, totals, turn, own, before)
    if before[0] < state[1] and state[1] <= before[0] + own[0]:
        for j in T.unroll(each):
            if before[0] < state[1] and state[1] <= before[0] + mine[j]:
                found[0] = plan.start(state, turn) + (1 << width) - 1 - (tx * each + j)
                found[1] = state[1] - before[0]
                found[2] = mine[j]
            before[0] = before[0] + mine[j]
    T.sync_threads()
    state[0] = found[0]
    state[1] = found[1]
    state[2] = found[2]


@T.macro
def write(plan, tx, row, keys, totals, state, unread, values, indices):
    """Winners in the order of threads, then as many ties as are needed."""
    ranked = T.alloc_local((1,), "int32")
    before = T.alloc_local((1,), "int32")
    ranked[0] = 0
    for v in T.unroll(plan.loads):
        for j in T.unroll(plan.vector):
            if plan.place(tx, v) < plan.columns:
                top = T.shift_right(keys[v * plan.vector + j], unread[0])
                ranked[0] += T.if_then_else(top > state[0], 1, T.if_then_else(top == state[0], TIE, 0))
    exclusive(plan, tx, totals, len(plan.digits), ranked, before)
    for v in T.unroll(plan.loads):
        for j in T.unroll(plan.vector):
            if plan.place(tx, v) < plan.columns:
                top, ties = T.shift_right(keys[v * plan.vector + j], unread[0]), T.shift_right(before[0], 16)
                wins = top > state[0]
                if wins or (top == state[0] and ties < state[1]):
                    place = T.if_then_else(wins, before[0] & (TIE - 1), plan.k - state[1] + ties)
                    values[row, place] = T.cast(plan.ordered(keys[v * plan.vector + j]), f"int{plan.word}")
                    indices[row, place] = T.cast(plan.place(tx, v) + j, "int64")
                before[0] += T.if_then_else(wins, 1, T.if_then_else(top == state[0], TIE, 0))


def topk(rows, columns, k, word=32):
    """The TileLang program of one shape; keys come and values go as integers of `word` bits."""
    plan = Plan(columns, k, word)
    digits, bins = plan.digits, plan.first_bin(len(plan.digits))

    # No name of the C library: "select" is a system call, and the host code that TileLang exports would not compile.
    def select_rows(X, values, indices):
        with T.Kernel(rows, threads=plan.threads) as row:
            counts = T.alloc_shared((bins,), "int32")
            totals = T.alloc_shared((len(digits) + 1, 32), "int32")
            found = T.alloc_shared((3,), "int32")
            tx = T.get_thread_binding()
            keys = T.alloc_local((plan.loads * plan.vector,), "int32")
            state = T.alloc_local((3,), "int32")
            unread = T.alloc_local((1,), "int32")  # bits of a key that no pass looked at
            for i in T.serial(T.ceildiv(bins, plan.threads)):
                if i * plan.threads + tx < bins:
                    counts[i * plan.threads + tx] = 0
            read(plan, tx, row, X, keys)
            state[1] = k
            T.sync_threads()
            narrow(plan, tx, keys, counts, totals, found, state, 0)
            unread[0] = digits[0][0]
            if state[1] != state[2]:
                narrow(plan, tx, keys, counts, totals, found, state, 1)
                unread[0] = digits[1][0]
                # Inside, not behind: TileLang 0.1.8 merges ifs whose conditions read alike, whatever changed between.
                if len(digits) > 2 and state[1] != state[2]:
                    narrow(plan, tx, keys, counts, totals, found, state, 2)
                    unread[0] = 0
            write(plan, tx, row, keys, totals, state, unread, values, indices)

    # Types in the signature of a body that does not name their sizes are not found by TileLang.
    select_rows.__annotations__ = {
        "X": T.Tensor((rows, columns), f"int{word}"), "values": T.Tensor((rows, k), f"int{word}"),
        "indices": T.Tensor((rows, k), "int64"),
    }  # fmt: skip
    return T.prim_func(select_rows)


@functools.cache
def compiled(*arguments):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(topk(*arguments), pass_configs=PASSES)


def run(x, out):
    """Fill out = (values, indices) with the k largest of each row. Raises ValueError outside of the domain."""
    values, indices = out
    rows, columns = x.shape
    if x.dtype not in WORDS or values.dtype != x.dtype or indices.dtype != torch.int64:
        raise ValueError(f"x and values of one type, fp32, fp16 or bf16, and int64 indices; got {x.dtype}")
    if columns > MAX_COLUMNS:
        raise ValueError(f"up to {MAX_COLUMNS} columns; got {columns}")
    if not (x.is_contiguous() and values.is_contiguous() and indices.is_contiguous()):
        raise ValueError("contiguous tensors only")
    if x.numel() >= MAX_ELEMENTS:
        raise ValueError(f"fewer than 2^31 elements: TileLang counts in 32 bits; got {tuple(x.shape)}")
    word = WORDS[x.dtype]
    integer = INTEGERS[word]
    compiled(rows, columns, values.shape[1], word)(x.view(integer), values.view(integer), indices)


COMPILE = {
    "sm90": [
        {
            "kernel": topk,
            "arguments": {"rows": 64, "columns": 4096, "k": 512, "word": 32},
            "options": {"pass_configs": PASSES},
        }
    ]
}
