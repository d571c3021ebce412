"""The three phases of the gated delta rule: one after another they are gdn; each against its definition; tolerances."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.gdn_phases import in_chunks, joined, lower_system
from pytest_klineage.operators.null_models import lint_case, null_models
from pytest_klineage.operators.tolerance import SLACK, Expected
from pytest_klineage.records import KernelCase

Tensors: TypeAlias = dict[str, torch.Tensor]

SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, bool]]] = {
    "cumsum": ("gdn_cumsum", (6, 16, 150), {}),
    "kkt_solve": ("gdn_kkt_solve", (2, 6, 16, 16, 150), {}),
    "fused_fwd": ("gdn_fused_fwd", (2, 6, 16, 16, 150), {}),
    "fused_fwd-state": ("gdn_fused_fwd", (1, 4, 32, 32, 70), {"initial_state": True}),
}
"""Small and awkward: chunks that are not full, several heads to a phase head."""
KEYS = [(phase, dtype) for phase, (name, *_) in SHAPES.items() for dtype in OPERATORS[name].dtypes]
DISTRIBUTIONS = [
    (phase, dtype, input_distribution)
    for phase, dtype in KEYS
    for input_distribution in OPERATORS[SHAPES[phase][0]].input_distributions
]
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def small(phase: str, dtype: str = "fp32") -> KernelCase:
    name, shape, options = SHAPES[phase]
    return make_case(name, shape, dtype, "torch", **options)


def draw(case: KernelCase, input_distribution: str = "well_conditioned", seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), input_distribution)


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal up to the order of float64 sums."""
    return first.dtype == second.dtype == torch.float64 and torch.allclose(first, second, rtol=1e-10, atol=1e-12)


# --- definitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("input_distribution", OPERATORS["gdn"].input_distributions)
@pytest.mark.parametrize("state", [False, True])
def test_the_phases_after_one_another_are_gdn(input_distribution: str, state: bool) -> None:
    whole = make_case("gdn", (2, 4, 16, 16, 150), "fp32", "torch", initial_state=state)
    inputs = {name: tensor.double() for name, tensor in draw(whole, input_distribution).items()}
    shape = (2, 4, 16, 16, 150)
    cumsum, solve = (
        make_case("gdn_cumsum", (4, 16, 150), "fp32", "torch"),
        make_case("gdn_kkt_solve", shape, "fp32", "torch"),
    )
    last = make_case("gdn_fused_fwd", shape, "fp32", "torch", initial_state=state)
    inputs |= OPERATORS["gdn_cumsum"].oracle(cumsum, inputs)
    inputs |= OPERATORS["gdn_kkt_solve"].oracle(solve, inputs)
    answer, expected = OPERATORS["gdn_fused_fwd"].oracle(last, inputs), OPERATORS["gdn"].oracle(whole, inputs)
    scale = float(inputs["v"].abs().max())
    assert all(close(answer[name] / scale, expected[name] / scale) for name in expected)


def test_cumsum_restarts_at_every_chunk() -> None:
    case = make_case("gdn_cumsum", (1, 2, 5), "fp32", "torch")
    g = torch.tensor([[-1.0], [-2.0], [-4.0], [-8.0], [-16.0]])
    expected = torch.tensor([[-1.0], [-3.0], [-4.0], [-12.0], [-16.0]], dtype=torch.float64)
    assert torch.equal(OPERATORS["gdn_cumsum"].oracle(case, {"g": g})["gc"], expected)


@pytest.mark.parametrize("input_distribution", OPERATORS["gdn_kkt_solve"].input_distributions)
def test_the_inverse_inverts(input_distribution: str) -> None:
    case = small("kkt_solve")
    x = draw(case, input_distribution)
    inverse = in_chunks(OPERATORS["gdn_kkt_solve"].oracle(case, x)["inverse"], 16)
    keys = in_chunks(x["k"].double(), 16).repeat_interleave(3, dim=1)
    system = lower_system(keys, in_chunks(x["gc"].double(), 16, repeat_last=True), in_chunks(x["beta"].double(), 16))
    product = inverse @ (system + torch.eye(16, dtype=torch.float64))
    # Six tokens of the last chunk are there: the other rows of its inverse are not among the outputs.
    assert close(product[:-1], torch.eye(16, dtype=torch.float64).expand_as(product[:-1]))
    assert close(product[-1, :, :6], torch.eye(16, dtype=torch.float64)[:6].expand_as(product[-1, :, :6]))
    assert torch.equal(inverse, inverse.tril())


