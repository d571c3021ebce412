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
