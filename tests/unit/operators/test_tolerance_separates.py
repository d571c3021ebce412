"""The tolerance accepts naive fp32 arithmetic and careful low precision, and refuses downgrades and null models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.null_models import lint_case, null_models
from pytest_klineage.operators.tolerance import (
    SLACK,
    Expected,
    largest_error,
    output_rounding,
    summation_variance,
)
from pytest_klineage.records import KernelCase

Tensors: TypeAlias = dict[str, torch.Tensor]
MakeCase: TypeAlias = Callable[..., KernelCase]


def draw(case: KernelCase, input_distribution: str, seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), input_distribution)


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
    heads, length, width = case.shape["H"], case.shape["S"], case.shape["D"]
    q, k, v = (x[name].float().repeat_interleave(heads // x[name].shape[1], dim=1) for name in "qkv")
    scores = summed(width, lambda d: q[..., :, None, d] * k[..., None, :, d]) * width**-0.5
    if case.options.get("causal"):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores.masked_fill_((distance < 0) | (distance >= int(case.options.get("window", length))), float("-inf"))
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


def ratios(expected: Expected, actual: Tensors) -> dict[str, float]:
    """Errors over bounds: at most one is right."""
    return {name: error / (expected.bounds[name] or 1.0) for name, error in expected.errors(actual).items()}


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Ten bits of the fraction are left, rounded to nearest, ties away from zero."""
    return ((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


DOWNGRADES = {
    "tf32": to_tf32,
    "fp16": lambda tensor: tensor.half().float(),
    "bf16": lambda tensor: tensor.bfloat16().float(),
}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_naive_fp32_summation_is_right(key: str, input_distribution: str, dtype: str, small_case: MakeCase) -> None:
    case = small_case(key, dtype)
    inputs = draw(case, input_distribution)
    expected = Expected(OPERATORS[case.operator], case, inputs)
    types = {name: tensor.dtype for name, tensor in OPERATORS[case.operator].baseline_output(case, inputs).items()}
    actual = {name: tensor.to(types[name]) for name, tensor in NAIVE[case.operator](case, inputs).items()}
    # Half of the bound is left for the luck of other seeds and for longer sums.
    assert max(ratios(expected, actual).values()) <= 0.5


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_error_scale_models_the_baseline_error(
    rounded_key: str, input_distribution: str, dtype: str, small_case: MakeCase
) -> None:
    case = small_case(rounded_key, dtype)
    expected = Expected(OPERATORS[case.operator], case, draw(case, input_distribution))
    # Were the unit too small somewhere, the honest run's error there would loosen the bound everywhere.
    assert max(expected.bounds.values()) <= 3 * SLACK


@pytest.mark.parametrize("downgrade", DOWNGRADES)
def test_an_fp32_case_computed_from_rounded_inputs_is_wrong(
    rounded_key: str, downgrade: str, small_case: MakeCase
) -> None:
    case = small_case(rounded_key)
    operator, inputs = OPERATORS[case.operator], draw(case, "well_conditioned")
    low = {name: tensor if name in ("g", "beta") else DOWNGRADES[downgrade](tensor) for name, tensor in inputs.items()}
    for name, ratio in ratios(Expected(operator, case, inputs), operator.baseline_output(case, low)).items():
        assert ratio > 10, name


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_accumulating_in_low_precision_is_wrong(dtype: str, small_case: MakeCase) -> None:
    case = small_case("gemm", dtype)
    inputs = draw(case, "well_conditioned")
    total = torch.zeros(case.shape["M"], case.shape["N"], dtype=inputs["a"].dtype)
    for k in range(case.shape["K"]):
        total += inputs["a"][:, k, None] * inputs["b"][k]
    assert not Expected(OPERATORS["gemm"], case, inputs).accepts({"c": total})


def test_a_state_carried_in_low_precision_is_wrong(small_case: MakeCase) -> None:
    case = small_case("gdn", "fp32")
    inputs = draw(case, "well_conditioned")
    right = OPERATORS["gdn"].baseline_output(case, inputs)
    assert not Expected(OPERATORS["gdn"], case, inputs).accepts({**right, "state": right["state"].bfloat16().float()})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_null_models_are_wrong_for_every_distribution(
    key: str, input_distribution: str, dtype: str, small_case: MakeCase
) -> None:
    case = small_case(key, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case, input_distribution)
    expected, generator = Expected(operator, case, inputs), torch.Generator().manual_seed(5)
    assert expected.accepts(operator.baseline_output(case, inputs))
    other = operator.oracle(case, draw(case, input_distribution, seed=2))
    answers = dict(null_models(operator, case, inputs, other, generator))
    assert list(answers) == ["zeros", "constant", "passthrough", "previous", "shuffled"]
    assert [name for name, outputs in answers.items() if expected.accepts(outputs)] == []


def test_null_models_have_the_types_and_shapes_of_the_signature(key: str, small_case: MakeCase) -> None:
    case = small_case(key, "bf16")
    operator, inputs = OPERATORS[case.operator], draw(case, "well_conditioned")
    right = operator.baseline_output(case, inputs)
    for name, outputs in null_models(operator, case, inputs, right, torch.Generator()):
        assert {o: (t.shape, t.dtype) for o, t in outputs.items()} == {
            o: (t.shape, t.dtype) for o, t in right.items()
        }, name


def test_shipped_kinds_of_cases_are_scorable(key: str, small_case: MakeCase) -> None:
    case = small_case(key)
    assert lint_case(OPERATORS[case.operator], case, torch.Generator().manual_seed(3)) == []


def test_lint_finds_inputs_without_influence() -> None:
    # With one key the softmax is one: o = v, whatever q and k are, and the input v passes as the answer.
    case = make_case("fmha", (2, 2, 1, 8), "fp32", "torch")
    findings = lint_case(OPERATORS["fmha"], case, torch.Generator().manual_seed(3))
    assert "input q does not influence outputs" in findings
    assert "input k does not influence outputs" in findings
    assert "input v does not influence outputs" not in findings


def test_lint_finds_accepted_null_models(monkeypatch: pytest.MonkeyPatch, small_case: MakeCase) -> None:
    case = small_case("gdn")
    operator = OPERATORS["gdn"]
    generous = operator.error_scale

    def loose(*arguments: object) -> Tensors:
        return {name: unit + (1e9 if name == "state" else 0.0) for name, unit in generous(*arguments).items()}

    monkeypatch.setattr(type(operator), "error_scale", lambda self, *arguments: loose(*arguments))
    findings = lint_case(operator, case, torch.Generator().manual_seed(3))
    assert "zeros:state" in findings
    assert "zeros" not in findings


def test_lint_finds_an_oracle_that_overflows(monkeypatch: pytest.MonkeyPatch, small_case: MakeCase) -> None:
    case = small_case("gemm")
    operator = OPERATORS["gemm"]
    oracle = operator.oracle
    monkeypatch.setattr(
        type(operator), "oracle", lambda self, case, inputs: {"c": oracle(case, inputs)["c"].fill_(float("inf"))}
    )
    assert "oracle not finite" in lint_case(operator, case, torch.Generator().manual_seed(3))


class TestLargestError:
    unit = torch.ones(4, dtype=torch.float64)

    def error(self, actual: list[float], expected: list[float]) -> float:
        return largest_error(torch.tensor(actual), torch.tensor(expected, dtype=torch.float64), self.unit)

    def test_is_the_worst_element(self) -> None:
        assert self.error([1, 2, 3, 4.5], [1, 2.25, 3, 4]) == 0.5

    def test_same_non_finite_places_are_right(self) -> None:
        inf, nan = float("inf"), float("nan")
        assert self.error([inf, -inf, nan, 1.5], [inf, -inf, nan, 1]) == 0.5

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_where_finite_is_expected_is_infinitely_wrong(self, value: float) -> None:
        assert self.error([1, value, 3, 4], [1, 2, 3, 4]) == float("inf")
        assert self.error([1, 2, 3, 4], [1, value, 3, 4]) == float("inf")

    def test_the_other_infinity_is_infinitely_wrong(self) -> None:
        inf = float("inf")
        assert self.error([inf, 2, 3, 4], [-inf, 2, 3, 4]) == inf


def test_summation_variance_predicts_sequential_sums() -> None:
    # 2000 sums of 300 numbers with a mean: the error of sequential fp32 summation, in predicted standard deviations.
    terms = torch.randn(2000, 300, generator=torch.Generator().manual_seed(1)) + 0.5
    exact = terms.double().sum(1)
    total = torch.zeros(2000)
    for column in terms.T:
        total += column
    deviation = summation_variance(terms.double().square().sum(1), exact, 300).sqrt() * 2.0**-24
    spread = float(((total - exact) / deviation).square().mean().sqrt())
    # A rounding error is uniform within half a unit of a binade, a third to a sixth of the unit roundoff in the mean.
    assert 0.2 < spread < 0.7


@pytest.mark.parametrize(
    ("dtype", "name"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_output_rounding_bounds_normal_to_subnormal(dtype: str, name: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    smallest = torch.finfo(name).smallest_normal
    values = torch.randn(4000, generator=generator, dtype=torch.float64) * torch.tensor([1.0, smallest]).repeat(2000)
    error = (values.to(name).double() - values).abs() / output_rounding(dtype, values)
    assert 0.5 < float(error.max()) <= 1.0
