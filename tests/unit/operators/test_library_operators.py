"""Operators that a library brings: 8-bit outputs, indices behind ties, tables that never change, long sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_klineage import UsageError, make_case, operator
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, OpenOperator
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import Code, KernelCase
from pytest_klineage.records.messages import OpenCase
from pytest_klineage.worker.comparison import count_unwritten, explain
from pytest_klineage.worker.host.arena import poison
from pytest_klineage.worker.problems import Plain, Problem, ProblemSet

QUANTISED = "x[M,N] -> y[M,N]: {}, scale[M]: fp32"
TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quantiser(kind: str) -> OpenOperator:
    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(-1) / 448
        return (x.float() / scale[:, None]).to(TYPES[kind]), scale

    return operator(QUANTISED.format(kind), dtypes=("fp32", "bf16"))(quantise)


def expected_of(chosen: OpenOperator, case: KernelCase, distribution: str = DEFAULT_DISTRIBUTION) -> Expected:
    chosen.examine(case, chosen.make_inputs(case, generator(), DEFAULT_DISTRIBUTION))
    return Expected(chosen, case, chosen.make_inputs(case, generator(1), distribution))


def next_towards_zero(codes: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The 8-bit floats with those of one mask one step smaller in magnitude."""
    bits = codes.view(torch.uint8).clone()
    bits[where & ((bits & 127) > 0)] -= 1
    return bits.view(codes.dtype)


# --- outputs of 8-bit floats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TYPES)
def test_numbers_that_are_cut_off_are_not_rounded(kind: str, dtype: str) -> None:
    chosen = quantiser(kind)
    case = make_case(chosen, (21, 300), dtype, "torch")
    expected = expected_of(chosen, case)
    right = chosen.baseline_output(case, expected.inputs)
    assert expected.accepts(right)
    too_large = right["y"].double().abs() > expected.outputs["y"].abs()
    assert not expected.accepts({**right, "y": next_towards_zero(right["y"], too_large)})


@pytest.mark.parametrize("kind", TYPES)
def test_a_few_numbers_may_be_the_neighbours(kind: str) -> None:
    chosen = quantiser(kind)
    case = make_case(chosen, (21, 300), "fp32", "torch")
    expected = expected_of(chosen, case)
    right = chosen.baseline_output(case, expected.inputs)
    reciprocal = (expected.inputs["x"] * (1 / right["scale"])[:, None]).to(TYPES[kind])
    assert expected.accepts({**right, "y": reciprocal})
    some = torch.rand(right["y"].shape, generator=generator()) < 0.03
    assert expected.accepts({**right, "y": next_towards_zero(right["y"], some)})


def test_nan_in_8_bits_is_a_wrong_value() -> None:
    chosen = quantiser("fp8_e4m3")
    case = make_case(chosen, (4, 5), "fp32", "torch")
    expected = expected_of(chosen, case)
    right = chosen.baseline_output(case, expected.inputs)
    broken = right["y"].view(torch.uint8).clone()
    broken[0, 0] = 127
    outputs = {**right, "y": broken.view(right["y"].dtype)}
    error = expected.errors(outputs)["y"]
    assert error == float("inf")
    view = Plain(Problem(case, DEFAULT_DISTRIBUTION, expected.inputs, expected))
    assert explain("y", view, outputs, 0, error, expected.bounds["y"]).code is Code.NON_FINITE


def test_a_right_number_was_written() -> None:
    chosen = quantiser("fp8_e4m3")
    case = make_case(chosen, (21, 300), "fp32", "torch")
    expected = expected_of(chosen, case)
    spec, right = chosen.signature(case).outputs[0], chosen.baseline_output(case, expected.inputs)["y"]
    unwritten = right.clone()
    poison(spec, unwritten[3:5], 1)
    lowest = int((right[3:5].double() == -448).sum())
    assert int((right.double() == -448).sum()) > lowest
    assert count_unwritten(spec, right, expected.outputs["y"], 1) == 0
    assert count_unwritten(spec, unwritten, expected.outputs["y"], 1) == 600 - lowest


# --- indices behind ties ----------------------------------------------------------------------------------------------


