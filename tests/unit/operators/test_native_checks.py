"""The checks of shipped operators that no prompt names and that native attacks of round 11 led to: each has what it
promises, the honest baseline passes with room, and the shortcut it is there for does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_klineage.operators import OPERATORS, make_case, operator_of
from pytest_klineage.operators.conv2d import LONE, LONE_PIXELS
from pytest_klineage.operators.distributions import evenly, powers_of_two
from pytest_klineage.operators.gdn import LARGE_BETA, PADDING
from pytest_klineage.operators.gdn_cumsum import LONE_GATE
from pytest_klineage.operators.gemm import GRADED, GRADES, OVERFLOWING
from pytest_klineage.operators.tolerance import LEAST_RMS, RMS_SLACK, Expected
from pytest_klineage.records import KernelCase

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "gemm": [(64, 48, 33), (1, 3, 1)],
    "conv2d": [(2, 8, 12, 12, 16, 3, 1, 1), (1, 1, 3, 3, 2, 1, 1, 0)],
    "gdn": [(1, 3, 32, 16, 96), (1, 2, 8, 4, 1)],
    "gdn_cumsum": [(3, 16, 96), (1, 8, 5)],
    "gdn_kkt_solve": [(2, 6, 16, 16, 150)],
    "gdn_fused_fwd": [(2, 6, 16, 16, 150)],
}
NEW = {
    "gemm": (GRADED, OVERFLOWING), "conv2d": (LONE_PIXELS,), "gdn_cumsum": (LONE_GATE,),
    **dict.fromkeys(("gdn", "gdn_kkt_solve", "gdn_fused_fwd"), (PADDING, LARGE_BETA)),
}  # fmt: skip
CHECKS = [
    (make_case(operator, shape, dtype, "torch"), name)
    for operator, shapes in SHAPES.items() for shape in shapes for dtype in OPERATORS[operator].dtypes
    for name in NEW[operator] if name != OVERFLOWING or dtype == "fp16"
]  # fmt: skip


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(case: KernelCase, name: str, seed: int = 3) -> Expected:
    found = operator_of(case).further_problem(case, name, generator(seed), {})
    assert not isinstance(found, str)
    expected: Expected = found[1]
    assert expected.inputs is found[0]
    return expected


def first(operator: str, dtype: str = "fp32", **options: Any) -> KernelCase:
    return make_case(operator, SHAPES[operator][0], dtype, "torch", **options)


@pytest.mark.parametrize(("case", "name"), CHECKS, ids=[f"{case.id}-{name}" for case, name in CHECKS])
def test_the_baseline_passes_and_none_is_in_a_prompt(case: KernelCase, name: str) -> None:
    chosen = operator_of(case)
    assert name in chosen.further_names(case)
    assert name not in chosen.input_distributions
    for seed in range(3):
        expected = problem(case, name, seed)
        assert all(bool(tensor.isfinite().all()) for tensor in expected.inputs.values())
        assert all(bound < 50 for bound in expected.bounds.values())
        assert expected.accepts(chosen.baseline_output(case, expected.inputs))


@pytest.mark.parametrize("operator", SHAPES)
def test_a_generator_on_a_gpu_gets_none(operator: str) -> None:
    class Elsewhere:
        device = torch.device("cuda")

    case = first(operator)
    assert operator_of(case).further_problem(case, NEW[operator][0], Elsewhere(), {}) == ""  # type: ignore[arg-type]


def test_powers_of_two_and_even_numbers() -> None:
    powers = powers_of_two((50, 20), 3, generator())
    assert sorted(set(powers.flatten().tolist())) == [2.0**i for i in range(-3, 4)]
    numbers = evenly((4, 25), generator())
    assert sorted((numbers.flatten() * 100).floor().tolist()) == list(range(100))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_columns_and_rows_of_a_product_are_graded(dtype: str) -> None:
    inner, outer = GRADES[dtype]
    a, b = (tensor.double().abs() for tensor in problem(first("gemm", dtype), GRADED).inputs.values())
    for columns, rows, most in ((a.mean(0), b.mean(1), inner), (b.mean(0), a.mean(1), outer)):
        for sizes in (columns, rows):
            assert float(sizes.max() / sizes.min()) > 2.0**most
    # What the inner axis has in a is undone in b.
    products = a.mean(0).log2() + b.mean(1).log2()
    assert float(products.max() - products.min()) < float(a.mean(0).log2().max() - a.mean(0).log2().min())


def test_one_scale_for_a_row_or_two_rows_added_is_wrong() -> None:
    expected = problem(first("gemm"), GRADED)
    a, b = expected.inputs["a"].double(), expected.inputs["b"].double()
    unit = a.abs().amax(1, keepdim=True) * 2.0**-30
    assert not expected.accepts({"c": ((a / unit).round() * unit @ b).float()})
    added = (a + a.roll(1, 0)).float() @ b.float() - a.roll(1, 0).float() @ b.float()
    assert not expected.accepts({"c": added})


def test_an_overflow_is_expected() -> None:
    case = first("gemm", "fp16")
    expected = problem(case, OVERFLOWING)
    infinite = expected.outputs["c"].isinf()
    rows = infinite.any(1)
    assert 1 <= int(rows.sum()) <= 4
    assert 0.3 < float(infinite[rows].double().mean()) < 0.95
    answer = operator_of(case).baseline_output(case, expected.inputs)["c"]
    assert not expected.accepts({"c": answer.clamp(-65504, 65504)})
    assert not expected.accepts({"c": answer.masked_fill(answer.isinf(), float("nan"))})
    assert not expected.accepts({"c": answer.masked_fill(answer.isinf(), float("inf"))})


def test_near_the_limit_it_is_open() -> None:
    case = make_case("gemm", (1, 4, 1), "fp16", "torch")
    inputs = {"a": torch.full((1, 1), 256.0).half(), "b": torch.tensor([[255.0, 255.75, 300.0, -300.0]]).half()}
    expected, infinity = Expected(operator_of(case), case, inputs), float("inf")
    for row, passes in (
        ((65280, 65472, infinity, -infinity), True),
        ((65280, infinity, infinity, -infinity), True),
        ((65280, -infinity, infinity, -infinity), False),
        ((65280, 1.0, infinity, -infinity), False),
        ((65280, 65472, infinity, infinity), False),
        ((65280, 65472, 65504, -infinity), False),
    ):
        assert expected.accepts({"c": torch.tensor([row]).half()}) == passes


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_lone_pixels_are_few_and_in_outputs_that_read_them(dtype: str) -> None:
    case = first("conv2d", dtype)
    expected = problem(case, LONE_PIXELS)
    lone = expected.inputs["x"].abs() > LONE[dtype] / 2
    assert 1 <= int(lone.sum()) <= 3
    reading = torch.nn.functional.max_pool2d(lone.any(1, keepdim=True).float(), 3, 1, 1) > 0
    assert 0 < int(reading.sum()) <= 27
    if dtype == "fp32":
        y = operator_of(case).baseline_output(case, expected.inputs)["y"]
        # A transform of twelve pixels errs everywhere by what the largest one rounds to.
        blurred = y + 2.0**-24 * y.abs().amax(-1, keepdim=True) * (-1) ** torch.arange(12)
        assert not expected.accepts({"y": blurred})


def test_small_pixels_begin_anywhere() -> None:
    case = first("conv2d")
    begins = set()
    for seed in range(40):
        x = operator_of(case).make_inputs(case, generator(seed), "plain")["x"]
        begins.add(int((x.abs().amax((0, 1, 2)) > 1e-3).sum()))
    assert len(begins) > 9


@pytest.mark.parametrize("operator", ["gdn", "gdn_kkt_solve", "gdn_fused_fwd"])
def test_padding_is_a_run_of_tokens_of_zeros(operator: str) -> None:
    counts = set()
    for seed in range(8):
        inputs = problem(first(operator), PADDING, seed).inputs
        padded = inputs["beta"].eq(0).all(1)
        counts.add(int(padded.sum()))
        # One run, over the end perhaps.
        assert int((padded != padded.roll(1)).sum()) == 2
        for name in {"q", "k", "v", "g"} & inputs.keys():
            assert bool((inputs[name].flatten(1)[padded] == 0).all())
    assert len(counts) > 3
    assert max(counts) <= len(padded) // 2


@pytest.mark.parametrize("operator", ["gdn", "gdn_kkt_solve", "gdn_fused_fwd"])
def test_beta_may_be_up_to_two(operator: str) -> None:
    case = first(operator)
    expected = problem(case, LARGE_BETA)
    beta = expected.inputs["beta"]
    assert 1.5 < float(beta.max()) < 2
    if operator != "gdn_fused_fwd":
        ended = {**expected.inputs, "beta": beta.clamp(max=1)}
        assert not expected.accepts(operator_of(case).baseline_output(case, ended))


def test_a_huge_gate_is_forgotten_in_the_next_chunk() -> None:
    case = first("gdn_cumsum")
    expected = problem(case, LONE_GATE)
    g = expected.inputs["g"]
    assert (g < -9e3).sum(0).tolist() == [1, 1, 1]
    assert -1.1e30 < float(g.min()) < -1e21
    assert bool((expected.outputs["gc"][80:] > -9e3).all())
    running = g.double().cumsum(0)
    starts = torch.cat([torch.zeros(1, 3).double(), running[15:-1:16]]).repeat_interleave(16, 0)
    assert not expected.accepts({"gc": (running - starts).float()})


def test_many_errors_of_one_sign_are_too_many() -> None:
    case = first("gemm", "bf16")
    chosen = operator_of(case)
    inputs = chosen.make_inputs(case, generator(), "well_conditioned")
    expected = Expected(chosen, case, inputs)
    assert expected.rms_bounds["c"] >= RMS_SLACK * LEAST_RMS
    answer = chosen.baseline_output(case, inputs)["c"]
    assert expected.accepts({"c": answer})
    assert not expected.accepts({"c": (answer.float() * 1.03).bfloat16()})
    # A few may err as much.
    few = answer.clone()
    few[0, :8] *= 1.02
    assert expected.accepts({"c": few})
    small = make_case("gemm", (8, 8, 8), "bf16", "torch")
    assert not Expected(chosen, small, chosen.make_inputs(small, generator(), "well_conditioned")).rms_bounds
