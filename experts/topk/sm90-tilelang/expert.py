"""Top-k for sm_90 in TileLang: a block per row, its keys in registers, the threshold by radix digits from the top.

A pass counts one digit of the keys that agree with the threshold so far, and finds the bin where the k-th largest
lies. The search ends early when that bin is needed whole. One block scan then places winners and ties: same inputs,
same bits. All barriers are written here, none by TileLang.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

WORDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
INTEGERS = {32: torch.int32, 16: torch.int16}
DIGITS = {32: ((20, 12), (10, 10), (0, 10)), 16: ((4, 12), (0, 4))}
"""Lowest bit and width of each pass: twelve bits of a row of normal fp32 numbers leave about a hundred keys."""
MAX_COLUMNS = 32768
"""32 keys a thread, and counts of keys that fit into 16 bits."""
PASSES = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def topk(rows, columns, k, word=32):
    """The TileLang program of one shape; keys come and values go as integers of `word` bits."""
    threads = next((count for count in (256, 512) if columns <= 4 * count), 1024)
    vector = 4 if columns % 4 == 0 else 1
    loads = -(-columns // (vector * threads))
    ones = (1 << (word - 1)) - 1
    digits = DIGITS[word]
    bins = sum(1 << width for _low, width in digits)

    def flipped(bits):
        return T.bitwise_xor(bits, T.shift_right(bits, 31) & ones)

    def agrees(key, state, turn):
        return T.shift_right(key, sum(digits[turn])) == state[0] if turn else True

    def start(state, turn):
        """The lowest digit that a pass can find, with the threshold's digits before it."""
        width = digits[turn][1]
        return state[0] * (1 << width) if turn else T.int32(-(1 << (width - 1)))

    @T.macro
    def inclusive(lane, value):
        """Turn value[0] into the sum over this lane and those before it."""
        for step in T.unroll(5):
            moved = T.shfl_up(value[0], T.shift_left(1, step))
            if lane >= T.shift_left(1, step):
                value[0] = value[0] + moved

    @T.macro
    def exclusive(tx, totals, turn, value, before):
        """Put the sum of value[0] over all earlier threads into before[0]. A word of totals[turn] for each warp."""
        others = T.alloc_local((1,), "int32")
        before[0] = value[0]
        inclusive(tx % 32, before)
        if tx % 32 == 31:
            totals[turn, tx // 32] = before[0]
        T.sync_threads()
        others[0] = T.int32(0)
        if tx % 32 < threads // 32:
            others[0] = totals[turn, tx % 32]
        inclusive(tx % 32, others)
        others[0] = T.shfl_sync(0xFFFFFFFF, others[0], T.max(tx // 32 - 1, 0))
        before[0] = before[0] - value[0]
        if tx >= 32:
            before[0] = before[0] + others[0]

    @T.macro
    def narrow(tx, keys, counts, totals, found, state, turn):
        """One pass. state: the threshold so far, how many keys that agree with it are winners, how many agree."""
        low, width = digits[turn]
        first = sum(1 << w for _low, w in digits[:turn])
        each = max(1, (1 << width) // threads)
        mine = T.alloc_local((each,), "int32")
        own = T.alloc_local((1,), "int32")
        before = T.alloc_local((1,), "int32")
        for v in T.unroll(loads):
            for j in T.unroll(vector):
                key = keys[v * vector + j]
                if (v * threads + tx) * vector < columns and agrees(key, state, turn):
                    T.atomic_add(counts[first + T.shift_right(key, low) - start(state, turn)], 1)
        T.sync_threads()
        # Thread 0 has the largest digits; threads beyond the smallest have none.
        own[0] = T.int32(0)
        for j in T.unroll(each):
            mine[j] = T.int32(0)
            if tx * each < (1 << width):
                mine[j] = counts[first + (1 << width) - 1 - (tx * each + j)]
            own[0] = own[0] + mine[j]
        exclusive(tx, totals, turn, own, before)
        if before[0] < state[1] and state[1] <= before[0] + own[0]:
            for j in T.unroll(each):
                if before[0] < state[1] and state[1] <= before[0] + mine[j]:
                    found[0] = start(state, turn) + (1 << width) - 1 - (tx * each + j)
                    found[1] = state[1] - before[0]
                    found[2] = mine[j]
                before[0] = before[0] + mine[j]
        T.sync_threads()
        state[0] = found[0]
        state[1] = found[1]
        state[2] = found[2]

    @T.prim_func
    def select(
        X: T.Tensor((rows, columns), f"int{word}"),
        values: T.Tensor((rows, k), f"int{word}"),
        indices: T.Tensor((rows, k), "int64"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            counts = T.alloc_shared((bins,), "int32")
            totals = T.alloc_shared((len(digits) + 1, 32), "int32")
            found = T.alloc_shared((3,), "int32")
            tx = T.get_thread_binding()
            raw = T.alloc_local((vector,), f"int{word}")
            keys = T.alloc_local((loads * vector,), "int32")
            state = T.alloc_local((3,), "int32")
            unread = T.alloc_local((1,), "int32")  # bits of a key that no pass looked at
            ranked = T.alloc_local((1,), "int32")  # winners, and 65,536 for each tie
            before = T.alloc_local((1,), "int32")
            for i in T.serial(T.ceildiv(bins, threads)):
                if i * threads + tx < bins:
                    counts[i * threads + tx] = T.int32(0)
            for v in T.unroll(loads):
                for j in T.unroll(vector):
                    raw[j] = T.cast(0, f"int{word}")
                if (v * threads + tx) * vector < columns:
                    for j in T.vectorized(vector):
                        raw[j] = X[row, (v * threads + tx) * vector + j]
                for j in T.unroll(vector):
                    # Larger numbers are larger integers when the negative ones have all bits but the sign flipped.
                    keys[v * vector + j] = flipped(T.cast(raw[j], "int32"))
            state[1] = T.int32(k)
            T.sync_threads()
            narrow(tx, keys, counts, totals, found, state, 0)
            unread[0] = T.int32(digits[0][0])
            if state[1] != state[2]:
                narrow(tx, keys, counts, totals, found, state, 1)
                unread[0] = T.int32(digits[1][0])
                # Inside, not behind: TileLang 0.1.8 merges ifs whose conditions read alike, whatever changed between.
                if len(digits) > 2 and state[1] != state[2]:
                    narrow(tx, keys, counts, totals, found, state, 2)
                    unread[0] = T.int32(0)
            ranked[0] = T.int32(0)
            for v in T.unroll(loads):
                for j in T.unroll(vector):
                    if (v * threads + tx) * vector < columns:
                        top = T.shift_right(keys[v * vector + j], unread[0])
                        ranked[0] += T.if_then_else(
                            top > state[0], T.int32(1), T.if_then_else(top == state[0], T.int32(65536), T.int32(0))
                        )
            exclusive(tx, totals, len(digits), ranked, before)
            for v in T.unroll(loads):
                for j in T.unroll(vector):
                    if (v * threads + tx) * vector < columns:
                        key = keys[v * vector + j]
                        top = T.shift_right(key, unread[0])
                        ties = T.shift_right(before[0], T.int32(16))
                        wins = top > state[0]
                        if wins or (top == state[0] and ties < state[1]):
                            place = T.cast(
                                T.if_then_else(wins, before[0] & T.int32(65535), T.int32(k) - state[1] + ties), "int32"
                            )
                            values[row, place] = T.cast(flipped(key), f"int{word}")
                            indices[row, place] = T.cast((v * threads + tx) * vector + j, "int64")
                        before[0] += T.if_then_else(
                            wins, T.int32(1), T.if_then_else(top == state[0], T.int32(65536), T.int32(0))
                        )

    return select


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
