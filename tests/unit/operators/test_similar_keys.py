"""The checks of gdn that no prompt names: stable ways to compute it pass with room, a short series does not, nor does
a decay that is put off."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.gdn import (
    LARGE_BETA,
    LARGE_STATE,
    LEAST_LONE,
    LONE_GATES,
    MOST_LONE,
    PADDING,
    SIMILAR_KEYS,
)
from pytest_klineage.operators.gdn_chunked import GatedDeltaRule, chunked, joined, sequential
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase

SIZES = [(1, 3, 32, 16, 96), (2, 4, 64, 64, 192)]
MARGIN = 3.0


def problem(case: KernelCase, name: str = SIMILAR_KEYS) -> Expected:
    found = operator_of(case).further_problem(case, name, torch.Generator().manual_seed(3), {})
    assert not isinstance(found, str)
    expected: Expected = found[1]
    return expected


def single(case: KernelCase, expected: Expected) -> GatedDeltaRule:
    heads = case.shape["HV"] // case.shape["HQK"]
    q, k = (expected.inputs[name].repeat_interleave(heads, 1).transpose(0, 1) for name in "qk")
    v, g, beta = (expected.inputs[name].transpose(0, 1) for name in ("v", "g", "beta"))
    state = v.new_zeros(case.shape["HV"], case.shape["D"], case.shape["D"])
    return GatedDeltaRule(q=q, k=k, v=v, g=g, beta=beta, state=state, scale=case.shape["D"] ** -0.5)


def worst(expected: Expected, o: torch.Tensor, state: torch.Tensor) -> float:
    errors = expected.errors({"o": o.transpose(0, 1), "state": state})
    return max(errors[name] / expected.bounds[name] for name in errors)


@pytest.mark.parametrize("name", [SIMILAR_KEYS, LONE_GATES, PADDING, LARGE_BETA])
@pytest.mark.parametrize("shape", SIZES)
def test_stable_ways_pass_with_room(shape: tuple[int, ...], name: str) -> None:
    case = make_case("gdn", shape, "fp32", "torch")
    expected = problem(case, name)
    rule = single(case, expected)
    assert worst(expected, *sequential(rule)) < 1 / MARGIN
    for size in (8, 16, 32, 64):
        form = chunked(rule, size)
        assert worst(expected, joined(form.o, shape[-1]), form.state) < 1 / MARGIN


@pytest.mark.parametrize("shape", SIZES)
def test_nine_terms_of_a_series_do_not(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def series(lower: torch.Tensor, right: torch.Tensor, **_how: bool) -> torch.Tensor:
        found = right
        for _ in range(9):
            found = right - lower @ found
        return found

    case = make_case("gdn", shape, "fp32", "torch")
    expected = problem(case)
    monkeypatch.setattr(torch.linalg, "solve_triangular", series)
    form = chunked(single(case, expected), 16)
    assert worst(expected, joined(form.o, shape[-1]), form.state) > MARGIN


def test_it_is_for_single_precision_and_in_no_prompt() -> None:
    case = make_case("gdn", SIZES[0], "fp32", "torch")
    assert operator_of(case).further_names(case) == (SIMILAR_KEYS, LONE_GATES, PADDING, LARGE_BETA)
    assert SIMILAR_KEYS not in operator_of(case).input_distributions
    half = make_case("gdn", SIZES[0], "bf16", "torch")
    assert operator_of(half).further_names(half) == (LONE_GATES, PADDING, LARGE_BETA)


@pytest.mark.parametrize("seed", range(5))
def test_lone_gates_are_few_and_some_are_beyond_the_range(seed: int) -> None:
    case = make_case("gdn", (1, 3, 32, 16, 96), "fp32", "torch")
    found = operator_of(case).further_problem(case, LONE_GATES, torch.Generator().manual_seed(seed), {})
    assert not isinstance(found, str)
    g = found[0]["g"]
    strong = g < -20
    assert strong.sum(0).tolist() == [1, 1, 1]
    assert -MOST_LONE <= float(g[strong].min()) < -89
    assert float(g[strong].max()) <= -LEAST_LONE
    # Heads stay weak on average: who looks at that alone puts the decay off.
    assert bool((g.mean(0) > -2.2).all())


def test_one_token_alone_has_a_gate_too() -> None:
    case = make_case("gdn", (1, 2, 8, 4, 1), "fp32", "torch")
    assert bool((problem(case, LONE_GATES).inputs["g"] <= -LEAST_LONE).all())


def test_a_generator_on_a_gpu_gets_none() -> None:
    class Elsewhere:
        device = torch.device("cuda")

    case = make_case("gdn", SIZES[0], "fp32", "torch")
    assert operator_of(case).further_problem(case, LONE_GATES, Elsewhere(), {}) == ""  # type: ignore[arg-type]


def test_a_large_state_is_checked_where_there_is_one() -> None:
    case = make_case("gdn", SIZES[0], "fp32", "torch", initial_state=True)
    expected = problem(case, LARGE_STATE)
    assert float(expected.inputs["state0"].abs().max()) > 1e3
    baseline = operator_of(case).baseline_output(case, expected.inputs)
    assert all(error < expected.bounds[name] / MARGIN for name, error in expected.errors(baseline).items())
    clamped = {**expected.inputs, "state0": expected.inputs["state0"].clamp(-4, 4)}
    assert not expected.accepts(operator_of(case).baseline_output(case, clamped))
