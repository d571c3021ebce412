"""gdn_kkt_solve: the inverse of every chunk's triangular system, the second phase of the gated delta rule in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import perturbed, random_index, signs
from pytest_klineage.operators.gdn import LARGE_BETA, PADDING, Gdn, check_heads, head_orders, make_odd
from pytest_klineage.operators.gdn_chunked import pair_variance
from pytest_klineage.operators.gdn_phases import (
    chunk_order,
    decays_between,
    draw_gates,
    draw_keys,
    in_chunks,
    in_dtype,
    inverses,
    joined,
    lower_system,
    unit_lower_inverse,
)
from pytest_klineage.operators.tolerance import HALF_SMALLEST, UNIT_ROUNDOFF, Expected, output_rounding
from pytest_klineage.records import KernelCase, Signature
from pytest_klineage.records.signature import dense

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

SMALLEST_OPERAND = {"fp32": 2.0**-126, "bf16": HALF_SMALLEST["fp16"], "fp16": HALF_SMALLEST["fp16"]}
"""Absolute error that is always allowed. Tensor cores take halves, whose small numbers have no relative precision; next
to the ones on the diagonal it is nothing. In fp32 it is what flushing denormals to zero costs."""

PERTURBED_POSITIONS = 16


class GdnKktSolve(Operator):
    """Inverse of I + tril(beta K K^T exp(gc_i - gc_j), -1) of every chunk. Axes HQK, HV, D, C (chunk), T.

    Inputs k [T,HQK,D] (l2-normalised), gc [T,HV] fp32 (sums of log-space gates within chunks), beta [T,HV] fp32.
    Output inverse [T,HV,C]: row t is row t mod C of the inverse of t's chunk, zero right of its diagonal. Value head h
    uses k of head h // (HV / HQK). Tokens past the end count as tokens with k and beta zero.
    """

    name: ClassVar[str] = "gdn_kkt_solve"
    axes: ClassVar[tuple[str, ...]] = ("HQK", "HV", "D", "C", "T")
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "strong_gates",
        "gates_near_zero",
        "spikes",
        "alike_keys",
    )
    published: ClassVar[Cases] = Gdn.published
    small: ClassVar[Cases] = Gdn.small

    def validate(self, case: KernelCase) -> None:
        check_heads(case)

    def signature(self, case: KernelCase) -> Signature:
        key_heads, heads, width, chunk, tokens = case.shape.values()
        return Signature(
            inputs=(
                dense("k", case.dtype, tokens, key_heads, width),
                dense("gc", "fp32", tokens, heads),
                dense("beta", "fp32", tokens, heads),
            ),
            outputs=(dense("inverse", case.dtype, tokens, heads, chunk),),
            scalars={"chunk": float(chunk)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        k = in_dtype(case, draw_keys(case, generator, input_distribution))
        return {"k": k, **draw_gates(case, generator, input_distribution)}

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
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        return {"inverse": joined(inverses(case, inputs, torch.float64), case.shape["T"])}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        solved = joined(inverses(case, inputs, torch.float32), case.shape["T"])
        return {"inverse": in_dtype(case, solved)}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        import torch

        key_heads, heads, width, chunk, tokens = case.shape.values()
        fp32 = UNIT_ROUNDOFF["fp32"] ** 2
        operand = 0.0 if case.dtype == "fp32" else UNIT_ROUNDOFF["fp16"] ** 2
        keys = in_chunks(inputs["k"].double(), chunk).repeat_interleave(heads // key_heads, dim=1)
        sums = in_chunks(inputs["gc"].double(), chunk, repeat_last=True)
        beta = in_chunks(inputs["beta"].double(), chunk)
        lower = lower_system(keys, sums, beta)
        # A scaled sum of gates is rounded before it is subtracted; a quarter is the mean square of that.
        drift = sums.square().mul_(fp32 / 4)
        pairs = drift[..., :, None] + drift[..., None, :]
        _, wrong = pair_variance(keys, keys, decays_between(sums), fp32 * width, pairs)
        # Elements of the system are operands of sums of up to C terms, which may cancel.
        rounded = operand + fp32 * (1 + chunk / 2)
        wrong = wrong.mul_(beta.square()[..., None]).add_(lower.square(), alpha=rounded).tril_(-1)
        # An error E of the system makes one of -M E M in the inverse M; intermediate results are operands again.
        solved = unit_lower_inverse(lower).square_()
        variance = solved @ wrong @ solved + (operand + fp32 * chunk) * (solved @ solved)
        error = joined(variance, tokens).sqrt_().add_(SMALLEST_OPERAND[case.dtype])
        torch.add(error, output_rounding(case.dtype, expected["inverse"]), out=error)
        return {"inverse": error}

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        import torch

        key_heads, heads, width, chunk, tokens = case.shape.values()
        k = inputs["k"]
        key_order, order = head_orders(key_heads, heads, generator, k)
        moved = chunk_order(tokens, chunk, generator, k)
        back, moved_back = torch.argsort(order), torch.argsort(moved)
        # The sign of a key turns its row and its column; signs of dimensions cancel in every product of keys.
        token_signs = signs((tokens, key_heads), generator).to(k)
        flipped = k.index_select(1, key_order).index_select(0, moved) * token_signs[..., None]
        transformed = {"k": flipped.mul_(signs((key_heads, width), generator).to(k))}
        for name in ("gc", "beta"):
            transformed[name] = inputs[name].index_select(1, order).index_select(0, moved)
        rows = token_signs.float().repeat_interleave(heads // key_heads, dim=1)
        columns = joined(in_chunks(rows, chunk)[:, :, None, :].expand(-1, -1, chunk, -1), tokens)
        flips = rows[..., None] * columns

        def undo(outputs: Tensors) -> Tensors:
            inverse = outputs["inverse"] * flips.to(outputs["inverse"])
            return {"inverse": inverse.index_select(1, back).index_select(0, moved_back)}

        return transformed, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        key_heads, heads, _width, chunk, tokens = case.shape.values()
        k, gc, beta = inputs["k"].double(), inputs["gc"].double(), inputs["beta"]
        best, where = -1.0, (0, 0)
        # Of some tokens the one whose row has the largest element: elsewhere a gate may hide what beta does.
        for _ in range(PERTURBED_POSITIONS):
            token, head = random_index(tokens, generator), random_index(heads, generator)
            first, key_head = token // chunk * chunk, head // (heads // key_heads)
            seen = k[first:token, key_head] @ k[token, key_head] * (gc[token, head] - gc[first:token, head]).exp()
            size = float(seen.abs().max()) if len(seen) else 0.0
            if size > best:
                best, where = size, (token, head)
        return {**inputs, "beta": perturbed(beta, where)}

    def flops(self, case: KernelCase) -> float:
        key_heads, heads, width, chunk, tokens = case.shape.values()
        # Half of K K^T once per key head, and of every value head an inverse of C^3 / 3.
        return tokens * chunk * (key_heads * width + heads * chunk / 3)
