"""The cublas reference: gemm by cuBLAS and by cuBLASLt as torch calls them, whichever is faster."""

from __future__ import annotations

import ctypes
import os
from typing import ClassVar

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.device import DeviceReference, torch_versions
from pytest_klineage.references.torch import prepare_gemm

LIBRARIES = ("cublas", "cublaslt")
"""Names of torch's switch. Its own default picks one of them by shape; pinned, the record says which."""


FILES = {"cublas": "cublas", "cublaslt": "cublasLt"}
"""By such a name, how the library's file and its functions are called."""
VERSION_PARTS = (0, 1, 2)
"""The libraries' numbers for the major and minor version and the patch level."""


def loaded_version(file: str, function: str) -> str:
    """Version of a library that this process has loaded, as it says itself; empty when it is not loaded or mute."""
    try:
        get_property = getattr(ctypes.CDLL(file, mode=os.RTLD_NOLOAD), function)
    except (OSError, AttributeError):
        return ""
    value, parts = ctypes.c_int(), []
    for part in VERSION_PARTS:
        if get_property(part, ctypes.byref(value)) != 0:
            return ""
        parts.append(str(value.value))
    return ".".join(parts)


def loaded_versions(cuda: str | None) -> dict[str, str]:
    """Versions of cuBLAS and cuBLASLt, as loaded by a torch for this version of CUDA; without those that are not."""
    major = str(cuda).partition(".")[0]
    found = {name: loaded_version(f"lib{file}.so.{major}", f"{file}GetProperty") for name, file in FILES.items()}
    return {name: version for name, version in found.items() if version}


class CublasReference(DeviceReference):
    """a, b and c with the strides that the case gives them: no copy, no allocation, an output that is there already."""

    name: ClassVar[str] = "cublas"
    remedy: ClassVar[str] = "pip install torch"

    def operators(self) -> tuple[str, ...]:
        return ("gemm",)

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        call = prepare_gemm(case)
        return {library: Variant(call, flags={"blas_library": library}) for library in LIBRARIES}

    def versions(self) -> dict[str, str]:
        import torch

        matmul = torch.backends.cuda.matmul
        split = ("allow_bf16_reduced_precision_reduction_split_k", "allow_fp16_reduced_precision_reduction_split_k")
        # Switches of newer torch; an older one splits K as cuBLAS likes.
        switches = {name: str(getattr(matmul, name, "not a switch of this torch")) for name in split}
        return torch_versions() | loaded_versions(torch.version.cuda) | switches
