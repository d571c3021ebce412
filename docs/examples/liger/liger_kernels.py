"""Three Triton kernels of Liger-Kernel 0.8.5, as its own wrappers launch them, but into tensors that are handed in."""

from __future__ import annotations

import torch
from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel
from liger_kernel.ops.softmax import _softmax_single_block_forward_kernel
from liger_kernel.ops.swiglu import _swiglu_forward_kernel
from liger_kernel.ops.utils import calculate_settings

LLAMA = 0
"""Liger's name for: only the scale of a row is computed in fp32."""


def rms_norm(x, w, eps, out):
    block, warps = calculate_settings(x.shape[1])
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _rms_norm_forward_kernel[(x.shape[0],)](
        out, out.stride(0), x, x.stride(0), w, w.stride(0), scales, scales.stride(0), x.shape[1], eps, 0.0, LLAMA,
        elementwise_affine=True, BLOCK_SIZE=block, num_warps=warps,
    )  # fmt: skip


def swiglu(gate, up, out):
    block, warps = calculate_settings(gate.shape[1])
    _swiglu_forward_kernel[(gate.shape[0],)](
        gate, up, out, out.stride(0), 1.0, n_cols=gate.shape[1], BLOCK_SIZE=block, num_warps=warps
    )


def softmax(x, out):
    block, warps = calculate_settings(x.shape[1])
    _softmax_single_block_forward_kernel[(x.shape[0],)](
        out, out.stride(0), x, x.stride(0), x.shape[1], BLOCK_SIZE=block, num_warps=warps
    )


# What is built without a GPU: rows of 4096 numbers in bf16.
HALF, COUNT, WIDE = "*bf16:16", "i32:16", {"num_warps": 8}
NORM = {
    "kernel": _rms_norm_forward_kernel,
    "signature": {
        "Y_ptr": HALF, "Y_row_stride": COUNT, "X_ptr": HALF, "X_row_stride": COUNT, "W_ptr": HALF,
        "W_row_stride": "i32:1", "RSTD_ptr": "*fp32:16", "RSTD_row_stride": "i32:1", "n_cols": COUNT, "eps": "fp32",
        "offset": "fp32",
    },
    "constexprs": {"casting_mode": LLAMA, "elementwise_affine": True, "BLOCK_SIZE": 4096}, "options": WIDE,
}  # fmt: skip
GLU = {
    "kernel": _swiglu_forward_kernel,
    "signature": {"a_ptr": HALF, "b_ptr": HALF, "c_ptr": HALF, "stride": COUNT, "gate_multiplier": "fp32"},
    "constexprs": {"n_cols": 4096, "BLOCK_SIZE": 4096}, "options": WIDE,
}  # fmt: skip
SOFTMAX = {
    "kernel": _softmax_single_block_forward_kernel,
    "signature": {
        "Y_ptr": HALF, "Y_row_stride": COUNT, "X_ptr": HALF, "X_row_stride": COUNT, "n_cols": COUNT,
    },
    "constexprs": {"BLOCK_SIZE": 4096}, "options": WIDE,
}  # fmt: skip
COMPILE = {"*": [NORM, GLU, SOFTMAX]}
