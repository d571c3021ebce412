"""The paper's five operators at the sizes of its GPU tier, and of the CPU tier that runs anywhere."""

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
}
"""By operator and tier."""
