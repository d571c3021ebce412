"""Switches of a whole process that decide how torch calls its libraries: read, set, and what precision demands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

Switch: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]


def switches() -> dict[str, Switch]:
    """By name, how a switch is read and how it is set."""
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "blas_library": (cuda.preferred_blas_library, cuda.preferred_blas_library),
        "cudnn_benchmark": (lambda: cudnn.benchmark, partial(setattr, cudnn, "benchmark")),
        # How many engine configurations a search tries; 0 means all of them, and torch's default is 10.
        "cudnn_benchmark_limit": (lambda: cudnn.benchmark_limit, partial(setattr, cudnn, "benchmark_limit")),
        "cudnn_sdp": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "flash_sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math_sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }


def read_flags(names: Iterable[str]) -> dict[str, Any]:
    """The present values of these switches."""
    names = sorted(names)
    known = switches() if names else {}
    return {name: known[name][0]() for name in names}


def write_flags(values: Mapping[str, Any]) -> None:
    """Set these switches for the whole process."""
    known = switches() if values else {}
    for name, value in values.items():
        known[name][1](value)


def forbid_tf32() -> None:
    """Let fp32 be fp32: TF32 keeps ten bits of a number, and no fp32 case would accept its results."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
