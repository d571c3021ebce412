"""Operators of targets that the package lacks: products whose lineages are those of gemm, but which are no gemm."""

from __future__ import annotations

import itertools

import torch

from pytest_klineage import operator

STEP = 16
"""Rows by which boundaries of groups move where there are many."""


@operator("a[M,K], b[G,K,N], ends[G]: int32 -> c[M,N]", dtypes=("bf16",), flops="2*M*N*K")
def grouped_gemm(a, b, ends):
    """Rows up to ends[0] times b[0], from there to ends[1] times b[1], and so on; the last end is M."""
    starts = [0, *ends.tolist()]
    return torch.cat([a[start:end] @ b[group] for group, (start, end) in enumerate(itertools.pairwise(starts))])


@grouped_gemm.inputs("default")
def uneven(ends, generator, M, G):
    """Groups of unequal size: every boundary moves by up to half a group."""
    step = STEP if 4 * STEP * G <= M else 1
    most = max(M // G // 2 // step, 1)
    moved = torch.randint(-most, most + 1, (G,), generator=generator, device=ends.device) * step
    equal = torch.arange(1, G + 1, device=ends.device) * M // G
    return torch.cat([(equal + moved)[:-1].clamp(0, M).cummax(0).values, equal[-1:]])


@grouped_gemm.inputs("ragged")
def ragged(ends, generator, M, G):
    """Boundaries anywhere, with an empty first group."""
    inner = torch.randint(0, M + 1, (G - 1,), generator=generator, device=ends.device).sort().values
    return torch.cat([inner[:1] * 0, inner[1:], inner.new_full((1,), M)]) if G > 1 else ends * 0 + M


@grouped_gemm.symmetry
def reordered(a, b, ends, generator):
    """Rows change places within their groups; K and N are permuted."""
    draw = {"generator": generator, "device": a.device}
    group = torch.searchsorted(ends, torch.arange(len(a), device=a.device, dtype=ends.dtype), right=True)
    rows = (group + torch.rand(len(a), dtype=torch.float64, **draw)).argsort()
    depth, columns = torch.randperm(a.shape[1], **draw), torch.randperm(b.shape[2], **draw)
    moved = a[rows][:, depth], b[:, depth][:, :, columns], ends
    return moved, lambda c: c[rows.argsort()][:, columns.argsort()]


@operator("x[M,K], w[2*N,K], bias[2*N] -> y[M,N]", dtypes=("bf16",), flops="4*M*N*K")
def gated_linear(x, w, bias):
    """With h = x w^T + bias: silu(h[:, :N]) * h[:, N:]."""
    gate, value = (x @ w.T + bias).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * value


@operator("a[M,K]: fp8_e4m3, b[N,K]: fp8_e4m3 -> c[M,N]", dtypes=("bf16",), flops="2*M*N*K")
def fp8_gemm(a, b):
    """a b^T of 8-bit matrices, summed in float32."""
    return (a.float() @ b.float().T).to(torch.bfloat16)
