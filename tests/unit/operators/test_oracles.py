"""Oracles against independent definitions, and what the input distributions promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
import pytest
import torch

from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.fmha import BLOCK_ELEMENTS, blocks
from pytest_klineage.operators.gdn_chunked import GatedDeltaRule, chunked, joined, rounding_variance, sequential
from pytest_klineage.records import KernelCase

Tensors: TypeAlias = dict[str, torch.Tensor]
MakeCase: TypeAlias = Callable[..., KernelCase]


def draw(case: KernelCase, input_distribution: str, seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), input_distribution)


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal up to the order of float64 sums."""
    return first.dtype == second.dtype == torch.float64 and torch.allclose(first, second, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_inputs_and_answers_fit_the_signature(key: str, dtype: str, small_case: MakeCase) -> None:
    case = small_case(key, dtype)
    operator = OPERATORS[case.operator]
    inputs = draw(case, "well_conditioned")
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64}
    signature = operator.signature(case)
    baseline_output, oracle = operator.baseline_output(case, inputs), operator.oracle(case, inputs)
    assert list(inputs) == [spec.name for spec in signature.inputs]
    assert list(baseline_output) == list(oracle) == [spec.name for spec in signature.outputs]
    for spec, tensor in [(spec, inputs[spec.name]) for spec in signature.inputs] + [
        (spec, baseline_output[spec.name]) for spec in signature.outputs
    ]:
        assert tensor.shape == spec.shape
        assert tensor.dtype == names[spec.dtype]
    for spec in signature.outputs:
        assert oracle[spec.name].dtype == (torch.int64 if spec.dtype == "int64" else torch.float64)
        assert oracle[spec.name].shape == spec.shape


def test_the_generator_decides_every_number(key: str, small_case: MakeCase) -> None:
    case = small_case(key)
    for input_distribution in OPERATORS[case.operator].input_distributions:
        first, again, other = (
            draw(case, input_distribution, 1),
            draw(case, input_distribution, 1),
            draw(case, input_distribution, 2),
        )
        assert all(torch.equal(first[name], again[name]) for name in first), input_distribution
        assert all(not torch.equal(first[name], other[name]) for name in first), input_distribution


def test_no_input_is_trivial(key: str, small_case: MakeCase) -> None:
    # All zeros, all ones or all the same lets a kernel skip its work; all_equal differs between rows.
    case = small_case(key)
    for input_distribution in OPERATORS[case.operator].input_distributions:
        for name, tensor in draw(case, input_distribution).items():
            assert len(tensor.unique()) > 1, (input_distribution, name)


def test_gemm(small_case: MakeCase) -> None:
    case = small_case("gemm")
    x = draw(case, "spikes")
    a, b = x["a"].double(), x["b"].double()
    assert close(OPERATORS["gemm"].oracle(case, x)["c"], (a[:, :, None] * b[None]).sum(1))


@pytest.mark.parametrize(("stride", "pad", "size"), [(1, 0, 1), (1, 1, 3), (2, 1, 3), (3, 2, 4)])
def test_conv2d(stride: int, pad: int, size: int) -> None:
    case = make_case("conv2d", (2, 3, 9, 7, 4, size, stride, pad), "fp32", "torch")
    x = draw(case, "borders")
    image, w = x["x"].double(), x["w"].double()
    rows, columns = (9 + 2 * pad - size) // stride + 1, (7 + 2 * pad - size) // stride + 1
    y = torch.zeros(2, 4, rows, columns, dtype=torch.float64)
    for p in range(rows):
        for q in range(columns):
            for r in range(size):
                for s in range(size):
                    height, width = p * stride + r - pad, q * stride + s - pad
                    if 0 <= height < 9 and 0 <= width < 7:
                        y[:, :, p, q] += image[:, :, height, width] @ w[:, :, r, s].T
    assert close(OPERATORS["conv2d"].oracle(case, x)["y"], y)


@pytest.mark.parametrize(("stride", "pad", "size"), [(1, 2, 3), (3, 2, 4), (5, 0, 2), (2, 5, 2)])
def test_conv2d_is_perturbed_where_some_output_reads(stride: int, pad: int, size: int) -> None:
    case = make_case("conv2d", (1, 2, 6, 4, 3, 3, 1, 1), "fp32", "torch")
    # Past the check that less is padded than the filter is wide: outputs may lie wholly in the padding.
    case = msgspec.structs.replace(case, shape={**case.shape, "K": size, "stride": stride, "pad": pad})
    chosen, x = OPERATORS["conv2d"], draw(case, "well_conditioned")
    y = chosen.oracle(case, x)["y"]
    for seed in range(60):
        changed = chosen.perturb(case, x, torch.Generator().manual_seed(seed))
        assert sum(int((changed[name] != x[name]).sum()) for name in x) == 1
        assert not torch.equal(chosen.oracle(case, changed)["y"], y)


