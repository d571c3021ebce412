"""A user's operators for the tests on a GPU: a plain one, in place, several outputs, 8-bit floats, indices."""

from __future__ import annotations

import torch

from pytest_klineage import operator


@operator("x[M,N] -> y[M,N]", dtypes=("bf16", "fp32"), flops="5*M*N", may_ignore=("log",))
def softmax(x: torch.Tensor, *, log: bool = False) -> torch.Tensor:
    """Softmax of every row, or its logarithm."""
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)


@softmax.inputs("shifted")
def shifted(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose exponentials overflow."""
    return x + 80


@operator("inout x[M,N], inout residual[M,N], w[N]", dtypes=("bf16", "fp32"))
def add_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both, normalised and scaled, in place of x, and the sum in place of the residual."""
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * w.float()).to(x.dtype), total.to(x.dtype)


@operator("x[M,N] -> y[M,N], mean[M]: fp32, rstd[M]: fp32", dtypes=("bf16", "fp32"))
def layer_norm(x: torch.Tensor, *, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every row with mean 0 and variance 1, and what it took."""
    wide = x.float()
    mean = wide.mean(-1)
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    return ((wide - mean[:, None]) * rstd[:, None]).to(x.dtype), mean, rstd


@operator("x[M,N] -> y[M,N]: fp8_e4m3, scale[M]: fp32", dtypes=("bf16", "fp32"))
def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row in 8-bit floats, scaled to their range."""
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


@operator("x[M,N]: fp8_e4m3, scale[M]: fp32 -> y[M,N]", dtypes=("bf16", "fp32"))
def dequantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of 8-bit floats times the scale of each."""
    return x.float() * scale[:, None]


@operator("x[M,N] -> sign[M,N]: int8, hits[M]: int64", dtypes=("bf16", "fp32"))
def classify(x: torch.Tensor, *, limit: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """1 above the limit, -1 below its negative, 0 between; and how many of a row are not 0."""
    sign = (x > limit).to(torch.int8) - (x < -limit).to(torch.int8)
    return sign, (sign != 0).sum(-1)


@operator("x[M,N] -> y[M,N]", dtypes=("bf16", "fp32"))
def iterated(x: torch.Tensor) -> torch.Tensor:
    """Many small steps, each a launch of its own: what an answer from memory would save."""
    y = x.float()
    for _ in range(STEPS):
        y = y + 0.01 * y.sin()
    return y.to(x.dtype)


STEPS = 64
