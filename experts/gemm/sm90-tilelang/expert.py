"""GEMM for sm_90 in TileLang: c[M,N] = a[M,K] b[K,N], row-major bf16 or fp16, fp32 accumulation; one build per shape.

Blocks of 128x256 stay on their multiprocessor and take tile after tile. Two groups multiply, each with a product in
flight. One loads three stages ahead, also into the next tile, and stores a result while the next tile is multiplied.
Every other tile of a block walks K backwards, over slices that may still be in L2. Rows that TMA does not take have a
program of one tile a block.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BM, BN, BK, STAGES = 128, 256, 64, 3
MULTIPROCESSORS = 132
BAND = 16
"""Rows of tiles that run next to each other: 128 blocks cover a square of 2,048."""
MULTIPLIERS = 256
"""Threads of the two groups that multiply."""
VARIANT = 0
"""Which of VARIANTS runs; 0 is the program that was judged. NOTES.md says what the others are for."""
VARIANTS = {1: (3, 1, False), 2: (4, 2, True), 3: (3, 1, True)}
"""Stages, parts in which a result passes through shared memory, and whether under the next tile's products."""
PASSES = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def place(tile, rows, columns):
    """Row and column of a tile, by bands of rows."""
    inside = tile % (BAND * columns)
    high = T.min(BAND, rows - tile // (BAND * columns) * BAND)
    return tile // (BAND * columns) * BAND + inside % high, inside // high


@T.macro
def multiply(left, right, sums, full, empty, tx, turn, steps):
    """One tile's products, one of them in flight while the next slice is waited for."""
    for step in T.serial(steps):
        count = turn * steps + step
        T.mbarrier_wait_parity(full[count % STAGES], count // STAGES % 2)
        T.gemm(
            left[count % STAGES, :, :], right[count % STAGES, :, :], sums, wg_wait=-1, policy=T.GemmWarpPolicy.FullRow
        )
        # The product before this one has ended: a warp does not read its stage any more.
        T.wait_wgmma(1)
        if tx % 32 == 0 and step > 0:
            T.mbarrier_arrive(empty[(count + STAGES - 1) % STAGES])
    T.wait_wgmma(0)
    if tx % 32 == 0:
        T.mbarrier_arrive(empty[(turn * steps + steps - 1) % STAGES])


def gemm(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape, with rows of a multiple of 16 bytes."""
    if VARIANT:
        return gemm_warps(M, N, K, dtype, *VARIANTS[VARIANT])
    rows, columns, steps = -(-M // BM), -(-N // BN), -(-K // BK)
    tiles = rows * columns
    blocks = -(-tiles // -(-tiles // MULTIPROCESSORS))

    @T.macro
    def store(C, result, done, stored, turn, bx):
        """The result of one tile, when it is there."""
        row, column = place(turn * blocks + bx, rows, columns)
        T.mbarrier_wait_parity(done, turn % 2)
        T.copy(result, C[row * BM : (row + 1) * BM, column * BN : (column + 1) * BN])
        T.mbarrier_arrive(stored)

    def gemm_ring(A, B, C):
        with T.Kernel(blocks, threads=384) as bx:
            left = T.alloc_shared((STAGES, BM, BK), dtype)
            right = T.alloc_shared((STAGES, BK, BN), dtype)
            result = T.alloc_shared((BM, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            tx = T.get_thread_binding()
            full = T.alloc_barrier([128] * STAGES)
            empty = T.alloc_barrier([MULTIPLIERS // 32] * STAGES)
            done = T.alloc_barrier(MULTIPLIERS)
            stored = T.alloc_barrier(128)
            own = T.ceildiv(tiles - bx, blocks)
            with T.ws(2):
                T.dec_max_nreg(24)
                for turn in T.serial(own):
                    row, column = place(turn * blocks + bx, rows, columns)
                    for step in T.serial(steps):
                        count, slice = turn * steps + step, T.if_then_else(turn % 2 == 0, step, steps - 1 - step)
                        T.mbarrier_wait_parity(empty[count % STAGES], (count // STAGES + 1) % 2)
                        T.copy(A[row * BM : (row + 1) * BM, slice * BK : (slice + 1) * BK], left[count % STAGES, :, :])
                        T.copy(
                            B[slice * BK : (slice + 1) * BK, column * BN : (column + 1) * BN],
                            right[count % STAGES, :, :],
                        )
                        T.mbarrier_arrive(full[count % STAGES])
                        # The ring is full again: time to store the tile before, whose sums are about to be ready.
                        if step == min(STAGES, steps) - 1 and turn > 0:
                            store(C, result, done, stored, turn - 1, bx)
                store(C, result, done, stored, own - 1, bx)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for turn in T.serial(own):
                    T.clear(sums)
                    multiply(left, right, sums, full, empty, tx, turn, steps)
                    T.mbarrier_wait_parity(stored, (turn + 1) % 2)
                    T.copy(sums, result)
                    T.fence_proxy_async()
                    T.mbarrier_arrive(done)

    # Types in the signature of a body that does not name their sizes are not found by TileLang.
    gemm_ring.__annotations__ = {
        "A": T.Tensor((M, K), dtype),
        "B": T.Tensor((K, N), dtype),
        "C": T.Tensor((M, N), dtype),
    }
    return T.prim_func(gemm_ring)


def part_tile(wide):
    """Where the two groups hold some columns of a tile: as they hold the sums of a product."""

    def place_of(i, j):
        return i // 64 * 128 + i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2

    return T.Fragment((BM, wide), forward_fn=place_of)


@T.macro
def pack(sums, part, first, wide):
    """Some columns of the sums as they are stored, in registers."""
    for i, j in T.Parallel(BM, wide):
        part[i, j] = sums[i, first + j]


@T.macro
def hand_over(part, result, done, stored, count):
    """A part of a result to the warp that stores."""
    T.mbarrier_wait_parity(stored, (count + 1) % 2)
    T.copy(part, result)
    T.fence_proxy_async()
    T.mbarrier_arrive(done)


def gemm_warps(M, N, K, dtype, stages, parts, late):
    """The same with a warp that only loads and one that only stores."""
    rows, columns, steps = -(-M // BM), -(-N // BN), -(-K // BK)
    tiles = rows * columns
    blocks = -(-tiles // -(-tiles // MULTIPROCESSORS))
    wide = BN // parts
    first, second = min(1, steps - 1), min(3, steps - 1)

    @T.macro
    def load(A, B, left, right, full, empty, tx, own, bx):
        """The slices of all of a block's tiles."""
        for turn in T.serial(own):
            row, column = place(turn * blocks + bx, rows, columns)
            for step in T.serial(steps):
                count, slice = turn * steps + step, T.if_then_else(turn % 2 == 0, step, steps - 1 - step)
                T.mbarrier_wait_parity(empty[count % stages], (count // stages + 1) % 2)
                T.copy(A[row * BM : (row + 1) * BM, slice * BK : (slice + 1) * BK], left[count % stages, :, :])
                T.copy(B[slice * BK : (slice + 1) * BK, column * BN : (column + 1) * BN], right[count % stages, :, :])
                # By the lane that loads, after it has said how many bytes will come.
                if tx == MULTIPLIERS:
                    T.mbarrier_arrive(full[count % stages])

    @T.macro
    def store(C, result, done, stored, own, bx):
        """The results of all of a block's tiles, as they come."""
        for turn in T.serial(own):
            row, column = place(turn * blocks + bx, rows, columns)
            for part in T.serial(parts):
                T.mbarrier_wait_parity(done, (turn * parts + part) % 2)
                left = column * BN + part * wide
                T.copy(result, C[row * BM : (row + 1) * BM, left : left + wide])
                T.mbarrier_arrive(stored)

    def gemm_ring(A, B, C):
        with T.Kernel(blocks, threads=384) as bx:
            left = T.alloc_shared((stages, BM, BK), dtype)
            right = T.alloc_shared((stages, BK, BN), dtype)
            result = T.alloc_shared((BM, wide), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            low = T.alloc_fragment((BM, wide), dtype)
            high = T.alloc_fragment((BM, wide), dtype)
            T.annotate_layout({low: part_tile(wide), high: part_tile(wide)})
            tx = T.get_thread_binding()
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([MULTIPLIERS // 32] * stages)
            done = T.alloc_barrier(MULTIPLIERS)
            stored = T.alloc_barrier(32)
            own = T.ceildiv(tiles - bx, blocks)
            with T.ws(2):
                T.dec_max_nreg(24)
                if tx < MULTIPLIERS + 32:
                    load(A, B, left, right, full, empty, tx, own, bx)
                if tx >= MULTIPLIERS + 96:
                    store(C, result, done, stored, own, bx)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for turn in T.serial(own):
                    for step in T.serial(steps):
                        count = turn * steps + step
                        T.mbarrier_wait_parity(full[count % stages], count // stages % 2)
                        T.gemm(
                            left[count % stages, :, :], right[count % stages, :, :], sums,
                            clear_accum=step == 0, wg_wait=-1, policy=T.GemmWarpPolicy.FullRow,
                        )  # fmt: skip
                        # Under the products of this slice and the one before.
                        if late:  # noqa: SIM102 - known when it is built, what is below when it runs
                            if turn > 0 and step == first:
                                hand_over(low, result, done, stored, (turn - 1) * parts)
                        if late and parts == 2:  # noqa: SIM102
                            if turn > 0 and step == second:
                                hand_over(high, result, done, stored, (turn - 1) * parts + 1)
                        T.wait_wgmma(1)
                        if tx % 32 == 0 and step > 0:
                            T.mbarrier_arrive(empty[(count + stages - 1) % stages])
                    T.wait_wgmma(0)
                    if tx % 32 == 0:
                        T.mbarrier_arrive(empty[(turn * steps + steps - 1) % stages])
                    if late:
                        pack(sums, low, 0, wide)
                    if late and parts == 2:
                        pack(sums, high, wide, wide)
                    if not late:
                        hand_over(sums, result, done, stored, turn)
                if late:
                    hand_over(low, result, done, stored, (own - 1) * parts)
                if late and parts == 2:
                    hand_over(high, result, done, stored, (own - 1) * parts + 1)

    gemm_ring.__annotations__ = {
        "A": T.Tensor((M, K), dtype),
        "B": T.Tensor((K, N), dtype),
        "C": T.Tensor((M, N), dtype),
    }
    return T.prim_func(gemm_ring)


def gemm_any(M, N, K, dtype="bfloat16"):
    """The TileLang program of one shape, whatever the rows' alignment: a tile a block, TileLang's own groups."""

    @T.prim_func
    def gemm_tile(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=256) as (column, row):
            left = T.alloc_shared((BM, BK), dtype)
            right = T.alloc_shared((BK, BN), dtype)
            sums = T.alloc_fragment((BM, BN), "float32")
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(K, BK), num_stages=STAGES):
                T.copy(A[row * BM, step * BK], left)
                T.copy(B[step * BK, column * BN], right)
                T.gemm(left, right, sums)
            T.copy(sums, C[row * BM, column * BN])

    return gemm_tile


@functools.cache
def compiled(M, N, K, dtype):
    """The kernel of one shape and type, built when it is first asked for."""
    if K % 8 == 0 and N % 8 == 0:
        return tilelang.compile(gemm(M, N, K, dtype), pass_configs=PASSES)
    return tilelang.compile(gemm_any(M, N, K, dtype))


def run(a, b, out):
    """Compute out = a @ b. Raises ValueError for other types and strides."""
    if a.dtype not in NAMES or not a.dtype == b.dtype == out.dtype:
        raise ValueError(f"bf16 or fp16 only, all three the same; got {a.dtype}, {b.dtype}, {out.dtype}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError("row-major contiguous matrices only")
    compiled(a.shape[0], b.shape[1], a.shape[1], NAMES[a.dtype])(a, b, out)


COMPILE = {
    "sm90": [{"kernel": gemm, "arguments": {"M": 4096, "N": 4096, "K": 4096}, "options": {"pass_configs": PASSES}}]
}
