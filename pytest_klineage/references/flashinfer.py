"""The flashinfer reference: attention (FA3 on Hopper, else FA2), radix Top-K, and the gated delta rule's prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.device import HALVES, DeviceReference, imported, pinned_version, torch_versions

if TYPE_CHECKING:
    import torch

    from pytest_klineage.references.base import Tensors

REMEDY = "pip install flashinfer-python==0.6.11"
WORKSPACE_BYTES = 128 << 20
"""What its documentation recommends for attention."""
HEAD_WIDTHS = (64, 128, 256)
BACKENDS = {"sm90": "fa3"}
"""What its own "auto" takes there, and "fa2" on all others; named, so that the record says it."""
GDN_WIDTH = 128


class FlashInferReference(DeviceReference):
    """FlashInfer's public functions with their defaults; plans and workspaces are made beforehand."""

    name: ClassVar[str] = "flashinfer"
    remedy: ClassVar[str] = REMEDY

    def operators(self) -> tuple[str, ...]:
        return ("fmha", "topk", "gdn")

    def limits(self, case: KernelCase, platform: str) -> str:
        if case.operator == "topk":
            return ""
        if case.dtype not in HALVES:
            return f"its {case.operator} takes {' and '.join(HALVES)}, not {case.dtype}"
        width = case.shape["D"]
        if case.operator == "fmha":
            if case.options.get("group", 1) != 1 and case.options.get("layout", "bhsd") != "bshd":
                return "its attention takes shared key heads in layout bshd only"
            return "" if width in HEAD_WIDTHS else f"its attention takes D of {HEAD_WIDTHS}, not {width}"
        if platform != "sm90":
            return "its gated delta rule is written for sm90 alone"
        return "" if width == GDN_WIDTH else f"its gated delta rule takes D = {GDN_WIDTH}, not {width}"

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        return {"fmha": fmha, "topk": topk, "gdn": gdn}[case.operator](case, trial)

    def versions(self) -> dict[str, str]:
        return torch_versions() | pinned_version("flashinfer-python", "flashinfer", REMEDY)


def fmha(case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
    """Ragged prefill, planned; it writes into the output.

    Of a contiguous [B,S,H,D] (layout bshd) it sees B sequences of H heads. A contiguous [B,H,S,D] has no constant
    distance between tokens of different sequences, so every head is a sequence of its own there: the same sums over the
    same memory, nothing copied.
    """
    import torch

    wrapper_of = imported("flashinfer.prefill", "BatchPrefillWithRaggedKVCacheWrapper", REMEDY)
    batch, heads, length, width = case.shape.values()
    together = case.options.get("layout", "bhsd") == "bshd"
    sequences, per_sequence = (batch, heads) if together else (batch * heads, 1)
    key_heads = per_sequence // int(case.options.get("group", 1))
    backend, dtype = BACKENDS.get(trial.platform, "fa2"), trial.inputs["q"].dtype
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=trial.device)
    wrapper: Any = wrapper_of(workspace, kv_layout="NHD", backend=backend)
    starts = torch.arange(0, sequences * length + 1, length, dtype=torch.int32)
    wrapper.plan(
        starts, starts, per_sequence, key_heads, width, causal=bool(case.options.get("causal", False)),
        window_left=int(case.options.get("window", 0)) - 1, sm_scale=width**-0.5, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip

    def ragged(tensor: torch.Tensor) -> torch.Tensor:
        """A view [tokens, heads, D] of [B,H,S,D] in either order of memory."""
        ordered = tensor.transpose(1, 2) if together else tensor
        return ordered.view(sequences * length, -1, width)

    def call(inputs: Tensors, outputs: Tensors) -> None:
        wrapper.run(ragged(inputs["q"]), ragged(inputs["k"]), ragged(inputs["v"]), out=ragged(outputs["o"]))

    return {backend: Variant(call)}


def topk(case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
    """flashinfer.top_k, unsorted. It selects with 32-bit indices; making them 64 bits wide is part of the call."""
    top_k = imported("flashinfer.topk", "top_k", REMEDY)
    count = case.shape["K"]

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        values, indices = top_k(inputs["x"], count)
        return {"values": values, "indices": indices}

    return {"radix": Variant(call)}


def gdn(case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
    """The prefill kernel. Its gates are exp(g), its states value by key: both are converted outside of the clock."""
    import torch

    prefill = imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule", REMEDY)
    scale, tokens = case.shape["D"] ** -0.5, case.shape["T"]
    starts = torch.tensor([0, tokens], dtype=torch.int64, device=trial.device)

    def convert(inputs: Tensors) -> Tensors:
        ready = {**inputs, "g": inputs["g"].exp()}
        if "state0" in inputs:
            ready["state0"] = inputs["state0"].transpose(-1, -2).contiguous()
        return ready

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        state0 = inputs.get("state0")
        o, state = prefill(
            inputs["q"], inputs["k"], inputs["v"], g=inputs["g"], beta=inputs["beta"], scale=scale,
            initial_state=None if state0 is None else state0.unsqueeze(0), output_final_state=True, cu_seqlens=starts,
        )  # fmt: skip
        # A view: who keeps states in this library keeps them as it writes them.
        return {"o": o, "state": state.squeeze(0).transpose(-1, -2)}

    return {"prefill": Variant(call, convert)}
