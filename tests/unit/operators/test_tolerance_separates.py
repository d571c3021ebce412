"""The tolerance accepts naive fp32 arithmetic and honest low precision, and refuses downgrades and null models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.gdn_chunked import sequential
from pytest_klineage.operators.null_models import lint_case, null_models
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase

Tensors = dict[str, torch.Tensor]

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, bool | str]]] = {
    "gemm": ((48, 40, 384), {}),
    "conv2d": ((2, 24, 13, 11, 20, 3, 2, 1), {}),
    "fmha": ((2, 2, 160, 32), {}),
    "fmha-causal": ((1, 3, 96, 32), {"causal": True}),
    "topk": ((6, 200, 25), {}),
    "gdn": ((2, 4, 32, 16, 200), {}),
    "gdn-state": ((1, 4, 16, 32, 70), {"initial_state": True}),
}


def small_case(key: str, dtype: str = "fp32") -> KernelCase:
    shape, options = SHAPES[key]
    return make_case(key.partition("-")[0], shape, dtype, "torch", **options)


def draw(case: KernelCase, regime: str, seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), regime)


def regimes(keys: dict[str, object] = SHAPES) -> list[tuple[str, str]]:
    return [(key, regime) for key in keys for regime in OPERATORS[key.partition("-")[0]].regimes]


def summed(count: int, term: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Terms added one after the other in fp32: what a kernel without any blocking computes."""
    total = torch.zeros_like(term(0))
    for index in range(count):
        total += term(index)
    return total


def naive_gemm(case: KernelCase, x: Tensors) -> Tensors:
    a, b = x["a"].float(), x["b"].float()
    return {"c": summed(a.shape[1], lambda k: a[:, k, None] * b[k])}


def naive_conv2d(case: KernelCase, x: Tensors) -> Tensors:
    stride, pad, size = (case.shape[axis] for axis in ("stride", "pad", "K"))
    image, filters = torch.nn.functional.pad(x["x"].float(), (pad,) * 4), x["w"].float()
    rows, columns = ((image.shape[axis] - size) // stride + 1 for axis in (2, 3))

    def term(index: int) -> torch.Tensor:
        channel, row, column = index // size**2, index // size % size, index % size
        seen = image[:, channel, row : row + rows * stride : stride, column : column + columns * stride : stride]
        return seen[:, None, :rows, :columns] * filters[None, :, channel, row, column, None, None]

    return {"y": summed(case.shape["C"] * size**2, term)}


def naive_fmha(case: KernelCase, x: Tensors) -> Tensors:
    q, k, v = (x[name].float() for name in "qkv")
    length, width = case.shape["S"], case.shape["D"]
    scores = summed(width, lambda d: q[..., :, None, d] * k[..., None, :, d]) * width**-0.5
    if case.options.get("causal"):
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    total = summed(length, lambda j: weights[..., j, None])
    return {"o": summed(length, lambda j: weights[..., j, None] * v[..., j, None, :]) / total}


def naive_topk(case: KernelCase, x: Tensors) -> Tensors:
    values, indices = x["x"].sort(dim=1, descending=True)
    return {"values": values[:, : case.shape["K"]], "indices": indices[:, : case.shape["K"]]}


def naive_gdn(case: KernelCase, x: Tensors) -> Tensors:
    key_heads, heads, width, _chunk, tokens = case.shape.values()
    q, k = (x[name].float().repeat_interleave(heads // key_heads, dim=1) for name in "qk")
    state = x["state0"].clone() if "state0" in x else torch.zeros(heads, width, width)
    o = torch.empty(tokens, heads, width)
    for t in range(tokens):
        state *= x["g"][t].exp()[:, None, None]
        read = (state * k[t, :, :, None]).cumsum(1)[:, -1]
        update = (x["v"][t].float() - read) * x["beta"][t, :, None]
        state += k[t, :, :, None] * update[:, None, :]
        o[t] = (state * q[t, :, :, None]).cumsum(1)[:, -1] * width**-0.5
    return {"o": o, "state": state}


NAIVE = {"gemm": naive_gemm, "conv2d": naive_conv2d, "fmha": naive_fmha, "topk": naive_topk, "gdn": naive_gdn}


def rounded(case: KernelCase, outputs: Tensors) -> Tensors:
    """Outputs in the types of the case's signature."""
    right = OPERATORS[case.operator].honest(case, draw(case, "well_conditioned"))
    return {name: output.to(right[name].dtype) for name, output in outputs.items()}


def ratios(expected: Expected, actual: Tensors) -> dict[str, float]:
    """Errors over bounds: at most one is right."""
    return {name: error / (expected.bounds[name] or 1.0) for name, error in expected.errors(actual).items()}


def downgraded(inputs: Tensors, dtype: str) -> Tensors:
    """fp32 inputs as a kernel sees them that rounds them on the way in. TF32 keeps ten bits of the fraction."""

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        if dtype == "tf32":
            return ((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
        return tensor.to(getattr(torch, dtype)).float()

    return {name: lower(tensor) if name not in ("g", "beta", "state0") else tensor for name, tensor in inputs.items()}
