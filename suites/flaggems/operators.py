"""The operators of the suite, as definitions in PyTorch with their input distributions. No shape stands here.

Names, argument order and semantics are those of FlagGems' own functions, so that the reference `flaggems` takes them.
The unusual distributions are those that a shortcut breaks on: large offsets, rows of zeros, one-hot and -inf rows.
"""

from __future__ import annotations

import itertools

import torch

from pytest_klineage import operator

HALVES = ("bf16", "fp16", "fp32")
ALIGNED = 128
"""Rows by which boundaries of groups move at full size; the tiles of every kernel here divide it."""


def product_inputs(define):
    """Give a product of a and b the distributions that break wrong rounding and wrong masks."""

    @define.inputs("spikes")
    def spikes(a, b):
        return a.flatten().index_fill(0, torch.arange(0, a.numel(), 97, device=a.device), 64.0).view_as(a), b

    @define.inputs("shifted")
    def shifted(a, b):
        return a + 2, b + 2

    @define.inputs("zero_rows")
    def zero_rows(a):
        return a * striped(a, 3)

    return define


def striped(x, every):
    """Zero for every such row of the last dimension but one, else 1; broadcasts with x."""
    rows = torch.arange(x.shape[-2], device=x.device)
    return (rows % every != 0).to(x.dtype)[:, None]


@product_inputs
@operator("a[M,K], b[K,N] -> c[M,N]", dtypes=HALVES, flops="2*M*N*K")
def mm(a, b):
    return a @ b


@product_inputs
@operator("bias[M,N], a[M,K], b[K,N] -> c[M,N]", dtypes=HALVES, flops="2*M*N*K")
def addmm(bias, a, b):
    return bias + a @ b


@product_inputs
@operator("a[B,M,K], b[B,K,N] -> c[B,M,N]", dtypes=HALVES, flops="2*B*M*N*K")
def bmm(a, b):
    return torch.bmm(a, b)


@product_inputs
@operator("a[M,K], b[G,K,N], ends[G]: int32 -> c[M,N]", dtypes=HALVES, flops="2*M*N*K")
def grouped_mm(a, b, ends):
    """Rows up to ends[0] times b[0], from there to ends[1] times b[1], and so on; the last end is M."""
    starts = [0, *ends.tolist()]
    return torch.cat([a[start:end] @ b[group] for group, (start, end) in enumerate(itertools.pairwise(starts))])


