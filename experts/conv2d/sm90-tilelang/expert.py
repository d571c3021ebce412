"""Conv2d for sm_90 in TileLang: an implicit product of TMA's im2col loads with the filters, wgmma, a producer group.

Work is in NHWC. channels_last tensors are used as they lie. Contiguous ones are first reordered in scratch memory, and
their result comes from the transposed product, filters by pixels: a plane's neighbours are neighbours in a row.
"""

from __future__ import annotations

import functools

import tilelang
import tilelang.language as T
import torch

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
CHANNELS = 64
"""Channels of a step: 128 bytes, the width of TMA's swizzle."""
STAGES = 4
MULTIPROCESSORS = 132
MAX_ELEMENTS = 1 << 31
MAX_PIXELS = 65535 * 128
"""Tiles of pixels are the second dimension of a grid."""
PASSES = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}
"""Of the reordering kernel alone, which has its barriers written out."""


def tile_of(pixels, filters, sizes):
    """Pixels of a block, the size that leaves least of the last wave idle, and filters of a block."""
    block_f = 128 if filters > 64 else 64
    waves = {block: -(-(-(-pixels // block) * -(-filters // block_f)) // MULTIPROCESSORS) for block in sizes}
    return min(sizes, key=lambda block: waves[block] * block), block_f


def program(body, **tensors):
    """A TileLang program. Types in the signature of a body that does not name their sizes are not found by TileLang."""
    body.__annotations__ = tensors
    return T.prim_func(body)


def by_pixels(n, h, w, c, f, size, stride, dtype="float16"):
    """y[N P Q, F] = convolution of x[N,H,W,C] with filters[F, K K C], padded by K // 2."""
    pixels, depth = n * -(-h // stride) * -(-w // stride), size * size * c
    block_p, block_f = tile_of(pixels, f, (192, 128))

    def convolve(X, W, Y):
        with T.Kernel(T.ceildiv(f, block_f), T.ceildiv(pixels, block_p), threads=2 * block_p) as (column, row):
            image = T.alloc_shared((block_p, CHANNELS), dtype)
            filters = T.alloc_shared((block_f, CHANNELS), dtype)
            result = T.alloc_shared((block_p, block_f), dtype)
            sums = T.alloc_fragment((block_p, block_f), "float32")
            T.clear(sums)
            for step in T.Pipelined(depth // CHANNELS, num_stages=STAGES):
                T.c2d_im2col(X, image, row, step, size, stride, 1, size // 2)
                T.copy(W[column * block_f, step * CHANNELS], filters)
                T.gemm(image, filters, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(sums, result)
            T.copy(result, Y[row * block_p, column * block_f])

    images, filters, result = (n, h, w, c), (f, depth), (pixels, f)
    return program(convolve, X=T.Tensor(images, dtype), W=T.Tensor(filters, dtype), Y=T.Tensor(result, dtype))


def by_filters(n, h, w, c, f, size, stride, dtype="float16"):
    """y[N, F, P Q] = convolution of x[N,H,W,C] with filters[F, K K C], padded by K // 2."""
    plane, depth = -(-h // stride) * -(-w // stride), size * size * c
    pixels = n * plane
    block_p, block_f = tile_of(pixels, f, (256, 128))

    def convolve(X, W, Y):
        with T.Kernel(T.ceildiv(f, block_f), T.ceildiv(pixels, block_p), threads=2 * block_f) as (column, row):
            image = T.alloc_shared((block_p, CHANNELS), dtype)
            filters = T.alloc_shared((block_f, CHANNELS), dtype)
            result = T.alloc_shared((block_f, block_p), dtype)
            sums = T.alloc_fragment((block_f, block_p), "float32")
            T.clear(sums)
            for step in T.Pipelined(depth // CHANNELS, num_stages=STAGES):
                T.c2d_im2col(X, image, row, step, size, stride, 1, size // 2)
                T.copy(W[column * block_f, step * CHANNELS], filters)
                T.gemm(filters, image, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(sums, result)
            for i, j in T.Parallel(block_f, block_p):
                at = row * block_p + j
                if at < pixels and column * block_f + i < f:
                    Y[at // plane, column * block_f + i, at % plane] = result[i, j]

    images, filters, result = (n, h, w, c), (f, depth), (n, f, plane)
    return program(convolve, X=T.Tensor(images, dtype), W=T.Tensor(filters, dtype), Y=T.Tensor(result, dtype))


def reorder(n, plane, c, f, taps, dtype="float16"):
    """x[N,C,H W] to [N,H W,C] and w[F,C,K K] to [F,K K,C]: blocks of 64 pixels and channels, one for each filter."""
    across, deep, threads = -(-plane // 64), c // CHANNELS, 256
    vector = 8 if plane % 8 == 0 else 1
    blocks = n * across * deep

    def move(X, W, images, filters):
        with T.Kernel(blocks + f, threads=threads) as block:
            # 33 words a row: a warp writes to different banks, and reads with two lanes a bank.
            tile = T.alloc_shared((CHANNELS, 66), dtype)
            tx = T.get_thread_binding()
            some = T.alloc_local((8,), dtype)
            if block < blocks:
                first, level, image = block % across * 64, block // across % deep * CHANNELS, block // (across * deep)
                for i in T.unroll(4096 // (threads * vector)):
                    channel, pixel = (i * threads + tx) * vector // 64, (i * threads + tx) * vector % 64
                    if first + pixel < plane:
                        for e in T.vectorized(vector):
                            some[e] = X[image, level + channel, first + pixel + e]
                        for e in T.unroll(vector):
                            tile[channel, pixel + e] = some[e]
                T.sync_threads()
                for i in T.unroll(2):
                    pixel, channel = (i * threads + tx) // 8, tx % 8 * 8
                    for e in T.unroll(8):
                        some[e] = tile[channel + e, pixel]
                    if first + pixel < plane:
                        for e in T.vectorized(8):
                            images[image, first + pixel, level + channel + e] = some[e]
            else:
                for i in T.serial(T.ceildiv(taps * c, threads)):
                    if i * threads + tx < taps * c:
                        filters[block - blocks, i * threads + tx] = W[
                            block - blocks, (i * threads + tx) % c * taps + (i * threads + tx) // c
                        ]

    return program(
        move, X=T.Tensor((n, c, plane), dtype), W=T.Tensor((f, c * taps), dtype),
        images=T.Tensor((n, plane, c), dtype), filters=T.Tensor((f, taps * c), dtype),
    )  # fmt: skip


@functools.cache
def compiled(make, *arguments):
    """The kernel of one shape and type, built when it is first asked for."""
    return tilelang.compile(make(*arguments), pass_configs=PASSES if make is reorder else None)


def check(x, w, y, stride, pad):
    """Raise ValueError outside of the domain."""
    if x.dtype not in NAMES or not x.dtype == w.dtype == y.dtype:
        raise ValueError(f"fp16 or bf16 only, all three the same; got {x.dtype}, {w.dtype}, {y.dtype}")
    size = w.shape[2]
    if size % 2 == 0 or pad != size // 2 or stride not in (1, 2) or size > 7:
        raise ValueError(f"odd filters up to 7 padded by half of them, stride 1 or 2; got {size}, {pad}, {stride}")
    if max(x.numel(), y.numel()) >= MAX_ELEMENTS:
        raise ValueError(
            f"fewer than 2^31 elements: TileLang counts in 32 bits; got {tuple(x.shape)}, {tuple(y.shape)}"
        )
    if y.numel() // y.shape[1] > MAX_PIXELS:
        raise ValueError(f"up to {MAX_PIXELS} pixels of the result; got {tuple(y.shape)}")
    if x.shape[1] % CHANNELS or w.shape[0] % 8:
        raise ValueError(f"C a multiple of {CHANNELS}, F of 8; got {x.shape[1]} and {w.shape[0]}")


def run(x, w, stride, pad, out):
    """Fill out with the convolution, all three contiguous or all channels_last. Raises ValueError for anything else."""
    check(x, w, out, stride, pad)
    (n, c, height, width), (f, _c, size, _size) = x.shape, w.shape
    shape = (n, height, width, c, f, size, stride, NAMES[x.dtype])
    if all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (x, w, out)):
        rows = out.permute(0, 2, 3, 1).view(-1, f)
        # A view: TileLang compares all strides, also those of one element.
        images, filters = x.permute(0, 2, 3, 1).view(n, height, width, c), w.permute(0, 2, 3, 1).view(f, -1)
        compiled(by_pixels, *shape)(images, filters, rows)
        return
    if not all(tensor.is_contiguous() for tensor in (x, w, out)):
        raise ValueError("x, w and y all contiguous, or all channels_last")
    images = torch.empty((n, height * width, c), dtype=x.dtype, device=x.device)
    filters = torch.empty((f, size * size * c), dtype=x.dtype, device=x.device)
    move = compiled(reorder, n, height * width, c, f, size * size, NAMES[x.dtype])
    move(x.view(n, c, -1), w.view(f, -1), images, filters)
    compiled(by_filters, *shape)(images.view(n, height, width, c), filters, out.view(n, f, -1))


SHAPE = {"n": 8, "h": 56, "w": 56, "c": 64, "f": 128, "size": 3, "stride": 1}
COMPILE = {
    "sm90": [
        {"kernel": by_pixels, "arguments": SHAPE},
        {"kernel": by_filters, "arguments": SHAPE},
        {
            "kernel": reorder,
            "arguments": {"n": 8, "plane": 56 * 56, "c": 64, "f": 128, "taps": 9},
            "options": {"pass_configs": PASSES},
        },
    ]
}
