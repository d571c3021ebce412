"""The torch reference: PyTorch's own operators, and our composition of them where it has none (gdn)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from pytest_klineage.errors import UnknownName
from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import Reference
from pytest_klineage.references.torch_gdn import prepare_gdn

if TYPE_CHECKING:
    from pytest_klineage.references.base import Call, Tensors

COMPOSED_LABEL = "torch-chunked (our composition of torch ops)"


class TorchReference(Reference):
    """PyTorch eager, on whatever device the tensors are. Destination arguments are used where an operator has one."""

    name: ClassVar[str] = "torch"
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "sm90", "sm120")

    def operators(self) -> tuple[str, ...]:
        return tuple(PREPARE)

    def prepare(self, case: KernelCase) -> Call:
        """The timed call. Raises UnknownName for an operator that torch has not."""
        if case.operator not in PREPARE:
            raise UnknownName("operator of reference torch", case.operator, PREPARE)
        return PREPARE[case.operator](case)

    def describe(self, case: KernelCase) -> dict[str, str]:
        import torch

        build = torch.__config__.show()
        description = {
            "label": COMPOSED_LABEL if case.operator == "gdn" else "torch",
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn_enabled": str(torch.backends.mkldnn.enabled),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        }
        for key, pattern in (("mkldnn", r"MKL-DNN (v\S+)"), ("mkl", r"Math Kernel Library Version (\S+)")):
            found = re.search(pattern, build)
            description[key] = found.group(1) if found else "not built in"
        if torch.cuda.is_available():
            description |= {
                "cuda": str(torch.version.cuda),
                "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call] # torch has no types here
                "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
                "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
                "cudnn_allow_tf32": str(torch.backends.cudnn.allow_tf32),
            }
        return description


def prepare_gemm(case: KernelCase) -> Call:
    """The timed call of a gemm case: torch.mm into the output."""
    import torch

    def call(inputs: Tensors, outputs: Tensors) -> None:
        torch.mm(inputs["a"], inputs["b"], out=outputs["c"])

    return call


def prepare_conv2d(case: KernelCase) -> Call:
    """The timed call of a conv2d case; torch has no destination argument there, so the output is a new tensor."""
    from torch.nn.functional import conv2d

    stride, pad = case.shape["stride"], case.shape["pad"]

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        return {"y": conv2d(inputs["x"], inputs["w"], stride=stride, padding=pad)}

    return call


def prepare_fmha(case: KernelCase) -> Call:
    """The timed call of an fmha case: scaled_dot_product_attention, which picks its own algorithm; a new tensor."""
    from torch.nn.functional import scaled_dot_product_attention

    causal = bool(case.options.get("causal", False))

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        return {"o": scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=causal)}

    return call


def prepare_topk(case: KernelCase) -> Call:
    """The timed call of a topk case: torch.topk into both outputs, unsorted."""
    import torch

    count = case.shape["K"]

    def call(inputs: Tensors, outputs: Tensors) -> None:
        torch.topk(inputs["x"], count, dim=1, sorted=False, out=(outputs["values"], outputs["indices"]))

    return call


PREPARE = {
    "gemm": prepare_gemm,
    "conv2d": prepare_conv2d,
    "fmha": prepare_fmha,
    "topk": prepare_topk,
    "gdn": prepare_gdn,
}
"""By operator, what makes the timed call."""
