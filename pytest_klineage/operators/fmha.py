"""fmha: o[B,H,S,D] = softmax(scale q k^T) v by head: full, causal or in a sliding window, key heads shared or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import (
    TINY,
    evenly,
    in_some_rows,
    normal,
    permutation,
    perturbed,
    plain,
    random_index,
    signs,
    torch_dtype,
)
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding, summation_variance
from pytest_klineage.records import KernelCase, Option, Signature, TensorSpec
from pytest_klineage.records.signature import permuted

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

LARGE = {"fp32": 1e15, "fp16": 100.0, "bf16": 1e15}
"""Factor of v in the large-magnitude input distribution; o is an average of v, so it cannot overflow."""

VAST_SCORES, LONE_VALUE = "vast_scores", "lone_value"
"""Checks that no prompt names: scores of every size, in some rows beyond 709, where exp leaves doubles; and, in fp32, a
huge value at a key of little weight."""
LEAST_VAST, VAST, SHARP, LONE = 8.0, 512.0, 12.0, 1e18
"""Factors of a row of q in the former, evenly on a logarithmic scale, and of q in the latter, and of the lone value: it
counts down to a weight of about exp(-57), far above where exp leaves fp32."""

MEMORY_ORDER = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}

PERTURBED_SCORE = 4.0
"""A perturbation of q or k in largest elements: a score changes by about as much as scores differ."""

BLOCK_ELEMENTS = 1 << 25
"""Scores that are in memory at once: 256 MB in float64."""


class Fmha(Operator):
    """Attention, forward. Axes B, H, S, D; q and o [B,H,S,D], k and v [B,H/group,S,D]; scale = 1/sqrt(D).

    `group` consecutive query heads share one head of k and v. `window` counts the keys that a query sees, the one at
    its own position last; 0 means all up to there, and any other number needs `causal`.
    In layout bshd shapes stay the same and strides are those of a contiguous [B,S,H,D].
    """

    name: ClassVar[str] = "fmha"
    axes: ClassVar[tuple[str, ...]] = ("B", "H", "S", "D")
    options: ClassVar[dict[str, tuple[Option, ...]]] = {
        "causal": (False, True),
        "layout": ("bhsd", "bshd"),
        "group": (1, 2, 4, 8, 16),
        "window": (0, 16, 128, 512, 1024, 2048, 4096),
    }
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "peaky",
        "overflowing_scores",
        "shifted",
        "large_magnitude",
        "needles",
        "negative_scores",
        "plain",
    )
    family: ClassVar[str] = "products of tiles"
    aliases: ClassVar[tuple[str, ...]] = ("attention",)
    gpu_reference: ClassVar[str] = "vendor"
    published: ClassVar[Cases] = {"gpu": ((8, 64, 2048, 128), "fp16", {}), "cpu": ((1, 8, 512, 64), "fp32", {})}
    small: ClassVar[Cases] = {"gpu": ((1, 2, 256, 128), "fp16", {}), "cpu": ((1, 2, 64, 32), "fp32", {})}
    tensor_axes: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys("qkvo", ("B", "H", "S", "D"))

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        seen = f"is_causal={self.option(case, 'causal')}"
        if window := self._window(case):
            every = "torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)"
            seen = f"attn_mask={every}.tril().triu({1 - window})"
        shared = ", enable_gqa=True" if self._group(case) > 1 else ""
        return f"return torch.nn.functional.scaled_dot_product_attention(q, k, v, {seen}{shared})"

    def validate(self, case: KernelCase) -> None:
        heads, group = case.shape["H"], self._group(case)
        if heads % group:
            raise UsageError(f"fmha: H = {heads} must be a multiple of the group of {group} query heads")
        if self._window(case) and not self.option(case, "causal"):
            raise UsageError("fmha: a window needs causal=True")

    def signature(self, case: KernelCase) -> Signature:
        order = MEMORY_ORDER[str(self.option(case, "layout"))]

        def spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
            return permuted(name, case.dtype, shape, order)

        queries, keys = self._shapes(case)
        return Signature(
            inputs=(spec("q", queries), spec("k", keys), spec("v", keys)),
            outputs=(spec("o", queries),),
            scalars=self._scalars(case),
        )

    def _scalars(self, case: KernelCase) -> dict[str, float]:
        """A kernel learns of a window by a scalar that no other case has."""
        given = {"scale": case.shape["D"] ** -0.5, "causal": float(bool(self.option(case, "causal")))}
        return given | ({"window": float(window)} if (window := self._window(case)) else {})

    def _group(self, case: KernelCase) -> int:
        return int(self.option(case, "group"))

    def _window(self, case: KernelCase) -> int:
        return int(self.option(case, "window"))

    def _shapes(self, case: KernelCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q and o, and of k and v."""
        batch, heads, length, width = case.shape.values()
        return (batch, heads, length, width), (batch, heads // self._group(case), length, width)

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        queries, keys = self._shapes(case)
        q, k, v = normal(queries, generator), normal(keys, generator), normal(keys, generator)
        if input_distribution == "peaky":
            q *= 8.0
        elif input_distribution == "overflowing_scores":
            # Scores beyond 88, where exp leaves fp32, in some rows: only a subtracted maximum keeps them finite.
            q = in_some_rows(64.0 * q, q, generator)
        elif input_distribution == "shifted":
            k += 2.0
            v += 1.0
        elif input_distribution == "large_magnitude":
            v *= LARGE[case.dtype]
        elif input_distribution == "needles":
            plant_needles(q, k, v, generator)
        elif input_distribution == "negative_scores":
            turn_away(q, k, generator)
        elif input_distribution == "plain":
            q, k, v = (plain(tensor, generator) for tensor in (q, k, v))
            v[..., 3::4] *= TINY[case.dtype]
        dtype = torch_dtype(case.dtype)
        return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return (VAST_SCORES, LONE_VALUE) if case.dtype == "fp32" else (VAST_SCORES,)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """On a CPU alone: errors of kernels on a GPU have not been measured with them."""
        import torch

        if generator.device.type != "cpu":
            return ""
        inputs = self.make_inputs(case, generator, DEFAULT_DISTRIBUTION)
        q, v = inputs["q"], inputs["v"]
        if name == VAST_SCORES:
            q *= LEAST_VAST * (VAST / LEAST_VAST) ** evenly((*q.shape[:-1], 1), generator)
        else:
            q *= SHARP
            batch, heads, length, width = v.shape
            where = torch.randint(length, (batch, heads, 1, 1), generator=generator).expand(batch, heads, 1, width)
            v.scatter_(2, where, LONE * v.gather(2, where))
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        o = torch.empty_like(inputs["q"], dtype=torch.float64, memory_format=torch.contiguous_format)
        for q, k, v, out in blocks(inputs["q"], inputs["k"], inputs["v"], o):
            out.copy_(self._weights(case, self._scores(case, q.double(), k.double())) @ v.double())
        return {"o": o}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        o = torch.empty_like(inputs["q"], memory_format=torch.contiguous_format)
        for q, k, v, out in blocks(inputs["q"], inputs["k"], inputs["v"], o):
            # Fused kernels keep scores in fp32 and round the weights to the inputs' type for the second product.
            weights = self._weights(case, self._scores(case, q.float(), k.float())).to(v.dtype)
            out.copy_(weights.float() @ v.float())
        return {"o": o}

    def _scores(self, case: KernelCase, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).mul_(case.shape["D"] ** -0.5)

    def _weights(self, case: KernelCase, scores: torch.Tensor) -> torch.Tensor:
        import torch

        if self.option(case, "causal"):
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
            if window := self._window(case):
                visible.triu_(1 - window)
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores.softmax(-1)

    def _visible_keys(self, case: KernelCase, like: torch.Tensor) -> torch.Tensor:
        """How many keys every query sees, [S,1]."""
        import torch

        length = case.shape["S"]
        if self.option(case, "causal"):
            most = self._window(case) or length
            return torch.arange(1, length + 1, device=like.device).clamp_(max=most)[:, None]
        return torch.full((length, 1), length, device=like.device)

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        import torch

        # o = sum_j p_j v_j. An error e_j of score j moves o by p_j (v_j - o) e_j; rounding a weight to the case's type
        # for the second product moves it by p_j v_j u; both sums of S terms are rounded in fp32.
        unit = torch.empty_like(expected["o"])
        fp32, weight = UNIT_ROUNDOFF["fp32"] ** 2, UNIT_ROUNDOFF[case.dtype] ** 2
        width, keys = case.shape["D"], self._visible_keys(case, expected["o"])
        for q, k, v, o, out in blocks(inputs["q"], inputs["k"], inputs["v"], expected["o"], unit):
            q, k, v = q.double(), k.double(), v.double()
            scores = self._scores(case, q, k)
            products = self._scores(case, q.square(), k.square()).mul_(width**-0.5)
            score_variance = summation_variance(products, scores, width).add_(scores.square()).add_(1)
            squares = self._weights(case, scores).square_()
            moved = score_variance.mul_(squares)
            spread = (moved @ v.square()).sub_(2 * o * (moved @ v)).add_(o.square() * moved.sum(-1, keepdim=True))
            weighted = squares @ v.square()
            rounded = weight * weighted
            variance = summation_variance(weighted, o * 2**0.5, keys).add_(spread.clamp_min_(0)).mul_(fp32)
            out.copy_(variance.add_(rounded).sqrt_())
        return {"o": unit.add_(output_rounding(case.dtype, expected["o"]))}

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        queries, keys = self._shapes(case)
        batch, heads, length, width = keys
        sets = batch * heads  # of the query heads that share a key head
        q, k, v = (inputs[name].reshape(sets, -1, length, width) for name in "qkv")
        order, back = permutation(sets, generator, q)
        inner_signs = signs((sets, 1, 1, width), generator).to(q)
        value_signs = signs((sets, 1, 1, width), generator).to(q)
        q, k, v = (tensor.index_select(0, order) for tensor in (q, k, v))
        if not self.option(case, "causal"):
            positions, _ = permutation(length, generator, k)
            k, v = k.index_select(2, positions), v.index_select(2, positions)

        def undo(outputs: Tensors) -> Tensors:
            o = outputs["o"].reshape(sets, -1, length, width) * value_signs
            return {"o": o.index_select(0, back).view(queries)}

        transformed = {"q": q.mul_(inner_signs), "k": k.mul_(inner_signs), "v": v.mul_(value_signs)}
        return {name: tensor.view(queries if name == "q" else keys) for name, tensor in transformed.items()}, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        batch, heads, length, width = case.shape.values()
        entry, head = random_index(batch, generator), random_index(heads, generator)
        query, shared = random_index(length, generator), head // self._group(case)
        # The key that this query heeds most, among those it may see.
        end = query + 1 if self.option(case, "causal") else length
        start = max(0, end - (self._window(case) or end))
        q, keys = inputs["q"][entry, head, query].double(), inputs["k"][entry, shared, start:end].double()
        most = int((keys @ q).argmax())
        name = "qkv"[random_index(3, generator)]
        if name == "v" or len(keys) == 1:  # A single key has all the weight, whatever its score.
            where = (entry, shared, start + most, random_index(width, generator))
            return {**inputs, "v": perturbed(inputs["v"], where, factor=16.0)}
        changed = inputs[name].clone()
        # Where that changes the scores most: the key's, so that it is heeded least, or those of all in different ways.
        column = int(q.abs().argmax() if name == "k" else (keys - keys[most]).abs().amax(0).argmax())
        size = PERTURBED_SCORE * float(inputs[name].abs().max()) + 1.0
        if name == "k":
            changed[entry, shared, start + most, column] = -size if float(q[column]) > 0 else size
        else:
            # Against the key that was heeded most.
            away = float((keys[:, column] - keys[most, column]).sum())
            changed[entry, head, query, column] = size if away > 0 else -size
        return {**inputs, name: changed}

    def flops(self, case: KernelCase) -> float:
        batch, heads, length, width = case.shape.values()
        pairs = length * length
        if self.option(case, "causal"):
            seen = min(self._window(case) or length, length)
            pairs = seen * (seen + 1) // 2 + (length - seen) * seen
        return 4.0 * batch * heads * pairs * width


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors [n,S,D] of [B,H,S,D] ones: so many heads of one batch entry that their scores fit in memory.

    They are views, except of a tensor with fewer heads than the first: its heads are repeated for all that share them.
    """
    batch, heads, length, _width = tensors[0].shape
    step = max(1, BLOCK_ELEMENTS // (length * length))
    for entry in range(batch):
        for start in range(0, heads, step):
            yield tuple(heads_of(tensor[entry], heads, start, min(start + step, heads)) for tensor in tensors)


def heads_of(tensor: torch.Tensor, heads: int, start: int, stop: int) -> torch.Tensor:
    """Of a [H,S,D] tensor, or of one whose heads serve several of `heads` each, those from `start` to `stop`."""
    import torch

    if tensor.shape[0] == heads:
        return tensor[start:stop]
    wanted = torch.arange(start, stop, device=tensor.device) // (heads // tensor.shape[0])
    return tensor.index_select(0, wanted)


def turn_away(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
    """Have all scores of every second query lie near -240, where exp is zero in fp32. Changes q and k in place.

    A running maximum that begins at zero, or at another number that is not small enough, leaves no weight there.
    """
    batch, heads, _, width = k.shape
    direction = normal((batch, heads, 1, width), generator)
    direction /= direction.norm(dim=-1, keepdim=True)
    k += 6.0 * direction
    q[:, :, ::2] -= 40.0 * width**0.5 * direction.repeat_interleave(q.shape[1] // heads, dim=1)


def plant_needles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Make a few keys per head, at random places, dominate every query that sees them. Changes all three in place."""
    import math

    import torch

    batch, heads, length, width = k.shape
    direction = normal((batch, heads, 1, width), generator)
    direction /= direction.norm(dim=-1, keepdim=True)
    q += 4.0 * direction.repeat_interleave(q.shape[1] // heads, dim=1)
    # A needle's score is about log(S) + 3: it weighs e^3 times as much as all other keys together.
    size = (math.log(length) + 3.0) * width**0.5 / 4.0
    for _ in range(max(1, length // 128)):
        where = torch.randint(length, (batch, heads, 1, 1), generator=generator, device=q.device)
        where = where.expand(batch, heads, 1, width)
        k.scatter_(2, where, size * direction + 0.25 * normal(direction.shape, generator))
        v.scatter_(2, where, 4.0 * normal(direction.shape, generator))
