"""Operators of the GEMM's entries that are defined nowhere else: with a bias, and of scaled fp8 matrices."""

from __future__ import annotations

import torch

from pytest_klineage import operator


@operator("x[M,K], w[N,K], bias[N] -> y[M,N]", dtypes=("bf16", "fp16"), flops="2*M*N*K")
def linear(x, w, bias):
    """x w^T + bias."""
    return x @ w.T + bias


@operator(
    "a[M,K]: fp8_e4m3, b[N,K]: fp8_e4m3, scale_a[1]: fp32, scale_b[1]: fp32 -> c[M,N]",
    dtypes=("bf16",), flops="2*M*N*K",
)  # fmt: skip
def scaled_mm(a, b, scale_a, scale_b):
    """a b^T of 8-bit matrices with a scale each, summed in float32."""
    return (a.float() @ b.float().T * (scale_a * scale_b)).to(torch.bfloat16)


@scaled_mm.inputs("default")
def scales(scale_a, scale_b):
    """Positive ones, as a quantizer makes them."""
    return scale_a.abs() / 16 + 1 / 64, scale_b.abs() / 16 + 1 / 64