def test_kkt_solve_by_hand() -> None:
    case = make_case("gdn_kkt_solve", (1, 2, 2, 4, 2), "fp32", "torch")
    x = {
        "k": torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]]]),
        "gc": torch.tensor([[-0.25, 0.0], [-0.75, 0.0]]),
        "beta": torch.tensor([[0.9, 0.9], [0.5, 0.25]]),
    }
    below = -0.5 * 0.6 * float(torch.tensor(-0.5, dtype=torch.float64).exp())
    inverse = OPERATORS["gdn_kkt_solve"].oracle(case, x)["inverse"]
    assert inverse.shape == (2, 2, 4)
    assert torch.allclose(inverse[1, 0], torch.tensor([below, 1.0, 0.0, 0.0], dtype=torch.float64), atol=1e-7)
    assert torch.allclose(inverse[1, 1], torch.tensor([-0.15, 1.0, 0.0, 0.0], dtype=torch.float64), atol=1e-7)
    assert torch.equal(inverse[0], torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(2, 4))


def test_chunks_are_filled_with_zeros_or_the_last_token() -> None:
    tensor = torch.arange(1.0, 6.0).view(5, 1)
    assert in_chunks(tensor, 3).flatten().tolist() == [1, 2, 3, 4, 5, 0]
    assert in_chunks(tensor, 3, repeat_last=True).flatten().tolist() == [1, 2, 3, 4, 5, 5]
    assert torch.equal(joined(in_chunks(tensor, 3), 5), tensor)


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "dtype"), KEYS)
def test_inputs_and_answers_fit_the_signature(phase: str, dtype: str) -> None:
    case = small(phase, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case)
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    signature = operator.signature(case)
    baseline_output, oracle = operator.baseline_output(case, inputs), operator.oracle(case, inputs)
    assert list(inputs) == [spec.name for spec in signature.inputs]
    assert list(baseline_output) == list(oracle) == [spec.name for spec in signature.outputs]
    for specs, tensors in ((signature.inputs, inputs), (signature.outputs, baseline_output)):
        for spec in specs:
            assert (tensors[spec.name].shape, tensors[spec.name].dtype) == (spec.shape, names[spec.dtype])
            assert tensors[spec.name].is_contiguous()
    assert all(
        (oracle[spec.name].dtype, oracle[spec.name].shape) == (torch.float64, spec.shape) for spec in signature.outputs
    )


@pytest.mark.parametrize("phase", SHAPES)
def test_the_generator_decides_every_number_and_none_is_trivial(phase: str) -> None:
    case = small(phase)
    for input_distribution in OPERATORS[case.operator].input_distributions:
        first, again, other = (
            draw(case, input_distribution, 1),
            draw(case, input_distribution, 1),
            draw(case, input_distribution, 2),
        )
        assert all(torch.equal(first[name], again[name]) for name in first), input_distribution
        assert all(not torch.equal(first[name], other[name]) for name in first), input_distribution
        assert all(len(tensor.unique()) > 1 for tensor in first.values()), input_distribution


def test_input_distributions_keep_their_promises() -> None:
    case = make_case("gdn_kkt_solve", (2, 8, 32, 16, 64), "fp32", "torch")
    sums = draw(case, "strong_gates")["gc"]
    assert bool((sums[:, 0] == 0).all())
    assert float(sums[15::16, -1].max()) < -16 * 8
    assert float(draw(case, "gates_near_zero")["gc"].min()) > -0.01
    keys = draw(case, "alike_keys")["k"][:, 0]
    assert 0.6 < float((keys @ keys.T).mean()) < 0.95
    assert torch.allclose(keys.norm(dim=-1), torch.ones(64))