@pytest.mark.parametrize("causal", [False, True])
def test_fmha(causal: bool) -> None:
    case = make_case("fmha", (2, 3, 17, 8), "fp32", "torch", causal=causal)
    x = draw(case, "peaky")
    q, k, v = (x[name].double() for name in "qkv")
    o = torch.empty_like(q)
    for query in range(17):
        seen = query + 1 if causal else 17
        weights = torch.einsum("bhd,bhjd->bhj", q[:, :, query], k[:, :, :seen]).div(8**0.5).exp()
        o[:, :, query] = torch.einsum("bhj,bhjd->bhd", weights, v[:, :, :seen]) / weights.sum(-1, keepdim=True)
    assert close(OPERATORS["fmha"].oracle(case, x)["o"], o)


def test_fmha_with_a_window_and_shared_key_heads() -> None:
    case = make_case("fmha", (2, 4, 40, 8), "fp32", "torch", causal=True, window=16, group=2)
    x = draw(case, "peaky")
    assert x["k"].shape == x["v"].shape == (2, 2, 40, 8)
    q, o = x["q"].double(), torch.empty(2, 4, 40, 8, dtype=torch.float64)
    for head in range(4):
        k, v = (x[name][:, head // 2].double() for name in "kv")
        for query in range(40):
            seen = slice(max(0, query - 15), query + 1)
            weights = torch.einsum("bd,bjd->bj", q[:, head, query], k[:, seen]).div(8**0.5).exp()
            o[:, head, query] = torch.einsum("bj,bjd->bd", weights, v[:, seen]) / weights.sum(-1, keepdim=True)
    assert close(OPERATORS["fmha"].oracle(case, x)["o"], o)


def test_fmha_works_in_blocks_of_heads() -> None:
    length = int((BLOCK_ELEMENTS / 2) ** 0.5)
    x = torch.arange(2 * 5).view(2, 5, 1, 1).expand(2, 5, length, 1)
    seen = [part.flatten(1)[:, 0].tolist() for (part,) in blocks(x)]
    assert seen == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]


def test_fmha_repeats_a_shared_key_head_per_query_head() -> None:
    length = int((BLOCK_ELEMENTS / 3) ** 0.5)
    q = torch.zeros(1, 4, 1, 1).expand(1, 4, length, 1)
    k = torch.tensor([7, 8]).view(1, 2, 1, 1).expand(1, 2, length, 1)
    seen = [part.flatten(1)[:, 0].tolist() for (_q, part) in blocks(q, k)]
    assert seen == [[7, 7, 8], [8]]


def test_fmha_needles_dominate_and_lie_anywhere() -> None:
    case = make_case("fmha", (1, 4, 256, 32), "fp32", "torch")
    x = draw(case, "needles")
    weights = (x["q"].double() @ x["k"].double().transpose(-1, -2) / 32**0.5).softmax(-1)
    heaviest = weights.mean(2).topk(2, dim=-1)
    assert bool((heaviest.values.sum(-1) > 0.6).all())
    assert int(heaviest.indices.max()) > 128
    assert int(heaviest.indices.min()) < 128


def gdn_problem(tokens: int, input_distribution: str, initial_state: bool = True) -> GatedDeltaRule:
    case = make_case("gdn", (2, 4, 16, 16, tokens), "fp32", "torch", initial_state=initial_state)
    return OPERATORS["gdn"]._problem(case, draw(case, input_distribution), torch.float64)


@pytest.mark.parametrize("input_distribution", OPERATORS["gdn"].input_distributions)
@pytest.mark.parametrize(("tokens", "size"), [(192, 64), (100, 64), (7, 64), (50, 1), (64, 13)])
def test_gdn_chunk_form_equals_the_recurrence(tokens: int, size: int, input_distribution: str) -> None:
    problem = gdn_problem(tokens, input_distribution)
    o, state = sequential(problem)
    form = chunked(problem, size)
    scale = float(problem.v.abs().max())
    assert close(joined(form.o, tokens) / scale, o / scale)
    assert close(form.state / scale, state / scale)


def test_gdn_of_many_heads_is_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("gdn", (5, 10, 16, 16, 64), "bf16", "torch", initial_state=True)
    operator, inputs = OPERATORS["gdn"], draw(case, "well_conditioned")

    def answers() -> list[torch.Tensor]:
        expected = operator.oracle(case, inputs)
        found = (expected, operator.baseline_output(case, inputs), operator.error_scale(case, inputs, expected))
        return [tensor for outputs in found for tensor in outputs.values()]

    whole, sizes = answers(), list[int]()
    evaluate = OPERATORS["gdn"]._problem
    monkeypatch.setattr("pytest_klineage.operators.gdn.AT_ONCE", 64 * 16 * 2 * 2)
    monkeypatch.setattr(operator, "_problem", lambda own, *rest: sizes.append(own.shape["HV"]) or evaluate(own, *rest))
    assert all(torch.equal(one, other) for one, other in zip(answers(), whole, strict=True))
    assert sizes == [4, 4, 2] * 3


def test_gdn_oracle_above_and_below_the_switch_agree(monkeypatch: pytest.MonkeyPatch, small_case: MakeCase) -> None:
    case = small_case("gdn-state")
    x = draw(case, "strong_gates")
    below = OPERATORS["gdn"].oracle(case, x)
    monkeypatch.setattr("pytest_klineage.operators.gdn.SEQUENTIAL_TOKENS", 0)
    above = OPERATORS["gdn"].oracle(case, x)
    assert all(close(above[name], below[name]) for name in below)


def test_gdn_by_hand() -> None:
    case = make_case("gdn", (1, 1, 2, 64, 2), "fp32", "torch")
    x = {
        "q": torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]]]),
        "k": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]),
        "v": torch.tensor([[[2.0, 4.0]], [[1.0, -1.0]]]),
        "g": torch.tensor([[0.0], [-0.5]]),
        "beta": torch.tensor([[0.5], [1.0]]),
    }
    fade = float(torch.tensor(-0.5, dtype=torch.float64).exp())
    answer = OPERATORS["gdn"].oracle(case, x)
    # First token: u = (1, 2) in row 0. Second: it fades, and row 1 becomes v.
    expected = torch.tensor([[fade, 2 * fade], [1.0, -1.0]], dtype=torch.float64)
    assert close(answer["state"][0], expected)
    assert close(answer["o"][0, 0], torch.tensor([1.0, 2.0], dtype=torch.float64) / 2**0.5)
    q = x["q"][1, 0].double()
    assert close(answer["o"][1, 0], q @ expected / 2**0.5)


