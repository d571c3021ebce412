"""The fla reference: the gated delta rule of flash-linear-attention, in Triton, with gates in log space as here."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import COMPILERS, TrialTensors, Variant
from pytest_klineage.references.device import HALVES, DeviceReference, imported, pinned_version, torch_versions
from pytest_klineage.references.fla_gdn import CHUNK, PHASES
from pytest_klineage.references.functions import package_version

if TYPE_CHECKING:
    from pytest_klineage.references.base import Tensors

LARGEST_WIDTH = 256


class FlaReference(DeviceReference):
    """chunk_gated_delta_rule, forward, and its phases. Nothing is converted: a batch of one in front is a view.

    Its chunks have 64 tokens, whatever a case suggests. It autotunes when it is warmed up, untimed.
    """

    name: ClassVar[str] = "fla"
    remedy: ClassVar[str] = "pip install flash-linear-attention==0.5.0"

    def operators(self) -> tuple[str, ...]:
        return ("gdn", *PHASES)

    def limits(self, case: KernelCase, platform: str) -> str:
        if case.operator in PHASES and case.shape["C"] != CHUNK:
            return f"its chunks have {CHUNK} tokens, not {case.shape['C']}"
        if case.operator == "gdn_cumsum":
            return ""
        if case.dtype not in HALVES:
            # Its triangular solve runs in TF32 wherever there is TF32.
            return f"it computes in {' and '.join(HALVES)}, not in {case.dtype}"
        return f"D may be {LARGEST_WIDTH} at most" if case.shape["D"] > LARGEST_WIDTH else ""

    def ahead(self, case: KernelCase) -> tuple[str, ...]:
        return COMPILERS

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        if case.operator in PHASES:
            return PHASES[case.operator](case, self.remedy)
        gdn = imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", self.remedy)
        scale = case.shape["D"] ** -0.5

        def call(inputs: Tensors, outputs: Tensors) -> Tensors:
            state0 = inputs.get("state0")
            o, state = gdn(
                inputs["q"].unsqueeze(0),
                inputs["k"].unsqueeze(0),
                inputs["v"].unsqueeze(0),
                g=inputs["g"].unsqueeze(0),
                beta=inputs["beta"].unsqueeze(0),
                scale=scale,
                initial_state=None if state0 is None else state0.unsqueeze(0),
                output_final_state=True,
                use_qk_l2norm_in_kernel=False,
            )
            return {"o": o.squeeze(0), "state": state.squeeze(0)}

        return {"chunk": Variant(call)}

    def versions(self) -> dict[str, str]:
        return torch_versions() | package_version("triton") | pinned_version("fla-core", "fla", self.remedy)
