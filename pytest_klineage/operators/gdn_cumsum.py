"""gdn_cumsum: sums of log-space gates within chunks of tokens, the first phase of the gated delta rule in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import evenly, permutation, random_index
from pytest_klineage.operators.gdn import gates
from pytest_klineage.operators.gdn_phases import chunk_order, chunk_sums
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding, summation_variance
from pytest_klineage.records import KernelCase, Signature
from pytest_klineage.records.signature import dense

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

MAX_EXPONENT = 4
"""A symmetry transform multiplies the gates of a head by up to 2**4: exact, and far from overflow."""

LONE_GATE, LEAST_LONE, MOST_LONE = "lone_gate", 1e4, 1e30
"""A check that no prompt names: one huge gate in every head. From the next chunk on, sums must know nothing of it."""


class GdnCumsum(Operator):
    """Chunk-local inclusive cumulative sum. Axes HV, C (chunk), T. Input g [T,HV] fp32, output gc [T,HV] fp32.

    gc[t] is the sum of g over the tokens of t's chunk up to t; chunks are of C tokens, the last one of what is left.
    """

    name: ClassVar[str] = "gdn_cumsum"
    axes: ClassVar[tuple[str, ...]] = ("HV", "C", "T")
    dtypes: ClassVar[tuple[str, ...]] = ("fp32",)
    input_distributions: ClassVar[tuple[str, ...]] = (DEFAULT_DISTRIBUTION, "strong_gates", "gates_near_zero")
    published: ClassVar[Cases] = {"gpu": ((48, 64, 4096), "fp32", {}), "cpu": ((12, 64, 4096), "fp32", {})}
    small: ClassVar[Cases] = {"gpu": ((48, 64, 192), "fp32", {}), "cpu": ((3, 16, 96), "fp32", {})}

    def signature(self, case: KernelCase) -> Signature:
        heads, chunk, tokens = case.shape.values()
        return Signature(
            inputs=(dense("g", "fp32", tokens, heads),),
            outputs=(dense("gc", "fp32", tokens, heads),),
            scalars={"chunk": float(chunk)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        heads, _chunk, tokens = case.shape.values()
        return {"g": gates(input_distribution, tokens, heads, generator).float()}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return (LONE_GATE,)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """On a CPU alone: errors of kernels on a GPU have not been measured with them."""
        import torch

        if generator.device.type != "cpu":
            return ""
        heads, chunk, tokens = case.shape.values()
        inputs = self.make_inputs(case, generator, DEFAULT_DISTRIBUTION)
        where = torch.randint(max(1, tokens - chunk), (1, heads), generator=generator)
        size = LEAST_LONE * (MOST_LONE / LEAST_LONE) ** evenly((1, heads), generator)
        inputs["g"].scatter_(0, where, -size.float())
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return {"gc": chunk_sums(inputs["g"].double(), case.shape["C"])}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return {"gc": chunk_sums(inputs["g"], case.shape["C"])}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        import torch

        _heads, chunk, tokens = case.shape.values()
        squares = chunk_sums(inputs["g"].double().square(), chunk)
        terms = torch.arange(tokens, dtype=torch.float64, device=squares.device).remainder_(chunk).add_(1)[:, None]
        variance = summation_variance(squares, expected["gc"], terms)
        error = variance.sqrt_().mul_(UNIT_ROUNDOFF["fp32"])
        return {"gc": error.add_(output_rounding("fp32", expected["gc"]))}

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        import torch

        heads, chunk, tokens = case.shape.values()
        g = inputs["g"]
        order, back = permutation(heads, generator, g)
        tokens_order = chunk_order(tokens, chunk, generator, g)
        tokens_back = torch.argsort(tokens_order)
        exponents = torch.randint(1, MAX_EXPONENT + 1, (heads,), generator=generator, device=generator.device)
        scale = exponents.double().exp2_().to(g)

        def undo(outputs: Tensors) -> Tensors:
            return {"gc": (outputs["gc"] / scale).index_select(1, back).index_select(0, tokens_back)}

        return {"g": g.index_select(1, order).index_select(0, tokens_order).mul_(scale)}, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        g = inputs["g"].clone()
        where = random_index(case.shape["T"], generator), random_index(case.shape["HV"], generator)
        # Still a gate: at most zero.
        g[where] = 2 * float(g.min()) - 1.0
        return {"g": g}

    def flops(self, case: KernelCase) -> float:
        heads, _chunk, tokens = case.shape.values()
        return float(tokens * heads)