@pytest.mark.parametrize("name", ["gdn_kkt_solve", "gdn_fused_fwd"])
def test_sizes_and_types_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: HV = 3 must be a multiple of HQK = 2"):
        make_case(name, (2, 3, 8, 8, 8), "fp32", "torch")
    with pytest.raises(UnknownName, match="fp32"):
        make_case("gdn_cumsum", (3, 8, 8), "bf16", "torch")


@pytest.mark.parametrize(
    ("phase", "flops", "bytes_moved"),
    [
        ("cumsum", 150 * 6, 2 * 150 * 6 * 4),
        ("kkt_solve", 150 * 16 * (2 * 16 + 6 * 16 / 3), 150 * (2 * 16 + 2 * 6 + 6 * 16) * 4),
        ("fused_fwd", 150 * 16 * (6 * (96 + 32) + 2 * 16), 150 * (4 * 16 + 12 * 16 + 6 * 16 + 12) * 4 + 6 * 256 * 4),
    ],
)
def test_costs(phase: str, flops: float, bytes_moved: float) -> None:
    case = small(phase)
    assert OPERATORS[case.operator].flops(case) == flops
    assert OPERATORS[case.operator].min_bytes(case) == bytes_moved


# --- tolerance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "dtype", "input_distribution"), DISTRIBUTIONS)
def test_error_scale_models_the_baseline_and_null_models_fail(phase: str, dtype: str, input_distribution: str) -> None:
    case = small(phase, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case, input_distribution)
    expected = Expected(operator, case, inputs)
    assert max(expected.bounds.values()) <= 3 * SLACK
    assert expected.accepts(operator.baseline_output(case, inputs))
    other = operator.oracle(case, draw(case, input_distribution, seed=2))
    answers = dict(null_models(operator, case, inputs, other, torch.Generator().manual_seed(5)))
    assert len(answers) == 5
    assert [name for name, outputs in answers.items() if expected.accepts(outputs)] == []