def routed(logits: torch.Tensor, stable: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if stable:
        order = torch.argsort(logits.float(), dim=-1, descending=True, stable=True)[:, :2]
    else:
        order = logits.float().topk(2, -1).indices
    return torch.softmax(logits.float().gather(1, order), -1).to(logits.dtype), order


def router(stable: bool) -> OpenOperator:
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routed(logits, stable)

    return operator("logits[T,E] -> weight[T,2], expert[T,2]: int64", dtypes=("bf16", "fp32"))(route)


def last_of_equals(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The answer of a kernel that goes through the experts from behind."""
    order = torch.argsort(logits.flip(1).float(), dim=-1, descending=True, stable=True)[:, :2]
    chosen = logits.shape[1] - 1 - order
    weight = torch.softmax(logits.float().gather(1, chosen), -1).to(logits.dtype)
    return {"weight": weight, "expert": chosen}


def test_an_index_that_an_open_tie_decides_is_not_compared() -> None:
    chosen = router(stable=False)
    case = make_case(chosen, (400, 64), "bf16", "torch")
    expected = expected_of(chosen, case)
    other = last_of_equals(expected.inputs["logits"])
    tied = other["expert"] != expected.outputs["expert"]
    assert bool(tied.any())
    assert expected.accepts(other)
    wrong = other["expert"].clone()
    row = int((~expected.units["expert"].isinf().any(1)).nonzero()[0])
    wrong[row, 1] += 1 if int(wrong[row, 1]) < 63 else -1
    assert not expected.accepts({**other, "expert": wrong})
    assert any("follow from ties" in note for note in chosen.examine(case, expected.inputs))
    assert lint_case(chosen, case, generator()) == []


def test_a_stable_sort_decides_ties() -> None:
    chosen = router(stable=True)
    case = make_case(chosen, (400, 64), "bf16", "torch")
    expected = expected_of(chosen, case)
    assert not expected.accepts(last_of_equals(expected.inputs["logits"]))
    assert not any("ties" in note for note in chosen.examine(case, expected.inputs))


@pytest.mark.parametrize("stable", [False, True])
def test_inputs_that_all_tie_are_no_check(stable: bool) -> None:
    case = make_case(router(stable), (20, 30), "fp32", "torch")
    found = ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1))
    assert not {"constant", "zeros"} & {check.input_distribution for check in found.checks}
    assert "large" in {check.input_distribution for check in found.checks}


# --- inputs that are always the same, and long sums -------------------------------------------------------------------


@operator("inout q[T,H,D], cos[T,D//2], sin[T,D//2]", dtypes=("fp32",))
def rotate(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = q.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


@rotate.inputs("default")
def angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.arange(cos.shape[0]).double()[:, None] * 0.5 ** torch.arange(cos.shape[1]).double()
    return turn.cos(), turn.sin()


def test_a_table_that_every_draw_repeats_has_influence() -> None:
    case = make_case(rotate, (7, 2, 8), "fp32", "torch")
    assert lint_case(rotate, case, generator()) == []

    def half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x / 2

    unused = operator("x[N], w[N] -> y[N]", dtypes=("fp32",))(half)
    unused.inputs("default")(lambda w: torch.ones_like(w))
    case = make_case(unused, (9,), "fp32", "torch")
    assert lint_case(unused, case, generator()) == ["input w does not influence outputs"]
    with pytest.raises(
        UsageError,
        match=r"w does not influence outputs; declare \.inputs in which it does, another shape, or may_ignore=\('w',\)",
    ):
        ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1))


@operator("x[M,N] -> y[M,N]", dtypes=("fp32",))
def normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_sum_of_one_number_may_err_to_one_side() -> None:
    case = make_case(normalise, (16, 4000), "fp32", "torch")
    found = ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1))
    (problem,) = [check for check in found.checks if check.input_distribution == "constant"]
    assert isinstance(problem, Problem)
    x = problem.inputs["x"]
    total = torch.zeros(len(x))
    for column in x.square().unbind(1):
        total += column
    one_by_one = x * torch.rsqrt(total[:, None] / x.shape[1] + 1e-6)
    error = problem.expected.errors({"y": one_by_one})["y"]
    assert error > 30
    assert problem.expected.accepts({"y": one_by_one})
    assert not problem.expected.accepts({"y": one_by_one * 1.001})


# --- what a signature may not say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_case(axes, (3,), "fp32", "torch"), "2 axes (N, block (a parameter without a default)), got"),
        (lambda: make_case(test_a_stable_sort_decides_ties, (3,), "fp32", "torch"), "decides_ties is a plain function"),
    ],
)
def test_axes_and_functions(make: Any, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert words in str(raised.value)


@operator("x[N] -> y[N]", dtypes=("fp32",))
def axes(x: torch.Tensor, *, block: int) -> torch.Tensor:
    return x.view(-1, block).flip(1).reshape(-1)


def test_an_index_without_a_bound_is_named() -> None:
    def looked_up(table: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return table[idx]

    found = operator("table[V], idx[T]: int32 -> y[T]", dtypes=("fp32",))(looked_up)
    case = make_case(found, (9, 40), "fp32", "torch")
    with pytest.raises(
        UsageError, match=r"if idx holds indices, bound them in the signature: idx\[\.\.\.\]: int32 < V"
    ):
        found.oracle(case, found.make_inputs(case, generator(), DEFAULT_DISTRIBUTION))
