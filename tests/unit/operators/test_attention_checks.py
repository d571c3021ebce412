"""The checks of attention that no prompt names: a stable softmax passes with room, one that is careless does not."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.fmha import LONE_VALUE, VAST_SCORES
from pytest_klineage.operators.tolerance import Expected

SHAPES = [(1, 2, 32, 16), (2, 4, 130, 48)]
MARGIN = 3.0


def problem(shape: tuple[int, ...], name: str, *, causal: bool = False, seed: int = 3) -> Expected:
    case = make_case("fmha", shape, "fp32", "torch", causal=causal)
    found = operator_of(case).further_problem(case, name, torch.Generator().manual_seed(seed), {})
    assert not isinstance(found, str)
    expected: Expected = found[1]
    return expected


def scores_of(expected: Expected) -> torch.Tensor:
    q, k = expected.inputs["q"], expected.inputs["k"]
    return (q @ k.mT).mul_(float(q.shape[-1]) ** -0.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [VAST_SCORES, LONE_VALUE])
@pytest.mark.parametrize("shape", SHAPES)
def test_stable_softmax_passes_with_room(shape: tuple[int, ...], name: str, causal: bool) -> None:
    for seed in range(5):
        expected = problem(shape, name, causal=causal, seed=seed)
        q, k, v = (expected.inputs[one] for one in "qkv")
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert expected.errors({"o": o})["o"] < expected.bounds["o"] / MARGIN


@pytest.mark.parametrize("shape", SHAPES)
def test_exponents_of_doubles_end_below_these_scores(shape: tuple[int, ...]) -> None:
    expected = problem(shape, VAST_SCORES)
    weights = scores_of(expected).double().exp()
    o = (weights / weights.sum(-1, keepdim=True)) @ expected.inputs["v"].double()
    assert not expected.accepts({"o": o.float()})


def test_scores_of_every_size_occur() -> None:
    for seed in range(5):
        sizes = problem(SHAPES[0], VAST_SCORES, seed=seed).inputs["q"].norm(dim=-1).flatten().sort().values
        assert float(sizes[-1]) > 20 * float(sizes[0])
        # A factor between any two that lie some way apart, whatever a row's own length is.
        assert float((sizes[1:] / sizes[:-1]).max()) < 1.6


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_are_left_out_show(shape: tuple[int, ...]) -> None:
    expected = problem(shape, LONE_VALUE)
    weights = scores_of(expected).softmax(-1)
    for least, passes in ((1e-13, False), (1e-30, True)):
        o = weights.masked_fill(weights < least, 0.0) @ expected.inputs["v"]
        assert expected.accepts({"o": o}) == passes


def test_they_are_for_a_cpu_and_in_no_prompt() -> None:
    class Elsewhere:
        device = torch.device("cuda")

    case = make_case("fmha", SHAPES[0], "fp32", "torch")
    chosen = operator_of(case)
    assert chosen.further_names(case) == (VAST_SCORES, LONE_VALUE)
    assert not {VAST_SCORES, LONE_VALUE} & set(chosen.input_distributions)
    assert chosen.further_problem(case, LONE_VALUE, Elsewhere(), {}) == ""  # type: ignore[arg-type]
    half = make_case("fmha", SHAPES[0], "fp16", "torch")
    assert chosen.further_names(half) == (VAST_SCORES,)
