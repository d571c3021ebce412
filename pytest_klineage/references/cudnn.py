"""The cudnn reference: conv2d in both memory orders, with and without a search; fmha by its fused attention."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.device import HALVES, DeviceReference, torch_versions
from pytest_klineage.references.torch import prepare_conv2d, prepare_fmha

if TYPE_CHECKING:
    from pytest_klineage.references.base import Convert, Tensors

ORDER_OF_LAYOUT = {"nchw": "nchw", "nhwc": "channels_last"}
"""By layout of a case, what torch calls that order of memory."""
PLANS_KEPT = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
"""PyTorch's variable for how many plans of convolutions a thread keeps; it is read when the first one is called."""
SEARCH = {"cudnn_benchmark": True, "cudnn_benchmark_limit": 0}
NO_SEARCH = {"cudnn_benchmark": False}
ONLY_CUDNN_SDP = {"cudnn_sdp": True, "flash_sdp": False, "mem_efficient_sdp": False, "math_sdp": False}
WIDE_HEADS = ("sm90",)
"""Platforms on which its attention takes D up to 256; on all others it takes 128."""


class CudnnReference(DeviceReference):
    """cuDNN through torch, which has no destination argument here: outputs are new tensors."""

    name: ClassVar[str] = "cudnn"
    remedy: ClassVar[str] = "pip install torch"

    def operators(self) -> tuple[str, ...]:
        return ("conv2d", "fmha")

    def limits(self, case: KernelCase, platform: str) -> str:
        if case.operator != "fmha":
            return ""
        if case.dtype not in HALVES:
            return f"its attention takes {' and '.join(HALVES)}, not {case.dtype}"
        if case.options.get("window"):
            return "its attention through torch has no sliding window"
        width, largest = case.shape["D"], 256 if platform in WIDE_HEADS else 128
        if width % 8 == 0 and width <= largest:
            return ""
        return f"its attention takes D up to {largest} in steps of 8, not {width}"

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        return conv2d(case) if case.operator == "conv2d" else fmha(case)

    def countable(self, case: KernelCase) -> Collection[str] | None:
        if case.operator != "conv2d":
            return None
        order = ORDER_OF_LAYOUT[str(case.options.get("layout", "nchw"))]
        return (order, f"{order}+benchmark")

    def versions(self) -> dict[str, str]:
        return torch_versions()


def conv2d(case: KernelCase) -> dict[str, Variant]:
    """Four variants: "nchw", "nchw+benchmark", "channels_last", "channels_last+benchmark".

    The two that are not in the case's order are measured on converted inputs, for the record. A search times plans and
    takes the fastest, which is not the same one every time; with one plan kept, another shape makes room for another.
    """
    os.environ[PLANS_KEPT] = "1"
    call = prepare_conv2d(case)
    own = ORDER_OF_LAYOUT[str(case.options.get("layout", "nchw"))]

    found = {}
    for order in ORDER_OF_LAYOUT.values():
        convert = None if order == own else to_order(order)
        found[order] = Variant(call, convert, NO_SEARCH)
        found[f"{order}+benchmark"] = Variant(call, convert, SEARCH, forget_plan)
    return found


def forget_plan(inputs: Tensors) -> None:
    """Have PyTorch keep the plan of another convolution instead, in this thread."""
    from torch.nn.functional import conv2d

    conv2d(inputs["x"].new_zeros(1, 8, 8, 8), inputs["w"].new_zeros(8, 8, 1, 1))


def to_order(order: str) -> Convert:
    """What copies all inputs to another order of memory."""
    import torch

    memory = torch.channels_last if order == "channels_last" else torch.contiguous_format

    def convert(inputs: Tensors) -> Tensors:
        return {name: tensor.contiguous(memory_format=memory) for name, tensor in inputs.items()}

    return convert


def fmha(case: KernelCase) -> dict[str, Variant]:
    """scaled_dot_product_attention with every backend but cuDNN's switched off."""
    return {"sdpa": Variant(prepare_fmha(case), flags=ONLY_CUDNN_SDP)}
