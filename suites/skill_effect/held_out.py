"""Operators of targets that are nowhere else: products whose kin is gemm. The grouped product is that of flaggems."""

from __future__ import annotations

import torch

from pytest_klineage import operator


@operator("x[M,K], w[2*N,K], bias[2*N] -> y[M,N]", dtypes=("bf16",), flops="4*M*N*K")
def gated_linear(x, w, bias):
    """With h = x w^T + bias: silu(h[:, :N]) * h[:, N:]."""
    gate, value = (x @ w.T + bias).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * value


@operator("a[M,K]: fp8_e4m3, b[N,K]: fp8_e4m3 -> c[M,N]", dtypes=("bf16",), flops="2*M*N*K")
def fp8_gemm(a, b):
    """a b^T of 8-bit matrices, summed in float32."""
    return (a.float() @ b.float().T).to(torch.bfloat16)