@pytest.mark.parametrize("input_distribution", ["well_conditioned", "gates_near_zero"])
def test_gdn_error_model_follows_measured_errors(input_distribution: str) -> None:
    # Float32 against float64: the mean square error in predicted variances, by output.
    ratios = []
    for seed in range(4):
        case = make_case("gdn", (1, 3, 32, 64, 256), "fp32", "torch")
        x = draw(case, input_distribution, seed)
        problem = OPERATORS["gdn"]._problem(case, x, torch.float64)
        o, state = sequential(problem)
        baseline_output = OPERATORS["gdn"].baseline_output(case, x)
        model = rounding_variance(chunked(problem, 64), product=32 * 2.0**-48, fp32=2.0**-48)
        measured = (baseline_output["o"].transpose(0, 1) - o).square(), (baseline_output["state"] - state).square()
        ratios.append([float((m / p).mean()) for m, p in zip(measured, (joined(model[0], 256), model[1]), strict=True)])
    # Rounding errors spread evenly up to half a unit in the last place: a fifth to a quarter of the unit roundoff.
    for ratio in torch.tensor(ratios).mean(0).sqrt().tolist():
        assert 0.1 < ratio < 0.4


def test_gdn_input_distributions() -> None:
    case = make_case("gdn", (2, 8, 16, 16, 64), "fp32", "torch")
    default = draw(case, "well_conditioned")
    assert int((default["g"] == 0).all(0).sum()) == 2
    assert float(default["g"].max()) <= 0
    assert torch.allclose(default["k"].norm(dim=-1), torch.ones(64, 2))
    strong = draw(case, "strong_gates")["g"]
    assert bool((strong[:, 0] == 0).all())
    assert float(strong[:, -1].mean()) < -16
    near = draw(case, "gates_near_zero")["g"]
    assert -1e-3 < float(near.min()) < float(near.max()) <= 0
