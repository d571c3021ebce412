"""What the GEMM's entries are timed against, where it is no function of PyTorch's with the operator's own arguments."""

from __future__ import annotations

import torch


def scaled(a, b, scale_a, scale_b):
    """cuBLAS's 8-bit product."""
    # The definition sums in float32; the fast sums of cuBLAS are those of the instruction, about 14 bits.
    return torch._scaled_mm(a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=False)
