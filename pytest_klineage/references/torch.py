"""The torch reference: PyTorch's own operators, and our composition of them where it has none (gdn, its phases)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from pytest_klineage.errors import UnknownName
from pytest_klineage.records import PLATFORMS, KernelCase
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.device import DeviceReference, torch_versions
from pytest_klineage.references.torch_gdn import (
    prepare_gdn,
    prepare_gdn_cumsum,
    prepare_gdn_fused_fwd,
    prepare_gdn_kkt_solve,
)

if TYPE_CHECKING:
    import torch

    from pytest_klineage.references.base import Call, Tensors

COMPOSED_LABEL = "torch-chunked (our composition of torch ops)"
COMPOSED = ("gdn", "gdn_kkt_solve", "gdn_fused_fwd")
"""Operators that torch has not."""
AS_VENDOR = ("fmha", "topk", "gdn_cumsum")
"""Its own functions that no other library is known to beat: gdn and the other phases are compositions of ours."""
ANY_SDP = {"cudnn_sdp": True, "flash_sdp": True, "mem_efficient_sdp": True, "math_sdp": True}
"""torch picks one of its attentions by itself, as it does for a user who sets nothing."""


class TorchReference(DeviceReference):
    """PyTorch eager, on whatever device the tensors are. Destination arguments are used where an operator has one."""

    name: ClassVar[str] = "torch"
    platforms: ClassVar[tuple[str, ...]] = PLATFORMS
    remedy: ClassVar[str] = "pip install 'pytest-klineage[cpu]'"

    def operators(self) -> tuple[str, ...]:
        return tuple(PREPARE)

    def as_vendor(self) -> tuple[str, ...]:
        return AS_VENDOR

    def prepare(self, case: KernelCase, trial: TrialTensors | None = None) -> Call:
        """The timed call, warmed up where there is a trial. Raises UnknownName for an operator that torch has not."""
        if trial is not None:
            return super().prepare(case, trial)
        if case.operator not in PREPARE:
            raise UnknownName("operator of reference torch", case.operator, PREPARE)
        return PREPARE[case.operator](case)

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        return {"eager": Variant(PREPARE[case.operator](case), flags=ANY_SDP if case.operator == "fmha" else {})}

    def label(self, case: KernelCase) -> str:
        return COMPOSED_LABEL if case.operator in COMPOSED else "torch"

    def versions(self) -> dict[str, str]:
        import torch

        build = torch.__config__.show()
        description = {
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
            description |= {**torch_versions(), "cudnn_benchmark": str(torch.backends.cudnn.benchmark)}
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
    """The timed call of an fmha case: scaled_dot_product_attention, which picks its own algorithm; a new tensor.

    A sliding window is a mask to it, made once.
    """
    from torch.nn.functional import scaled_dot_product_attention

    window, shared = int(case.options.get("window", 0)), int(case.options.get("group", 1)) > 1
    causal = bool(case.options.get("causal", False)) and not window
    masks: dict[torch.device, torch.Tensor] = {}

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        if window and q.device not in masks:
            masks[q.device] = window_mask(q, window)
        mask = masks.get(q.device)
        return {"o": scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)}

    return call


def window_mask(q: torch.Tensor, window: int) -> torch.Tensor:
    """True where a query, by row, sees a key: the last `window` keys up to its own position."""
    import torch

    length = q.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).tril_().triu_(1 - window)


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
    "gdn_cumsum": prepare_gdn_cumsum,
    "gdn_kkt_solve": prepare_gdn_kkt_solve,
    "gdn_fused_fwd": prepare_gdn_fused_fwd,
}
"""By operator, what makes the timed call."""
