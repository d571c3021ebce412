"""The paper's five operators and the three phases of its gdn: sizes of its GPU tier, of the CPU tier, and small ones.

The CPU tier runs anywhere.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Sized: TypeAlias = tuple[tuple[int, ...], str, dict[str, Any]]
"""Shape in the operator's axis order, data type, options."""

PAPER_SHAPES: dict[str, dict[str, Sized]] = {
    "gemm": {
        "gpu": ((4096, 4096, 4096), "bf16", {}),
        "cpu": ((1024, 1024, 1024), "fp32", {}),
    },
    "conv2d": {
        "gpu": ((8, 64, 56, 56, 128, 3, 1, 1), "fp16", {}),
        "cpu": ((1, 64, 56, 56, 128, 3, 1, 1), "fp32", {}),
    },
    "fmha": {
        "gpu": ((8, 64, 2048, 128), "fp16", {}),
        "cpu": ((1, 8, 512, 64), "fp32", {}),
    },
    "topk": {
        "gpu": ((64, 4096, 512), "fp32", {}),
        "cpu": ((64, 4096, 512), "fp32", {}),
    },
    "gdn": {
        "gpu": ((16, 48, 128, 64, 4096), "bf16", {}),
        "cpu": ((4, 12, 64, 64, 512), "fp32", {}),
    },
    "gdn_cumsum": {
        "gpu": ((48, 64, 4096), "fp32", {}),
        "cpu": ((12, 64, 4096), "fp32", {}),
    },
    "gdn_kkt_solve": {
        "gpu": ((16, 48, 128, 64, 4096), "bf16", {}),
        "cpu": ((4, 12, 64, 64, 512), "fp32", {}),
    },
    "gdn_fused_fwd": {
        "gpu": ((16, 48, 128, 64, 4096), "bf16", {}),
        "cpu": ((4, 12, 64, 64, 512), "fp32", {}),
    },
}
"""By operator and tier."""

SMALL_SHAPES: dict[str, dict[str, Sized]] = {
    "gemm": {
        "gpu": ((512, 512, 512), "bf16", {}),
        "cpu": ((64, 64, 64), "fp32", {}),
    },
    "conv2d": {
        "gpu": ((1, 64, 16, 16, 128, 3, 1, 1), "fp16", {}),
        "cpu": ((1, 8, 12, 12, 16, 3, 1, 1), "fp32", {}),
    },
    "fmha": {
        "gpu": ((1, 2, 256, 128), "fp16", {}),
        "cpu": ((1, 2, 64, 32), "fp32", {}),
    },
    "topk": {
        "gpu": ((4, 4096, 512), "fp32", {}),
        "cpu": ((4, 256, 32), "fp32", {}),
    },
    "gdn": {
        "gpu": ((1, 3, 128, 64, 192), "bf16", {}),
        "cpu": ((1, 3, 32, 16, 96), "fp32", {}),
    },
    "gdn_cumsum": {
        "gpu": ((48, 64, 192), "fp32", {}),
        "cpu": ((3, 16, 96), "fp32", {}),
    },
    "gdn_kkt_solve": {
        "gpu": ((1, 3, 128, 64, 192), "bf16", {}),
        "cpu": ((1, 3, 32, 16, 96), "fp32", {}),
    },
    "gdn_fused_fwd": {
        "gpu": ((1, 3, 128, 64, 192), "bf16", {}),
        "cpu": ((1, 3, 32, 16, 96), "fp32", {}),
    },
}
"""By operator and tier: small enough for tools that make a kernel a hundred times slower. What is fixed in the paper's
case for all sizes (channels, filters, the head dimension, k) is the same here, and tiles of 128 and 256 fit."""
