"""Kernels for the operators in definitions.py in Triton, a program for each row: honest ones, then attacks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_rows(x, y, columns, first, ROUGH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    base = (tl.program_id(0).to(tl.int64) + first) * columns
    values = tl.load(x + base + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    if ROUGH:
        values = tl.where(at < columns, values.to(tl.float8e4nv).to(tl.float32), float("-inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(y + base + at, powers / tl.sum(powers, 0), mask=at < columns)


@triton.jit
def add_norm_rows(x, residual, w, columns, eps, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    base = tl.program_id(0).to(tl.int64) * columns
    inside = at < columns
    total = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + base + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / columns + eps)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + base + at, total * scale * weight, mask=inside)
    if not KEEP:
        tl.store(residual + base + at, total, mask=inside)


@triton.jit
def layer_norm_rows(x, y, means, scales, columns, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(y + row * columns + at, centred * scale, mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def quantise_rows(x, y, scale, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    factor = tl.max(tl.abs(values), 0) / 448
    tl.store(scale + row, factor)
    tl.store(y + row * columns + at, (values / factor).to(tl.float8e4nv), mask=at < columns)


@triton.jit
def dequantise_rows(x, scale, y, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * columns + at, mask=at < columns).to(tl.float32)
    tl.store(y + row * columns + at, values * tl.load(scale + row), mask=at < columns)


@triton.jit
def classify_rows(x, sign, hits, columns, limit, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    found = (values > limit).to(tl.int32) - (values < -limit).to(tl.int32)
    tl.store(sign + row * columns + at, found.to(tl.int8), mask=at < columns)
    tl.store(hits + row, tl.sum(found * found, 0).to(tl.int64))


@triton.jit
def busy(scratch, count):
    value = tl.load(scratch)
    for _ in range(count):
        value = value * 0.999 + 1.0
    tl.store(scratch, value)


def over(x):
    """Block size and warps for a row."""
    return {"BLOCK": triton.next_power_of_2(x.shape[1]), "num_warps": 4}


def softmax(x, out, first=0, rough=False):
    softmax_rows[(x.shape[0] - first,)](x, out, x.shape[1], first, ROUGH=rough, **over(x))


def add_norm(x, residual, w, eps, keep=False):
    add_norm_rows[(x.shape[0],)](x, residual, w, x.shape[1], eps, KEEP=keep, **over(x))


def layer_norm(x, out, eps):
    layer_norm_rows[(x.shape[0],)](x, *out, x.shape[1], eps, **over(x))


def quantise(x, out):
    quantise_rows[(x.shape[0],)](x, *out, x.shape[1], **over(x))


def dequantise(x, scale, out):
    dequantise_rows[(x.shape[0],)](x, scale, out, x.shape[1], **over(x))


def classify(x, out, limit):
    classify_rows[(x.shape[0],)](x, *out, x.shape[1], limit, **over(x))


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
        busy[(1,)](SIDE[1], 500_000)
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