@grouped_mm.inputs("default")
def balanced(ends, generator, M, G):
    """Groups of about equal size: every boundary moves by whole tiles, half a group at most."""
    step = ALIGNED if M >= 4 * ALIGNED * G else 1
    most = max(M // G // 2 // step, 1)
    moved = torch.randint(-most, most + 1, (G,), generator=generator, device=ends.device) * step
    equal = torch.arange(1, G + 1, device=ends.device) * M // G
    return torch.cat([(equal + moved)[:-1].clamp(0, M).cummax(0).values, equal[-1:]])


@grouped_mm.inputs("ragged")
def ragged(ends, generator, M, G):
    """Boundaries anywhere, with an empty first group."""
    inner = torch.randint(0, M + 1, (G - 1,), generator=generator, device=ends.device).sort().values
    return torch.cat([inner[:1] * 0, inner[1:], inner.new_full((1,), M)]) if G > 1 else ends * 0 + M


@grouped_mm.symmetry
def reordered(a, b, ends, generator):
    """Rows change places within their groups; K and N are permuted."""
    draw = {"generator": generator, "device": a.device}
    group = torch.searchsorted(ends, torch.arange(len(a), device=a.device, dtype=ends.dtype), right=True)
    rows = (group + torch.rand(len(a), dtype=torch.float64, **draw)).argsort()
    depth, columns = torch.randperm(a.shape[1], **draw), torch.randperm(b.shape[2], **draw)
    moved = a[rows][:, depth], b[:, depth][:, :, columns], ends
    return moved, lambda c: c[rows.argsort()][:, columns.argsort()]


def attend(q, k, v, masked):
    """softmax(q k^T / sqrt(D)) v, head by head, with scores in float32 and probabilities in the type of v."""
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1) if masked else None
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head].float() @ k[:, head // group].float().transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if later is None else scores.masked_fill_(later, float("-inf"))
        heads.append(scores.softmax(-1).to(v.dtype) @ v[:, head // group])
    return torch.stack(heads, 1)


def attention_inputs(define):
    """Give an attention the distributions that break a wrong softmax."""

    @define.inputs("peaky")
    def peaky(q):
        return q * 12

    @define.inputs("shifted_keys")
    def shifted_keys(k):
        return k + 8

    @define.inputs("large_values")
    def large_values(v):
        return v * 64 + 16

    return define


@attention_inputs
@operator("q[B,H,S,D], k[B,G,S,D], v[B,G,S,D] -> o[B,H,S,D]", dtypes=("fp16", "bf16", "fp32"), flops="4*B*H*S*S*D")
def attention(q, k, v):
    """Every query sees every key. Query head h reads key head h // (H / G)."""
    return attend(q, k, v, masked=False)


@attention_inputs
@operator(
    "q[B,H,S,D], k[B,G,S,D], v[B,G,S,D] -> o[B,H,S,D]",
    dtypes=("fp16", "bf16", "fp32"), flops="2*B*H*S*(S+1)*D", options={"causal": (True,)},
)  # fmt: skip
def causal_attention(q, k, v, *, causal: bool = True):
    """A query sees the keys up to its own position."""
    return attend(q, k, v, masked=causal)


def root_mean_square(x, w, eps):
    """x divided by the root of its row's mean square, times w."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


@operator("x[M,N], w[N] -> y[M,N]", dtypes=HALVES)
def rms_norm(x, w, *, eps: float = 1e-5):
    return root_mean_square(x, w, eps)


@operator("x[M,N], w[N], b[N] -> y[M,N]", dtypes=HALVES)
def layer_norm(x, w, b, *, eps: float = 1e-5):
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    return (away * torch.rsqrt(away.square().mean(-1, keepdim=True) + eps) * w.float() + b.float()).to(x.dtype)


@operator("inout x[M,N], inout residual[M,N], w[N]", dtypes=HALVES)
def fused_add_rms_norm(x, residual, w, *, eps: float = 1e-5):
    """The sum becomes the residual, its norm becomes x."""
    added = x.float() + residual.float()
    return root_mean_square(added, w, eps).to(x.dtype), added.to(x.dtype)


for norm in (rms_norm, layer_norm, fused_add_rms_norm):

    @norm.inputs("zero_rows")
    def zero_rows(x):
        return x * striped(x, 3)

    @norm.inputs("tiny")
    def tiny(x):
        return x * 1e-3

    @norm.inputs("large_offset")
    def large_offset(x):
        return x + 1000


@fused_add_rms_norm.inputs("cancelling")
def cancelling(x):
    """The residual takes x away in every third row."""
    kept = striped(x, 3)
    return {"residual": -x * (1 - kept) + x.roll(1, 0) * kept}


@operator("x[M,N] -> y[M,N]", dtypes=HALVES)
def softmax(x):
    return x.float().softmax(-1).to(x.dtype)


@softmax.inputs("one_hot")
def one_hot(x):
    """One element of a row takes all."""
    return x + 60 * torch.nn.functional.one_hot(torch.arange(len(x), device=x.device) % x.shape[1], x.shape[1])


@softmax.inputs("minus_infinity")
def minus_infinity(x):
    """Two thirds of every row are -inf, and every fifth row is all -inf, whose softmax is NaN."""
    columns = torch.arange(x.shape[1], device=x.device)
    x = x.masked_fill(columns % 3 != 0, float("-inf"))
    return x.masked_fill(striped(x, 5) == 0, float("-inf"))


@softmax.inputs("large_offset")
def offset(x):
    return x + 1000


@softmax.inputs("all_equal")
def all_equal(x):
    return x[:, :1].expand_as(x)
