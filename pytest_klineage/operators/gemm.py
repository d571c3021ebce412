"""gemm: c[M,N] = a[M,K] @ b[K,N], row-major, or with a or b stored transposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import (
    TINY,
    in_some_rows,
    normal,
    permutation,
    perturbed,
    plain,
    powers_of_two,
    random_index,
    signs,
    spiked,
    torch_dtype,
)
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding, summation_variance
from pytest_klineage.records import KernelCase, Option, Signature
from pytest_klineage.records.signature import TensorSpec, dense, permuted

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

LARGE = {"fp32": 1e15, "fp16": 16.0, "bf16": 1e15}
"""Factor of the large-magnitude input distribution: products stay representable in the output type."""

SPIKE = {"fp32": 100.0, "fp16": 16.0, "bf16": 100.0}
"""Size of spikes: a perturbed one times another stays below fp16's 65504."""

PERTURBATION = 32.0
"""A perturbation in largest elements: one term that outweighs the rounding of shifted bf16 sums up to K = 16384."""

SHIFT = 1.0
"""Mean of the shifted input distribution. More would bury the differences between outputs under bf16's rounding for
long sums."""

GRADED, OVERFLOWING = "graded", "overflowing"
"""Checks that no prompt names: a power of two for each row, column and place of the inner axis; and, in fp16, sums in
some rows that exceed what the type holds."""
GRADES = {"fp32": (20, 20), "fp16": (5, 2), "bf16": (20, 20)}
"""Their largest exponents, along the inner axis, where they cancel, and of rows and columns."""
OVERFLOW, OVERFLOW_B = 2 * 65504.0, 16.0
"""Standard deviation of such a sum, and the part of it that b has: in a alone its factor would overflow."""

MEMORY_ORDER = {"n": (0, 1), "t": (1, 0)}
"""Axes of an operand, outermost first, by its letter in the layout: as it is, or transposed in memory."""


class Gemm(Operator):
    """Dense matrix product. Axes M, N, K; inputs a[M,K], b[K,N]; output c[M,N], row-major.

    Layout has a letter for a and one for b: shapes stay the same, and with t the operand has the strides of a
    transposed row-major matrix. A linear layer's weight[N,K] is a b of layout nt.
    """

    name: ClassVar[str] = "gemm"
    axes: ClassVar[tuple[str, ...]] = ("M", "N", "K")
    options: ClassVar[dict[str, tuple[Option, ...]]] = {"layout": ("nn", "nt", "tn", "tt")}
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION, "spikes", "shifted", "large_magnitude", "plain",
    )  # fmt: skip
    family: ClassVar[str] = "products of tiles"
    aliases: ClassVar[tuple[str, ...]] = ("matmul",)
    gpu_reference: ClassVar[str] = "cublas"
    published: ClassVar[Cases] = {"gpu": ((4096, 4096, 4096), "bf16", {}), "cpu": ((1024, 1024, 1024), "fp32", {})}
    small: ClassVar[Cases] = {"gpu": ((512, 512, 512), "bf16", {}), "cpu": ((64, 64, 64), "fp32", {})}
    tensor_axes: ClassVar[dict[str, tuple[str, ...]]] = {"a": ("M", "K"), "b": ("K", "N"), "c": ("M", "N")}

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        return "return torch.matmul(a, b)"

    def signature(self, case: KernelCase) -> Signature:
        m, n, k = case.shape.values()
        order_a, order_b = (MEMORY_ORDER[letter] for letter in str(self.option(case, "layout")))

        def spec(name: str, order: tuple[int, ...], *shape: int) -> TensorSpec:
            return permuted(name, case.dtype, shape, order)

        return Signature(
            inputs=(spec("a", order_a, m, k), spec("b", order_b, k, n)),
            outputs=(dense("c", case.dtype, m, n),),
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        m, n, k = case.shape.values()
        a, b = normal((m, k), generator), normal((k, n), generator)
        if input_distribution == "spikes":
            a = spiked(a, generator, count=max(1, m // 16), size=SPIKE[case.dtype])
            b = spiked(b, generator, count=max(1, n // 16), size=SPIKE[case.dtype])
        elif input_distribution == "shifted":
            a += SHIFT
            b += SHIFT / 2
        elif input_distribution == "large_magnitude":
            # Each operand has large numbers, and no product has two of them. In fp16 a perturbed one would overflow.
            split = k if case.dtype == "fp16" else k // 2
            a[:, :split] *= LARGE[case.dtype]
            b[split:] *= LARGE[case.dtype]
        elif input_distribution == "plain":
            a, b = plain(a, generator), plain(b, generator)
            a[3::4] *= TINY[case.dtype]
            b[:, 3::4] *= TINY[case.dtype]
        dtype = torch_dtype(case.dtype)
        return {"a": a.to(dtype), "b": b.to(dtype)}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return (GRADED, OVERFLOWING) if case.dtype == "fp16" else (GRADED,)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """On a CPU alone: errors of kernels on a GPU have not been measured with them."""
        if generator.device.type != "cpu":
            return ""
        m, n, k = case.shape.values()
        a, b = normal((m, k), generator), normal((k, n), generator)
        if name == GRADED:
            grade(a, b, *GRADES[case.dtype], generator)
        else:
            a = in_some_rows(OVERFLOW / OVERFLOW_B / k**0.5 * a, a, generator)
            b *= OVERFLOW_B
        dtype = torch_dtype(case.dtype)
        inputs = {"a": a.to(dtype), "b": b.to(dtype)}
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return {"c": inputs["a"].double() @ inputs["b"].double()}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        # Products of fp16 or bf16 numbers are exact in fp32: this is what tensor cores with fp32 accumulators compute.
        return {"c": (inputs["a"].float() @ inputs["b"].float()).to(inputs["a"].dtype)}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        squares = inputs["a"].double().square_() @ inputs["b"].double().square_()
        unit = summation_variance(squares, expected["c"], case.shape["K"]).sqrt_().mul_(UNIT_ROUNDOFF["fp32"])
        return {"c": unit.add_(output_rounding(case.dtype, expected["c"]))}

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        m, n, k = case.shape.values()
        a, b = inputs["a"], inputs["b"]
        rows, back = permutation(m, generator, a)
        row_signs = signs((m, 1), generator).to(a)
        inner_signs = signs((k,), generator).to(a)
        column_signs = signs((n,), generator).to(a)

        def undo(outputs: Tensors) -> Tensors:
            return {"c": (outputs["c"] * (row_signs * column_signs)).index_select(0, back)}

        return {
            "a": a.index_select(0, rows).mul_(row_signs).mul_(inner_signs),
            "b": (b * column_signs).mul_(inner_signs[:, None]),
        }, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        name = "ab"[random_index(2, generator)]
        rows, columns = inputs[name].shape
        where = (random_index(rows, generator), random_index(columns, generator))
        return {**inputs, name: perturbed(inputs[name], where, factor=PERTURBATION)}

    def flops(self, case: KernelCase) -> float:
        m, n, k = case.shape.values()
        return 2.0 * m * n * k


def grade(a: torch.Tensor, b: torch.Tensor, inner: int, outer: int, generator: torch.Generator) -> None:
    """Multiply rows of a, columns of b and what they share by powers of two, which changes no relative error."""
    shared = powers_of_two((a.shape[1],), inner, generator)
    a.mul_(shared).mul_(powers_of_two((len(a), 1), outer, generator))
    b.div_(shared[:, None]).mul_(powers_of_two((b.shape[1],), outer, generator))