@pytest.mark.parametrize(("phase", "dtype"), KEYS)
def test_shipped_kinds_of_cases_are_scorable(phase: str, dtype: str) -> None:
    case = small(phase, dtype)
    assert lint_case(OPERATORS[case.operator], case, torch.Generator().manual_seed(3)) == []


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    return ((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.mark.parametrize("phase", SHAPES)
def test_an_fp32_case_computed_from_rounded_inputs_is_wrong(phase: str) -> None:
    case = small(phase)
    operator, inputs = OPERATORS[case.operator], draw(case)
    kept = () if phase == "cumsum" else ("gc", "beta")
    low = {name: tensor if name in kept else to_tf32(tensor) for name, tensor in inputs.items()}
    expected = Expected(operator, case, inputs)
    for name, error in expected.errors(operator.baseline_output(case, low)).items():
        assert error > 10 * expected.bounds[name], name


def test_powers_of_the_system_are_wrong_where_keys_are_alike() -> None:
    # (I - A)(I + A^2)(I + A^4)… is the inverse as well; its terms grow before they cancel.
    case = small("kkt_solve")
    x = draw(case, "alike_keys")
    keys = in_chunks(x["k"], 16).repeat_interleave(3, dim=1)
    power = -lower_system(keys, in_chunks(x["gc"], 16, repeat_last=True), in_chunks(x["beta"], 16))
    inverse = torch.eye(16) + power
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    expected = Expected(OPERATORS["gdn_kkt_solve"], case, x)
    assert not expected.accepts({"inverse": joined(inverse, 150)})


def test_blocks_in_half_precision_are_right_in_bf16() -> None:
    # What tensor cores do: diagonal blocks by substitution in fp32, everything below by fp16 operands.
    case = make_case("gdn_kkt_solve", (1, 3, 64, 32, 96), "bf16", "torch")
    for input_distribution in OPERATORS["gdn_kkt_solve"].input_distributions:
        x = draw(case, input_distribution)
        keys = in_chunks(x["k"].float(), 32).repeat_interleave(3, dim=1)
        system = lower_system(keys, in_chunks(x["gc"], 32, repeat_last=True), in_chunks(x["beta"], 32))
        eye = torch.eye(16)
        first, second = (
            torch.linalg.solve_triangular(block, eye.expand_as(block), upper=False, unitriangular=True).half().float()
            for block in (system[..., :16, :16], system[..., 16:, 16:])
        )
        corner = (system[..., 16:, :16].half().float() @ first).neg().half().float()
        inverse = torch.zeros_like(system)
        inverse[..., :16, :16], inverse[..., 16:, 16:], inverse[..., 16:, :16] = first, second, second @ corner
        expected = Expected(OPERATORS["gdn_kkt_solve"], case, x)
        assert expected.errors({"inverse": joined(inverse, 96).bfloat16()})["inverse"] < 0.5 * SLACK, input_distribution


@pytest.mark.parametrize("phase", ["fused_fwd", "fused_fwd-state"])
def test_a_state_carried_in_low_precision_is_wrong(phase: str) -> None:
    case = small(phase)
    inputs = draw(case)
    right = OPERATORS["gdn_fused_fwd"].baseline_output(case, inputs)
    rounded = {**right, "state": right["state"].bfloat16().float()}
    assert not Expected(OPERATORS["gdn_fused_fwd"], case, inputs).accepts(rounded)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_forgotten_beta_or_decay_is_wrong(dtype: str) -> None:
    case = small("fused_fwd", dtype)
    operator, inputs = OPERATORS["gdn_fused_fwd"], draw(case)
    expected = Expected(operator, case, inputs)
    for name, instead in (("beta", torch.ones_like), ("gc", torch.zeros_like)):
        assert not expected.accepts(operator.baseline_output(case, {**inputs, name: instead(inputs[name])})), name


# --- symmetries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "dtype", "input_distribution"), DISTRIBUTIONS)
def test_a_transformed_problem_has_the_same_answer(phase: str, dtype: str, input_distribution: str) -> None:
    case = small(phase, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case, input_distribution)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    transformed, undo = operator.symmetry_transform(case, inputs, torch.Generator().manual_seed(11))
    assert list(transformed) == list(inputs)
    for name, tensor in inputs.items():
        assert torch.equal(tensor, before[name]), f"{name} was changed"
        assert (transformed[name].shape, transformed[name].dtype) == (tensor.shape, tensor.dtype)
        assert transformed[name].is_contiguous()
        assert not torch.equal(transformed[name], tensor), name
    expected, answer = Expected(operator, case, inputs), operator.baseline_output(case, transformed)
    assert expected.accepts(undo(answer))
    assert not expected.accepts(answer)
    if dtype == "fp32":
        original, undone = operator.oracle(case, inputs), undo(operator.oracle(case, transformed))
        for name, output in original.items():
            assert float((undone[name] - output).abs().max() / output.abs().max()) < 1e-12


@pytest.mark.parametrize(("phase", "dtype", "input_distribution"), DISTRIBUTIONS)
def test_a_perturbation_changes_one_element_and_shows(phase: str, dtype: str, input_distribution: str) -> None:
    case = small(phase, dtype)
    operator, inputs = OPERATORS[case.operator], draw(case, input_distribution)
    unchanged = operator.baseline_output(case, inputs)
    for seed in range(4):
        changed = operator.perturb(case, inputs, torch.Generator().manual_seed(seed))
        assert sum(int((changed[name] != tensor).sum()) for name, tensor in inputs.items()) == 1
        expected = Expected(operator, case, changed)
        assert max(error / expected.bounds[name] for name, error in expected.errors(unchanged).items()) >= 2


@SETTINGS
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 8), st.integers(1, 7), st.integers(1, 20)),
    st.sampled_from(["gdn_cumsum", "gdn_kkt_solve", "gdn_fused_fwd"]),
    st.integers(0, 999),
)
def test_symmetry_transforms_at_any_shape(sizes: tuple[int, ...], name: str, seed: int) -> None:
    key_heads, group, *rest = sizes
    shape = (key_heads * group, *rest[1:]) if name == "gdn_cumsum" else (key_heads, key_heads * group, *rest)
    case = make_case(name, shape, "fp32", "torch")
    operator, inputs = OPERATORS[name], draw(case, seed=seed)
    transformed, undo = operator.symmetry_transform(case, inputs, torch.Generator().manual_seed(seed))
    assert Expected(operator, case, inputs).accepts(undo(operator.baseline_output(case, transformed)))
