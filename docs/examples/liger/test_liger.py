"""Three kernels of Liger-Kernel against PyTorch, eager and compiled."""

from __future__ import annotations

import torch

from pytest_klineage import kernel_case, operator

SHAPES = [(4096, 4096), (8192, 8192), (2048, 16384)]


@operator("x[M,N], w[N] -> y[M,N]", dtypes=("bf16", "fp32"))
def rms_norm(x, w, *, eps: float = 1e-6):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) * w


@operator("gate[M,N], up[M,N] -> y[M,N]", dtypes=("bf16", "fp32"))
def swiglu(gate, up):
    return torch.nn.functional.silu(gate.float()).to(up.dtype) * up


@operator("x[M,N] -> y[M,N]", dtypes=("bf16", "fp32"))
def softmax(x):
    return torch.softmax(x, -1)


def against(reference, op):
    @kernel_case(shapes=SHAPES, dtype="bf16", op=op, ref=reference, at_least=0.5)
    def test(kernel_gate):
        kernel_gate("liger_kernels.py", surface="triton", entry=op.name, label="Liger")

    return test


test_rms_norm, test_rms_norm_compiled = against("torch", rms_norm), against("torch.compile", rms_norm)
test_swiglu, test_swiglu_compiled = against("torch", swiglu), against("torch.compile", swiglu)
test_softmax, test_softmax_compiled = against("torch", softmax), against("torch.compile", softmax)
