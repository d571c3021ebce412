"""gdn_fused_fwd: outputs and final state from inverses and summed gates, the last phase of the gated delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import normal, spiked
from pytest_klineage.operators.gdn import (
    LARGE,
    LARGE_BETA,
    PADDING,
    Gdn,
    check_heads,
    make_odd,
    move_heads,
    perturb_value,
)
from pytest_klineage.operators.gdn_phases import (
    draw_gates,
    draw_keys,
    in_chunks,
    in_dtype,
    inverses,
    joined,
)
from pytest_klineage.operators.gdn_walk import ChunkedInputs, walk, walk_variance
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding
from pytest_klineage.records import KernelCase, Option, Signature
from pytest_klineage.records.signature import dense

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo


class GdnFusedFwd(Operator):
    """The chain over chunks, with the inverse of every chunk given. Axes HQK, HV, D, C (chunk), T.

    Inputs q, k [T,HQK,D] (l2-normalised), v [T,HV,D], inverse [T,HV,C] (as gdn_kkt_solve writes it), gc, beta [T,HV]
    fp32, and with initial_state also state0 [HV,D,D] fp32 (key x value). Outputs o [T,HV,D], state [HV,D,D] fp32. By
    chunk, with gamma = gc and S the state before it: U = inverse (beta (V - exp(gamma) K S)); O = scale (exp(gamma) Q S
    + tril(Q K^T exp(gamma_i - gamma_j)) U); S <- exp(gamma_C) S + (exp(gamma_C - gamma) K)^T U; scale = 1/sqrt(D).
    """

    name: ClassVar[str] = "gdn_fused_fwd"
    axes: ClassVar[tuple[str, ...]] = ("HQK", "HV", "D", "C", "T")
    options: ClassVar[dict[str, tuple[Option, ...]]] = {"initial_state": (False, True)}
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "strong_gates",
        "gates_near_zero",
        "large_values",
        "spikes",
    )
    published: ClassVar[Cases] = Gdn.published
    small: ClassVar[Cases] = Gdn.small

    def validate(self, case: KernelCase) -> None:
        check_heads(case)

    def signature(self, case: KernelCase) -> Signature:
        key_heads, heads, width, chunk, tokens = case.shape.values()
        keys = [dense(name, case.dtype, tokens, key_heads, width) for name in "qk"]
        gates = [dense(name, "fp32", tokens, heads) for name in ("gc", "beta")]
        state0 = [dense("state0", "fp32", heads, width, width)] if self.option(case, "initial_state") else []
        values = [dense("v", case.dtype, tokens, heads, width), dense("inverse", case.dtype, tokens, heads, chunk)]
        return Signature(
            inputs=(*keys, *values, *gates, *state0),
            outputs=(dense("o", case.dtype, tokens, heads, width), dense("state", "fp32", heads, width, width)),
            scalars={"scale": width**-0.5, "chunk": float(chunk)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        _key_heads, heads, width, _chunk, tokens = case.shape.values()
        q, k = (in_dtype(case, draw_keys(case, generator, input_distribution)) for _ in range(2))
        v = normal((tokens, heads, width), generator)
        if input_distribution == "spikes":
            v = spiked(v, generator, count=max(1, tokens // 16), size=50.0)
        elif input_distribution == "large_values":
            v *= LARGE[case.dtype]
        gates = draw_gates(case, generator, input_distribution)
        solved = self._solved(case, {"k": k, **gates})
        inputs = {"q": q, "k": k, "v": in_dtype(case, v), "inverse": solved, **gates}
        if self.option(case, "initial_state"):
            inputs["state0"] = normal((heads, width, width), generator).mul_(width**-0.5).float()
        return inputs

    def _solved(self, case: KernelCase, inputs: Tensors) -> torch.Tensor:
        """The inverses that go with k, gc and beta."""
        import torch

        return in_dtype(case, joined(inverses(case, inputs, torch.float64), case.shape["T"]))

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return PADDING, LARGE_BETA

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """On a CPU alone: errors of kernels on a GPU have not been measured with them."""
        if generator.device.type != "cpu":
            return ""
        inputs = self.make_inputs(case, generator, DEFAULT_DISTRIBUTION)
        make_odd(inputs, name, generator)
        inputs["inverse"] = self._solved(case, inputs)
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        form = walk(self._chunks(case, inputs, torch.float64))
        return {"o": joined(form.o, case.shape["T"]), "state": form.state}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        dtype = inputs["v"].dtype
        form = walk(self._chunks(case, inputs, torch.float32), operand=None if dtype == torch.float32 else dtype)
        return {"o": joined(form.o, case.shape["T"]).to(dtype), "state": form.state}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        import torch

        fp32 = UNIT_ROUNDOFF["fp32"] ** 2
        product = fp32 * case.shape["D"] + (UNIT_ROUNDOFF[case.dtype] ** 2 if case.dtype != "fp32" else 0.0)
        o, state = walk_variance(walk(self._chunks(case, inputs, torch.float64)), product=product, fp32=fp32)
        return {
            "o": joined(o, case.shape["T"]).sqrt_().add_(output_rounding(case.dtype, expected["o"])),
            "state": state.sqrt_().add_(output_rounding("fp32", expected["state"])),
        }

    def _chunks(self, case: KernelCase, inputs: Tensors, dtype: torch.dtype) -> ChunkedInputs:
        key_heads, heads, width, size, _tokens = case.shape.values()
        split = {name: in_chunks(inputs[name].to(dtype), size) for name in ("q", "k", "v", "inverse", "beta")}
        q, k = (split[name].repeat_interleave(heads // key_heads, dim=1) for name in "qk")
        v = split["v"]
        state = inputs["state0"].to(dtype) if "state0" in inputs else v.new_zeros(heads, width, width)
        sums = in_chunks(inputs["gc"].to(dtype), size, repeat_last=True)
        return ChunkedInputs(
            q=q, k=k, v=v, inverse=split["inverse"], sums=sums, beta=split["beta"], state=state, scale=width**-0.5
        )  # fmt: skip

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        return move_heads(case, inputs, generator, ("inverse", "gc", "beta"))

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        return perturb_value(case, inputs, generator)

    def flops(self, case: KernelCase) -> float:
        key_heads, heads, width, chunk, tokens = case.shape.values()
        # K S, Q S and K^T U; of the triangular products half: inverse W and P U per value head, Q K^T per key head.
        return float(tokens * width * (heads * (6 * width + 2 * chunk) + key_heads * chunk))
