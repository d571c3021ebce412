"""RMSNorm, LayerNorm, softmax and the fused residual norm in Triton: whole rows in registers, one read, one write.

A program takes ROWS rows; config.py beside this file says how many, with how many warps. Sums are in fp32. A column
count that is no power of two leaves the rest of a program's lanes masked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from config import CONFIG, SHAPES

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_of(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a program's rows and columns, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    return row[:, None] * N + column[None, :], (row < M)[:, None] & (column < N)[None, :], column


@triton.jit
def rms_rows(x, w, y, M, N, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, here, column = tile_of(M, N, ROWS, COLUMNS)
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(w + column, mask=column < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / N + eps)
    tl.store(y + at, (values * scale[:, None] * weight[None, :]).to(y.dtype.element_ty), mask=here)


@triton.jit
def layer_rows(x, w, b, y, M, N, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, here, column = tile_of(M, N, ROWS, COLUMNS)
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(w + column, mask=column < N, other=0.0).to(tl.float32)
    bias = tl.load(b + column, mask=column < N, other=0.0).to(tl.float32)
    away = tl.where(here, values - (tl.sum(values, axis=1) / N)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(away * away, axis=1) / N + eps)
    result = away * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=here)


@triton.jit
def add_rms_rows(x, residual, w, M, N, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, here, column = tile_of(M, N, ROWS, COLUMNS)
    added = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    tl.store(residual + at, added.to(x.dtype.element_ty), mask=here)
    weight = tl.load(w + column, mask=column < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(added * added, axis=1) / N + eps)
    tl.store(x + at, (added * scale[:, None] * weight[None, :]).to(x.dtype.element_ty), mask=here)


@triton.jit
def softmax_rows(x, y, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, here, _column = tile_of(M, N, ROWS, COLUMNS)
    values = tl.load(x + at, mask=here, other=float("-inf")).to(tl.float32)
    # A row that is all -inf is NaN by the difference, as it must be; a row that does not exist is not stored.
    powers = tl.exp2((values - tl.max(values, axis=1)[:, None]) * LOG2_E)
    tl.store(y + at, (powers / tl.sum(powers, axis=1)[:, None]).to(y.dtype.element_ty), mask=here)


KERNELS = {"rms_norm": rms_rows, "layer_norm": layer_rows, "fused_add_rms_norm": add_rms_rows, "softmax": softmax_rows}
POINTERS = {"rms_norm": "xwy", "layer_norm": "xwby", "fused_add_rms_norm": ("x", "residual", "w"), "softmax": "xy"}
OPTIONS = {"num_warps": CONFIG["warps"]}


def launch(name, tensors, x, *eps):
    (M, N), rows = x.shape, CONFIG["rows"]
    KERNELS[name][(triton.cdiv(M, rows),)](*tensors, M, N, *eps, rows, triton.next_power_of_2(N), **OPTIONS)


def rms_norm(x, w, out, eps):
    """out = x / sqrt(mean(x^2) + eps) * w by row."""
    launch("rms_norm", (x, w, out), x, eps)


def layer_norm(x, w, b, out, eps):
    """out = (x - mean) / sqrt(variance + eps) * w + b by row."""
    launch("layer_norm", (x, w, b, out), x, eps)


def fused_add_rms_norm(x, residual, w, eps):
    """residual += x, then x = its norm times w."""
    launch("fused_add_rms_norm", (x, residual, w), x, eps)


def softmax(x, out):
    """out = softmax of every row."""
    launch("softmax", (x, out), x)


def built(name, M, N, element):
    """What a launch at a shape is specialised on: sizes that 16 divides, and the constants."""
    sizes = {size: "i32:16" if value % 16 == 0 else "i32" for size, value in (("M", M), ("N", N))}
    eps = {} if name == "softmax" else {"eps": "fp32"}
    return {
        "kernel": KERNELS[name], "signature": dict.fromkeys(POINTERS[name], f"*{element}:16") | sizes | eps,
        "constexprs": {"ROWS": CONFIG["rows"], "COLUMNS": triton.next_power_of_2(N)}, "options": OPTIONS,
    }  # fmt: skip


COMPILE = {key: [built(*shape) for shape in SHAPES] for key in ("sm90", "sm120")}
