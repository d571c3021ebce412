"""Kernels of flash-linear-attention for the phases of the gated delta rule in chunks. The whole of it is in `fla`.

fla-core 0.5.0 computes its forward pass with these functions, in this order. Gates are natural logarithms here, which
its functions take unless given another. A batch of one in front of every tensor is a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import Variant
from pytest_klineage.references.device import imported

if TYPE_CHECKING:
    from pytest_klineage.references.base import Tensors

CHUNK = 64
SOLVE_BLOCK = 16
"""Side of the diagonal blocks that its solver inverts by substitution."""


def gdn_cumsum(case: KernelCase, remedy: str) -> dict[str, Variant]:
    """chunk_local_cumsum."""
    chunk_local_cumsum = imported("fla.ops.utils", "chunk_local_cumsum", remedy)

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        return {"gc": chunk_local_cumsum(inputs["g"].unsqueeze(0), chunk_size=CHUNK).squeeze(0)}

    return {"chunk_local_cumsum": Variant(call)}


def gdn_kkt_solve(case: KernelCase, remedy: str) -> dict[str, Variant]:
    """The fused kernel that its forward pass launches, and the two functions that it stands for."""
    kernel: Any = imported("fla.ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel", remedy)
    kkt = imported("fla.ops.common.chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd", remedy)
    solve_tril = imported("fla.ops.utils", "solve_tril", remedy)
    key_heads, heads, width, _chunk, tokens = case.shape.values()
    grid = (-(-tokens // CHUNK), heads)

    def fused(inputs: Tensors, outputs: Tensors) -> None:
        # As its own caller does: the kernel leaves out what lies right of the diagonal's blocks.
        inverse = outputs["inverse"].zero_()
        kernel[grid](
            k=inputs["k"], g=inputs["gc"], beta=inputs["beta"], A=inverse, cu_seqlens=None, chunk_indices=None,
            T=tokens, H=key_heads, HV=heads, K=width, BT=CHUNK, BC=SOLVE_BLOCK, USE_EXP2=False,
        )  # fmt: skip

    def separate(inputs: Tensors, outputs: Tensors) -> Tensors:
        k, gc, beta = (inputs[name].unsqueeze(0) for name in ("k", "gc", "beta"))
        lower = kkt(k=k, g=gc, beta=beta, chunk_size=CHUNK)
        return {"inverse": solve_tril(lower, output_dtype=inputs["k"].dtype).squeeze(0)}

    return {"kkt_solve": Variant(fused), "kkt+solve_tril": Variant(separate)}


def gdn_fused_fwd(case: KernelCase, remedy: str) -> dict[str, Variant]:
    """recompute_w_u_fwd, chunk_gated_delta_rule_fwd_h and chunk_fwd_o: its three launches after the solve."""
    recompute = imported("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd", remedy)
    carry = imported("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_h", remedy)
    outputs_of = imported("fla.ops.common.chunk_o", "chunk_fwd_o", remedy)
    scale = case.shape["D"] ** -0.5

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        q, k, v, inverse, gc, beta = (inputs[name].unsqueeze(0) for name in ("q", "k", "v", "inverse", "gc", "beta"))
        state0 = inputs.get("state0")
        w, u = recompute(k=k, v=v, beta=beta, A=inverse, g=gc)
        starts, updates, state = carry(
            k=k, w=w, u=u, g=gc, initial_state=None if state0 is None else state0.unsqueeze(0), output_final_state=True
        )
        o = outputs_of(q=q, k=k, v=updates, h=starts, g=gc, scale=scale)
        return {"o": o.squeeze(0), "state": state.squeeze(0)}

    return {"w_u+h+o": Variant(call)}


PHASES: dict[str, Callable[[KernelCase, str], dict[str, Variant]]] = {
    "gdn_cumsum": gdn_cumsum,
    "gdn_kkt_solve": gdn_kkt_solve,
    "gdn_fused_fwd": gdn_fused_fwd,
}
"""By operator, what makes its variants."""
