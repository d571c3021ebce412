"""topk: the exact k largest numbers of every row of x with their places, in any order, any choice among ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import (
    in_some_rows,
    normal,
    permutation,
    random_index,
    signs,
    torch_dtype,
    uniform,
)
from pytest_klineage.operators.tolerance import HALF_SMALLEST, Expected
from pytest_klineage.records import DTYPES, KernelCase, Signature
from pytest_klineage.records.signature import dense

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

MAX_EXPONENT = 4
"""A symmetry transform multiplies each row by up to 2**4: exact, and far from overflow even in fp16."""

CLUSTER = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5}
"""Spread of the clustered input distribution around 10: many numbers of few exponents and leading bits, yet not all the
same."""


LANES, ODD_LANES, BLOCKS = "large_in_a_lane", "large_in_an_odd_lane", "large_in_a_block"
"""Checks that no prompt names: where the k largest numbers of each row lie. Elsewhere they lie at random, so that no
lane, no group of columns and no segment has many of them, and a selection from the largest of each is right."""

OUTLIER, MANY_INFINITIES = "one_far_out", "many_infinities"
"""Further ones: some rows have one number of magnitude FAR_OUT, or more than k // 2 infinities."""
FAR_OUT = {"fp32": 1e10, "fp16": 5e4, "bf16": 1e10}
"""Beside it, keys of 32 bits between a row's smallest and largest number leave nothing of the others in fp32."""


