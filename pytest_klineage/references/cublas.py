"""The cublas reference: gemm by cuBLAS and by cuBLASLt as torch calls them, whichever is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import Trial, Variant
from pytest_klineage.references.device import DeviceReference, torch_versions

if TYPE_CHECKING:
    from pytest_klineage.references.base import Tensors

LIBRARIES = ("cublas", "cublaslt")
"""Names of torch's switch. Its own default picks one of them by shape; pinned, the record says which."""


class CublasReference(DeviceReference):
    """Row-major a, b and c as the case has them: no copy, no allocation, an output that is there already."""

    name: ClassVar[str] = "cublas"
    remedy: ClassVar[str] = "pip install torch"

    def operators(self) -> tuple[str, ...]:
        return ("gemm",)

    def variants(self, case: KernelCase, trial: Trial) -> dict[str, Variant]:
        import torch

        def call(inputs: Tensors, outputs: Tensors) -> None:
            torch.mm(inputs["a"], inputs["b"], out=outputs["c"])

        return {library: Variant(call, flags={"blas_library": library}) for library in LIBRARIES}

    def versions(self) -> dict[str, str]:
        import torch

        matmul = torch.backends.cuda.matmul
        split = ("allow_bf16_reduced_precision_reduction_split_k", "allow_fp16_reduced_precision_reduction_split_k")
        # Switches of newer torch; an older one splits K as cuBLAS likes.
        return torch_versions() | {name: str(getattr(matmul, name, "not a switch of this torch")) for name in split}
