"""Symmetry transforms are new bytes of the same problem; a nudge of one element always shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.distributions import permutation, perturbed
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase

Tensors: TypeAlias = dict[str, torch.Tensor]
MakeCase: TypeAlias = Callable[..., KernelCase]


def draw(case: KernelCase, input_distribution: str, seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), input_distribution)


SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def identical(first: torch.Tensor, second: torch.Tensor) -> bool:
    """The same bytes: zeros of different sign differ."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def solve_transformed(case: KernelCase, inputs: Tensors, seed: int) -> tuple[Tensors, Tensors, Tensors]:
    """The transformed inputs, the right answer to them, and that answer undone; all in the case's types."""
    operator = OPERATORS[case.operator]
    transformed, undo = operator.symmetry_transform(case, inputs, torch.Generator().manual_seed(seed))
    answer = operator.baseline_output(case, transformed)
    return transformed, answer, undo(answer)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_transformed_problem_has_the_same_answer(
    key: str, input_distribution: str, dtype: str, small_case: MakeCase
) -> None:
    case = small_case(key, dtype)
    inputs = draw(case, input_distribution)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    expected = Expected(OPERATORS[case.operator], case, inputs)
    transformed, answer, undone = solve_transformed(case, inputs, seed=11)
    assert list(transformed) == list(inputs)
    for name, tensor in inputs.items():
        assert identical(tensor, before[name]), f"{name} was changed"
        assert transformed[name].shape == tensor.shape
        assert transformed[name].dtype == tensor.dtype
        assert not identical(transformed[name], tensor), name
    assert expected.accepts(undone)
    assert not expected.accepts(answer), "the answer to the disguised problem must not be right for the original"


def test_two_symmetry_transforms_differ(key: str, small_case: MakeCase) -> None:
    case = small_case(key)
    inputs = draw(case, "well_conditioned")
    generator = torch.Generator().manual_seed(1)
    first, second = (OPERATORS[case.operator].symmetry_transform(case, inputs, generator)[0] for _ in range(2))
    assert all(not identical(first[name], second[name]) for name in inputs)


def test_the_symmetry_transform_is_exact(key: str, small_case: MakeCase) -> None:
    case = small_case(key)
    operator, inputs = OPERATORS[case.operator], draw(case, "well_conditioned")
    transformed, undo = operator.symmetry_transform(case, inputs, torch.Generator().manual_seed(4))
    original, undone = operator.oracle(case, inputs), undo(operator.oracle(case, transformed))
    if operator.exact:
        assert operator.mismatch_count(case, inputs, original, {**undone, "values": undone["values"].float()}) == {
            "values": 0,
            "indices": 0,
        }
        return
    for name, output in original.items():
        # Only the order of float64 sums differs.
        assert float((undone[name] - output).abs().max() / output.abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_perturbation_changes_one_element_and_shows(
    key: str, input_distribution: str, dtype: str, small_case: MakeCase
) -> None:
    case = small_case(key, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case, input_distribution)
    unchanged = operator.baseline_output(case, inputs)
    for seed in range(6):
        changed = operator.perturb(case, inputs, torch.Generator().manual_seed(seed))
        assert sum(int((changed[name] != tensor).sum()) for name, tensor in inputs.items()) == 1
        expected = Expected(operator, case, changed)
        assert (
            all(bool(output.isfinite().all()) for output in expected.outputs.values())
            or input_distribution == "infinities"
        )
        worst = max(error / (expected.bounds[name] or 1.0) for name, error in expected.errors(unchanged).items())
        assert worst >= (1 if operator.exact else 3)


@SETTINGS
@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 999))
def test_gemm_symmetry_at_any_shape(shape: tuple[int, int, int], seed: int) -> None:
    check_any(make_case("gemm", shape, "fp32", "torch"), seed)


@SETTINGS
@given(
    st.tuples(
        *[st.integers(1, 4)] * 2, *[st.integers(3, 8)] * 2, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)
    ),
    st.booleans(),
    st.integers(0, 999),
)
def test_conv2d_symmetry_and_perturbation_at_any_shape(shape: tuple[int, ...], padded: bool, seed: int) -> None:
    pad = shape[5] - 1 if padded else 0
    check_any(make_case("conv2d", (*shape, pad), "fp32", "torch"), seed)


@SETTINGS
@given(st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 9), st.integers(1, 8)), st.booleans(), st.integers(0, 999))
def test_fmha_symmetry_at_any_shape(shape: tuple[int, ...], causal: bool, seed: int) -> None:
    check_any(make_case("fmha", shape, "fp32", "torch", causal=causal), seed)


@SETTINGS
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 8)),
    st.sampled_from([1, 2, 4]), st.sampled_from([0, 16, 128]), st.integers(0, 999),
)  # fmt: skip
def test_fmha_symmetry_with_shared_heads_and_a_window(
    shape: tuple[int, ...], group: int, window: int, seed: int
) -> None:
    batch, heads, length, width = shape
    check_any(
        make_case(
            "fmha", (batch, heads * group, length, width), "fp32", "torch", causal=True, group=group, window=window
        ),
        seed,
    )


@SETTINGS
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 7), st.integers(1, 20)),
    st.booleans(),
    st.integers(0, 999),
)
def test_gdn_symmetry_at_any_shape(sizes: tuple[int, ...], initial_state: bool, seed: int) -> None:
    key_heads, group, *rest = sizes
    check_any(
        make_case("gdn", (key_heads, key_heads * group, *rest), "fp32", "torch", initial_state=initial_state), seed
    )


def check_any(case: KernelCase, seed: int) -> None:
    operator, inputs = OPERATORS[case.operator], draw(case, "well_conditioned", seed)
    expected = Expected(operator, case, inputs)
    assert expected.accepts(solve_transformed(case, inputs, seed)[2])
    perturb = operator.perturb(case, inputs, torch.Generator().manual_seed(seed))
    assert not expected.accepts(operator.baseline_output(case, perturb))


@given(st.integers(1, 6), st.integers(1, 30), st.data())
@SETTINGS
def test_topk_symmetry_at_any_shape_and_distribution(rows: int, columns: int, data: st.DataObject) -> None:
    case = make_case("topk", (rows, columns, data.draw(st.integers(1, columns))), "fp32", "torch")
    operator, input_distribution = OPERATORS["topk"], data.draw(st.sampled_from(OPERATORS["topk"].input_distributions))
    seed = data.draw(st.integers(0, 999))
    inputs = draw(case, input_distribution, seed)
    expected = Expected(operator, case, inputs)
    assert expected.accepts(operator.baseline_output(case, inputs))
    assert expected.accepts(solve_transformed(case, inputs, seed)[2])
    perturb = operator.perturb(case, inputs, torch.Generator().manual_seed(seed))
    assert not Expected(operator, case, perturb).accepts(operator.baseline_output(case, inputs))


def test_a_permutation_is_never_the_identity() -> None:
    like = torch.zeros(1)
    for seed in range(40):
        order, back = permutation(2, torch.Generator().manual_seed(seed), like)
        assert order.tolist() == [1, 0]
        assert order[back].tolist() == [0, 1]
    assert permutation(1, torch.Generator(), like)[0].tolist() == [0]


def test_perturbed_exceeds_the_largest_element() -> None:
    values = torch.tensor([[1.0, -3.0], [2.0, 0.0]])
    assert perturbed(values, (0, 0)).tolist() == [[-4.0, -3.0], [2.0, 0.0]]
    assert perturbed(values, (0, 1), factor=2.0).tolist() == [[1.0, 7.0], [2.0, 0.0]]
    assert values.tolist() == [[1.0, -3.0], [2.0, 0.0]]
