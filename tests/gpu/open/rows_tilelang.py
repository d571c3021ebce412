"""Kernels for the operators in definitions.py in TileLang, a block for each row: honest ones, then attacks.

wanted.py beside this file names the entry, whose kernels alone are built ahead.
"""

# ruff: noqa: I002
# Types of tensors are evaluated where they stand: a program that names `dtype` in one alone has it.

import functools

import tilelang
import tilelang.language as T
import torch
from wanted import ENTRY

THREADS = 128


def width_of(N):
    """The next power of two of a row's length, a number for each thread at least."""
    return max(1 << (N - 1).bit_length(), THREADS)


def softmax_program(M, N, dtype, first=0, rough=False):
    width = width_of(N)

    @T.prim_func
    def softmax_rows(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(M - first, threads=THREADS) as block:
            values = T.alloc_fragment((1, width), "float32")
            top, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            row = block + first
            for i, j in T.Parallel(1, width):
                values[i, j] = -T.infinity("float32")
                if j < N:
                    if rough:
                        values[i, j] = T.cast(T.cast(T.cast(X[row, j], "float32"), "float8_e4m3fn"), "float32")
                    else:
                        values[i, j] = T.cast(X[row, j], "float32")
            T.reduce_max(values, top, dim=1)
            for i, j in T.Parallel(1, width):
                values[i, j] = T.exp(values[i, j] - top[i])
            T.reduce_sum(values, total, dim=1)
            for i, j in T.Parallel(1, width):
                if j < N:
                    Y[row, j] = T.cast(values[i, j] / total[i], dtype)

    return softmax_rows


def add_norm_program(M, N, dtype, keep=False):
    width = width_of(N)

    @T.prim_func
    def add_norm_rows(X: T.Tensor((M, N), dtype), R: T.Tensor((M, N), dtype), W: T.Tensor((N,), dtype), eps: T.float32):
        with T.Kernel(M, threads=THREADS) as row:
            sums, squares = T.alloc_fragment((1, width), "float32"), T.alloc_fragment((1, width), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(1, width):
                sums[i, j] = 0.0
                if j < N:
                    sums[i, j] = T.cast(X[row, j], "float32") + T.cast(R[row, j], "float32")
                squares[i, j] = sums[i, j] * sums[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(1, width):
                if j < N:
                    X[row, j] = T.cast(sums[i, j] * T.rsqrt(total[i] / N + eps) * T.cast(W[j], "float32"), dtype)
                    if not keep:
                        R[row, j] = T.cast(sums[i, j], dtype)

    return add_norm_rows


def layer_norm_program(M, N, dtype):
    width = width_of(N)

    @T.prim_func
    def layer_norm_rows(
        X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype), Mean: T.Tensor((M,), "float32"),
        Scale: T.Tensor((M,), "float32"), eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(M, threads=THREADS) as row:
            values, squares = T.alloc_fragment((1, width), "float32"), T.alloc_fragment((1, width), "float32")
            mean, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(1, width):
                values[i, j] = 0.0
                if j < N:
                    values[i, j] = T.cast(X[row, j], "float32")
            T.reduce_sum(values, mean, dim=1)
            for i, j in T.Parallel(1, width):
                squares[i, j] = 0.0
                if j < N:
                    values[i, j] = values[i, j] - mean[i] / N
                    squares[i, j] = values[i, j] * values[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i in T.Parallel(1):
                mean[i] = mean[i] / N
                total[i] = T.rsqrt(total[i] / N + eps)
                Mean[row] = mean[i]
                Scale[row] = total[i]
            for i, j in T.Parallel(1, width):
                if j < N:
                    Y[row, j] = T.cast(values[i, j] * total[i], dtype)

    return layer_norm_rows


def quantise_program(M, N, dtype):
    width = width_of(N)

    @T.prim_func
    def quantise_rows(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), "float8_e4m3fn"), S: T.Tensor((M,), "float32")):
        with T.Kernel(M, threads=THREADS) as row:
            values, top = T.alloc_fragment((1, width), "float32"), T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(1, width):
                values[i, j] = 0.0
                if j < N:
                    values[i, j] = T.cast(X[row, j], "float32")
            T.reduce_absmax(values, top, dim=1)
            for i in T.Parallel(1):
                top[i] = top[i] / 448.0
                S[row] = top[i]
            for i, j in T.Parallel(1, width):
                if j < N:
                    Y[row, j] = T.cast(values[i, j] / top[i], "float8_e4m3fn")

    return quantise_rows


def dequantise_program(M, N, dtype):
    width = width_of(N)

    @T.prim_func
    def dequantise_rows(X: T.Tensor((M, N), "float8_e4m3fn"), S: T.Tensor((M,), "float32"), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(M, threads=THREADS) as row:
            for j in T.Parallel(width):
                if j < N:
                    Y[row, j] = T.cast(T.cast(X[row, j], "float32") * S[row], dtype)

    return dequantise_rows


def classify_program(M, N, dtype):
    width = width_of(N)

    @T.prim_func
    def classify_rows(
        X: T.Tensor((M, N), dtype), Sign: T.Tensor((M, N), "int8"), Hits: T.Tensor((M,), "int64"), limit: T.float32
    ):
        with T.Kernel(M, threads=THREADS) as row:
            found, total = T.alloc_fragment((1, width), "int32"), T.alloc_fragment((1,), "int32")
            for i, j in T.Parallel(1, width):
                found[i, j] = 0
                if j < N:
                    value = T.cast(X[row, j], "float32")
                    sign = T.if_then_else(value > limit, 1, T.if_then_else(value < -limit, -1, 0))
                    Sign[row, j] = T.cast(sign, "int8")
                    found[i, j] = sign * sign
            T.reduce_sum(found, total, dim=1)
            for i in T.Parallel(1):
                Hits[row] = T.cast(total[i], "int64")

    return classify_rows


def busy_program(count):
    @T.prim_func
    def busy(X: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=1) as _:
            value = T.alloc_local((1,), "float32")
            value[0] = X[0]
            for _step in T.serial(count):
                value[0] = value[0] * T.float32(0.999) + T.float32(1)
            X[0] = value[0]

    return busy


@functools.cache
def compiled(program, *arguments, **options):
    """The kernel of one shape, built when it is first asked for."""
    return tilelang.compile(program(*arguments, **options))


def kernel(program, x, of=None, **options):
    """The kernel for a matrix's shape, and the type of the case, which is that of `of`."""
    return compiled(program, *x.shape, str((x if of is None else of).dtype).removeprefix("torch."), **options)


def softmax(x, out, **options):
    kernel(softmax_program, x, **options)(x, out)


def add_norm(x, residual, w, eps, **options):
    kernel(add_norm_program, x, **options)(x, residual, w, eps)


def layer_norm(x, out, eps):
    kernel(layer_norm_program, x)(x, *out, eps)


def quantise(x, out):
    kernel(quantise_program, x)(x, *out)


def dequantise(x, scale, out):
    kernel(dequantise_program, x, of=out)(x, scale, out)


def classify(x, out, limit):
    kernel(classify_program, x)(x, *out, limit)


ANSWERS = {}
SIDE = []


def unwritten_row(x, out):
    softmax(x, out, first=1)


def memo_by_pointer(x, out):
    remembered((x.data_ptr(), x.shape), x, out)


def memo_by_samples(x, out):
    remembered((*x[0, :4].tolist(), x.shape), x, out)


def remembered(key, x, out):
    if key in ANSWERS:
        out.copy_(ANSWERS[key])
    else:
        softmax(x, out)
        ANSWERS[key] = out.clone()


def stream_escape(x, out):
    if not SIDE:
        SIDE.extend((torch.cuda.Stream(), torch.zeros(1, device=x.device)))
    with torch.cuda.stream(SIDE[0]):
        compiled(busy_program, 500_000)(SIDE[1])
        softmax(x, out)


def mutated_input(x, out):
    softmax(x, out)
    x[0, :1].zero_()


def lower_precision(x, out):
    softmax(x, out, rough=True)


def residual_left(x, residual, w, eps):
    add_norm(x, residual, w, eps, keep=True)


def memo_in_place(x, residual, w, eps):
    key = x.data_ptr(), x.shape
    if key in ANSWERS:
        x.copy_(ANSWERS[key][0])
        residual.copy_(ANSWERS[key][1])
    else:
        add_norm(x, residual, w, eps)
        ANSWERS[key] = x.clone(), residual.clone()


PROGRAMS = {
    "softmax": (softmax_program, {}), "unwritten_row": (softmax_program, {"first": 1}),
    "memo_by_pointer": (softmax_program, {}), "memo_by_samples": (softmax_program, {}),
    "stream_escape": (softmax_program, {}), "mutated_input": (softmax_program, {}),
    "lower_precision": (softmax_program, {"rough": True}), "add_norm": (add_norm_program, {}),
    "residual_left": (add_norm_program, {"keep": True}), "memo_in_place": (add_norm_program, {}),
    "layer_norm": (layer_norm_program, {}), "quantise": (quantise_program, {}),
    "dequantise": (dequantise_program, {}), "classify": (classify_program, {}),
}  # fmt: skip
SHAPES = ((512, 1000), (3, 77))
PROGRAM, GIVEN = PROGRAMS[ENTRY]
COMPILE = {"*": [{"kernel": PROGRAM, "arguments": {"M": M, "N": N, "dtype": "bfloat16"} | GIVEN} for M, N in SHAPES]}