class TopK(Operator):
    """Selection of the K largest of S columns in each of B rows. Input x[B,S]; outputs values[B,K], indices[B,K] int64.

    values[i,j] must be x[i, indices[i,j]] bit for bit and the indices of a row must be distinct. Zeros of both signs
    are equal, as in torch.topk.
    """

    name: ClassVar[str] = "topk"
    axes: ClassVar[tuple[str, ...]] = ("B", "S", "K")
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "bf16")
    exact: ClassVar[bool] = True
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "ties",
        "all_equal",
        "sorted_ascending",
        "sorted_descending",
        "clustered",
        "two_clusters",
        "infinities",
        "signed_zeros",
        "denormals",
    )
    family: ClassVar[str] = "selection"
    aliases: ClassVar[tuple[str, ...]] = ("top-k",)
    gpu_reference: ClassVar[str] = "flashinfer"
    published: ClassVar[Cases] = {"gpu": ((64, 4096, 512), "fp32", {}), "cpu": ((64, 4096, 512), "fp32", {})}
    small: ClassVar[Cases] = {"gpu": ((4, 4096, 512), "fp32", {}), "cpu": ((4, 256, 32), "fp32", {})}
    tensor_axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "x": ("B", "S"), "values": ("B", "K"), "indices": ("B", "K"),
    }  # fmt: skip

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        return f"return torch.topk(x, {case.shape['K']}, dim=1, sorted={in_order})"

    def validate(self, case: KernelCase) -> None:
        if case.shape["K"] > case.shape["S"]:
            raise UsageError(f"topk: K = {case.shape['K']} exceeds the S = {case.shape['S']} columns of a row")

    def signature(self, case: KernelCase) -> Signature:
        rows, columns, k = case.shape.values()
        return Signature(
            inputs=(dense("x", case.dtype, rows, columns),),
            outputs=(dense("values", case.dtype, rows, k), dense("indices", "int64", rows, k)),
            scalars={"k": float(k)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        rows, columns, k = case.shape.values()
        x = normal((rows, columns), generator)
        if input_distribution == "ties":
            x = (uniform((rows, columns), generator) * 64).floor_().sub_(32)
        elif input_distribution == "all_equal":
            # A number of its own for every row: one for all would make another row's answer right.
            x = normal((rows, 1), generator).expand(rows, columns)
        elif input_distribution in ("sorted_ascending", "sorted_descending"):
            x = x.sort(dim=1, descending=input_distribution == "sorted_descending").values
        elif input_distribution == "clustered":
            x = x.mul_(CLUSTER[case.dtype]).add_(10.0)
        elif input_distribution == "two_clusters":
            x = x.mul_(CLUSTER[case.dtype]).add_(10.0).mul_(signs((rows, columns), generator))
            x = in_some_rows(-x.abs(), x, generator)
        elif input_distribution == "infinities":
            x = in_some_rows(starved(x, k, generator), with_infinities(x, k, generator), generator)
        elif input_distribution == "signed_zeros":
            # In some rows about half of the k largest are positive; the others are zeros of either sign.
            zero = uniform((rows, columns), generator) >= k / columns
            signed = x.masked_fill(zero, 0.0).abs_().mul_(signs((rows, columns), generator))
            x = in_some_rows(signed, x, generator)
        elif input_distribution == "denormals":
            x = x.mul_(100).round_().mul_(2 * HALF_SMALLEST[case.dtype])
        return {"x": x.to(torch_dtype(case.dtype)).contiguous()}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        _rows, columns, k = case.shape.values()
        # With fewer than twice or three times as many columns there is no such lane.
        return (*(BLOCKS, LANES, ODD_LANES)[: columns // k], OUTLIER, MANY_INFINITIES) if k < columns else ()

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        rows, columns, k = case.shape.values()
        x = self.make_inputs(case, generator, DEFAULT_DISTRIBUTION)["x"]
        if name in (OUTLIER, MANY_INFINITIES):
            odd = far_out(x, case.dtype, generator) if name == OUTLIER else infinite(x, k, generator)
            inputs = {"x": in_some_rows(odd, x, generator)}
        else:
            inputs = {"x": gathered(x, k, places(name, rows, columns, k, generator), generator)}
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        values, indices = inputs["x"].double().topk(case.shape["K"], dim=1)
        return {"values": values, "indices": indices}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        values, indices = inputs["x"].topk(case.shape["K"], dim=1)
        return {"values": values, "indices": indices}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        raise NotImplementedError("topk is exact: nothing is rounded")

    def mismatch_count(self, case: KernelCase, inputs: Tensors, expected: Tensors, actual: Tensors) -> dict[str, float]:
        import torch

        x, values, indices = inputs["x"], actual["values"], actual["indices"]
        rows, columns, k = case.shape.values()
        ordered = values.sort(dim=1, descending=True).values.double()
        inside = (indices >= 0) & (indices < columns)
        positions = torch.where(inside, indices, columns)
        seen = torch.zeros(rows, columns + 1, dtype=torch.uint8, device=x.device).scatter_(1, positions, 1)
        distinct = int(seen[:, :columns].sum())
        picked = x.gather(1, positions.clamp_max(columns - 1))
        integer = torch.int32 if DTYPES[case.dtype] == 4 else torch.int16
        differs = picked.view(integer) != values.contiguous().view(integer)
        return {
            "values": float((ordered != expected["values"]).sum()),
            "indices": float(rows * k - distinct + int((differs & inside).sum())),
        }

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        import torch

        x = inputs["x"]
        rows, columns, _k = case.shape.values()
        order, back = permutation(rows, generator, x)
        shift = random_index(columns, generator)
        exponents = torch.randint(1, MAX_EXPONENT + 1, (rows, 1), generator=generator, device=generator.device)
        scale = exponents.double().exp2_().to(x)

        def undo(outputs: Tensors) -> Tensors:
            indices = outputs["indices"]
            inside = (indices >= 0) & (indices < columns)
            # An index outside the row stays outside: it must not become right.
            moved = torch.where(inside, (indices - shift) % columns, indices)
            return {
                "values": (outputs["values"] / scale).index_select(0, back),
                "indices": moved.index_select(0, back),
            }

        return {"x": x.index_select(0, order).roll(shift, dims=1).mul_(scale)}, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        rows, columns, _k = case.shape.values()
        x = inputs["x"].clone()
        row, column = random_index(rows, generator), random_index(columns, generator)
        largest = float(x[row].max())
        if float(x[row, column]) == largest:
            column = int(x[row].argmin())
        # Infinite when the row has infinities: one more of them, and never as many as k before.
        x[row, column] = 2 * abs(largest) + 1
        return {"x": x}

    def flops(self, case: KernelCase) -> float:
        rows, columns, _k = case.shape.values()
        return float(rows * columns)


def places(name: str, rows: int, columns: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Where the k largest numbers of each row may lie, [rows, columns]: at least k places, in one block or one lane.

    A lane is every n-th column, n drawn from all numbers but powers of two; or every n-th group of columns, where n and
    the width of groups are powers of two (`stripes`).
    """
    import torch

    column = torch.arange(columns, device=generator.device)
    first = torch.randint(columns - k + 1, (rows, 1), generator=generator, device=generator.device)
    if name == BLOCKS:
        return (column >= first) & (column < first + k)
    if name == LANES:
        drawn = stripes(columns, k, generator)
        stride, width = drawn.repeat(-(-rows // len(drawn)), 1)[:rows, :, None].unbind(1)
        return column // width % stride == first % stride
    odd = torch.tensor([n for n in range(3, columns // k + 1) if n & (n - 1)], device=generator.device)
    stride = odd[torch.randint(len(odd), (rows, 1), generator=generator, device=generator.device)]
    return column % stride == first % stride


def stripes(columns: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Strides and widths of groups, powers of two that leave k places, [n, 2]: from the largest stride down, which
    shows most, and widths, of which 1 are lanes, in random order."""
    import torch

    found = []
    for stride in (1 << i for i in range((columns // k).bit_length() - 1, 0, -1)):
        widths = [1 << i for i in range((columns // stride // 2 or 1).bit_length())]
        widths = [width for width in widths if columns // (stride * width) * width >= k]
        order = torch.randperm(len(widths), generator=generator, device=generator.device).tolist()
        found += [(stride, widths[place]) for place in order]
    return torch.tensor(found, device=generator.device)


def gathered(x: torch.Tensor, k: int, inside: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same numbers in every row, the k largest of them at random places where `inside` is true."""
    import torch

    places = (uniform(tuple(x.shape), generator) + inside).topk(k, 1).indices.to(x.device)
    largest, found = x.topk(k, 1)
    others, elsewhere = (torch.ones_like(x, dtype=torch.bool).scatter_(1, at, False) for at in (found, places))
    return x.masked_scatter(elsewhere, x.masked_select(others)).scatter_(1, places, largest)


def far_out(x: torch.Tensor, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """A copy of `x` with one number of either sign in every row that is far from all others."""
    import torch

    rows, columns = x.shape
    where = torch.randint(columns, (rows, 1), generator=generator, device=x.device)
    return x.scatter(1, where, (signs((rows, 1), generator) * FAR_OUT[dtype]).to(x))


def infinite(x: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """A copy of `x` with more than k // 2 times +inf in every row, up to all of it."""
    import torch

    rows, columns = x.shape
    count = torch.randint(k // 2 + 1, columns + 1, (rows, 1), generator=generator, device=x.device)
    return x.masked_fill(uniform((rows, columns), generator).argsort(1) < count, float("inf"))


def starved(x: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """A copy of `x` in which every row has at most k // 2 numbers, so that some of its k largest are -inf."""
    import torch

    rows, columns = x.shape
    where = torch.randint(columns, (rows, k // 2), generator=generator, device=x.device)
    return torch.full_like(x, float("-inf")).scatter_(1, where, x.gather(1, where))


def with_infinities(x: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """`x` with -inf in a quarter of the places and at most k // 2 times +inf in every row. Changes `x`."""
    import torch

    rows, columns = x.shape
    x.masked_fill_(uniform((rows, columns), generator) < 0.25, float("-inf"))
    where = torch.randint(columns, (rows, k // 2), generator=generator, device=x.device)
    return x.scatter_(1, where, float("inf"))
