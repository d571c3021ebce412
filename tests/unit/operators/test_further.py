"""Undeclared checks: which there are, which are left out, and what they see."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_klineage import UsageError, allclose, operator
from pytest_klineage.channel import Channel
from pytest_klineage.operators import OpenOperator, further, make_case, operator_of
from pytest_klineage.operators.changes import ALONE, BY_TURNS, CHANGES, COMPARED, INTEGERS, PAIRED, STEPPED, WHOLE
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase
from pytest_klineage.records.messages import OpenCase, Stock
from pytest_klineage.worker.oracle import Oracle
from pytest_klineage.worker.problems import Problem, ProblemSet, Remade
from pytest_klineage.worker.turns import Turns

if TYPE_CHECKING:
    from pytest_klineage.operators.base import Tensors

ALL = tuple(f"{name}:x" if name == ALONE else name for name in CHANGES if name not in (*INTEGERS, *COMPARED, STEPPED))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def opened(case: KernelCase) -> ProblemSet:
    return ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1))


def checked(case: KernelCase) -> tuple[list[str], list[str]]:
    """Names of the undeclared checks, and notes on those that are left out."""
    found = opened(case)
    own = {"well_conditioned", "one_element_changed", *operator_of(case).input_distributions}
    names = [check.input_distribution for check in found.checks if check.input_distribution not in own]
    return names, [note for note in found.notes if note.startswith("not checked")]


@operator("x[M,N] -> y[M,N]", dtypes=("fp32", "bf16", "fp16"))
def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


@operator("x[M,N], w[N] -> y[M,N]", dtypes=("fp32", "bf16", "fp16"))
def layer_norm(x: torch.Tensor, w: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    return (away * torch.rsqrt(away.square().mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


@operator("a[M,K], b[K,N] -> c[M,N]", dtypes=("fp32", "bf16", "fp16"))
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@operator("x[M,N] -> best[M]: int64", dtypes=("fp32",))
def best(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


@operator("x[M,N] -> best[M]: int64", dtypes=("fp32",))
def best_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().argmax(-1)


@operator("x[N] -> y[N]", dtypes=("fp32",))
def logarithm(x: torch.Tensor) -> torch.Tensor:
    return x.abs().log()


@operator("x[N] -> y[N]", dtypes=("fp32",), options={"mode": ("plain", "other")})
def power(x: torch.Tensor, *, negated: bool = False, exponent: int = 2, mode: str = "plain") -> torch.Tensor:
    return (-1 if negated else 1) * x**exponent


def larger_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x, y)


def norm_by(x: torch.Tensor, w: torch.Tensor, way: str) -> torch.Tensor:
    """Layer norms as honest authors write them, in single precision."""
    wide, size = x.float(), x.shape[1]
    order = {"one_pass": wide, "backwards": wide.flip(1), "tree": wide.view(len(x), -1, 8).sum(-1)}[way]
    mean = order.cumsum(1)[:, -1:] / size if way != "tree" else order.sum(1, keepdim=True) / size
    squares = (wide.square().flip(1) if way == "backwards" else wide.square()).sum(1, keepdim=True) / size
    centred = (wide - mean).square().mean(1, keepdim=True)
    variance = (squares - mean.square()).clamp_min(0) if way == "one_pass" else centred
    return ((wide - mean) / (variance + 1e-5).sqrt() * w.float()).to(x.dtype)


# --- which there are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_usual_operators_have_all(dtype: str) -> None:
    # Beside a mean of 100 the 8 bits of a bf16 hold nothing of a spread of one.
    left = ["not checked with far: another answer passes"] if dtype == "bf16" else []
    usual = [name for name in ALL if not left or name != "far"]
    assert checked(make_case(softmax, (17, 40), dtype, "torch")) == (usual, left)
    names, absent = checked(make_case(layer_norm, (16, 40), dtype, "torch"))
    assert (sorted(names[:-4]), absent) == (sorted([*usual, "alone:w"]), left)
    half, ten_times, beyond_one = (float(name.removeprefix("eps=")) for name in names[-4:-1])
    assert 0.5 <= half <= 0.626
    assert 1e-4 <= ten_times <= 1.26e-4
    assert 2.5 <= beyond_one <= 3.13
    assert names[-1] == "eps=0.0"


def test_integers_and_booleans_have_their_own() -> None:
    @operator("x[N]: int32, n[N]: int32 < 5, keep[N]: bool -> y[N]: int32", dtypes=("fp32",))
    def chosen(x: torch.Tensor, n: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x.where(keep, n)

    case = make_case(chosen, (64,), "fp32", "torch")
    assert checked(case) == ([name for name in INTEGERS if name != PAIRED], [])
    inputs = {check.input_distribution: check.inputs for check in opened(case).checks if isinstance(check, Problem)}
    assert inputs["integers_wide"]["x"].abs().max() > 1 << 24
    assert inputs["integers_wide"]["n"].max() < 5
    assert all(len(tensor.unique()) == 1 for tensor in inputs["integers_constant"].values())
    assert not any(tensor.any() for tensor in inputs["integers_zeros"].values())


def test_integers_of_64_bits_and_the_largest_index() -> None:
    @operator("x[N]: int64, n[N]: int64 < 5 -> y[N]: int64", dtypes=("fp32",))
    def added(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x + n

    found = opened(make_case(added, (64,), "fp32", "torch")).checks
    inputs = {check.input_distribution: check.inputs for check in found if isinstance(check, Problem)}
    assert 1 << 40 < inputs["integers_wide"]["x"].abs().max() < 1 << 53
    assert (inputs["integers_last"]["n"] == 4).all()
    assert inputs["integers_last"]["x"].any()


def test_integers_beyond_a_double_are_for_few_terms() -> None:
    def names(function: Any) -> list[str]:
        chosen = operator("x[N]: int64, y[N]: int64 -> z[N]: int64", name="some")(function)
        return checked(make_case(chosen, (64,), "fp32", "torch"))[0]

    assert PAIRED in names(lambda x, y: (x - y).abs())
    assert PAIRED in names(lambda x, y: torch.where(x < y, x, -y))
    for function in (lambda x, y: x.cumsum(0) + y, lambda x, y: x * y, lambda x, y: (x.double() - y).long()):
        assert PAIRED not in names(function)


def test_integers_beyond_a_double_are_beyond_it() -> None:
    found = CHANGES[PAIRED](torch.arange(-100, 100), generator())
    assert 1 << 56 < int(found.abs().max()) < 1 << 57
    assert (found.double().long() != found).sum() > 150


def ordered(stable: bool) -> OpenOperator:
    """Places in ascending order, with ties left open or not."""

    def order(x: torch.Tensor) -> torch.Tensor:
        return x.argsort(dim=-1, stable=stable)

    return operator("x[M,N] -> place[M,N]: int64", dtypes=("fp32",))(order)


def test_equal_numbers_are_for_comparisons_that_say_which() -> None:
    assert set(COMPARED) <= {*checked(make_case(ordered(True), (20, 24), "fp32", "torch"))[0]}
    assert set(COMPARED) <= {*checked(make_case(best, (20, 24), "fp32", "torch"))[0]}
    for other in (ordered(False), best_square, softmax):
        assert not set(COMPARED) & {*checked(make_case(other, (20, 24), "fp32", "torch"))[0]}


def test_equal_numbers_are_in_every_row() -> None:
    found = CHANGES["repeated"](torch.randn(50, 24, generator=generator()).double(), generator())
    counts = [len(row.unique()) for row in found]
    assert max(counts) < 20
    assert min(counts) > 1
    assert not (found.eq(0) & found.signbit()).any()


def test_a_tie_in_reverse_is_seen_and_a_stable_one_passes() -> None:
    case = make_case(ordered(True), (20, 24), "fp32", "torch")
    check = next(check for check in opened(case).checks if check.input_distribution == "repeated")
    assert isinstance(check, Problem)
    x = check.inputs["x"]
    assert check.expected.accepts({"place": x.argsort(dim=-1, stable=True)})
    backwards = 23 - x.flip(-1).argsort(dim=-1, stable=True)
    assert not check.expected.accepts({"place": backwards})


def test_zeros_of_both_signs_are_equal() -> None:
    expected = problem_of_opened(make_case(ordered(True), (20, 24), "fp32", "torch"), "signed_zeros")
    x = expected.inputs["x"]
    zeros = x[x == 0]
    assert 0 < int(zeros.signbit().sum()) < len(zeros)
    assert expected.accepts({"place": x.argsort(dim=-1, stable=True)})
    bits = x.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    assert not expected.accepts({"place": keys.argsort(dim=-1, stable=True)})


@pytest.mark.parametrize("name", ["argmax", "argmin", "max", "min"])
def test_the_last_of_equal_numbers_is_seen(name: str) -> None:
    def place(x: torch.Tensor) -> torch.Tensor:
        found = getattr(torch, name)(x, -1)
        answer: torch.Tensor = found if name.startswith("arg") else found.indices
        return answer

    chosen = operator("x[M,N] -> place[M]: int64", dtypes=("fp32",))(place)
    expected = problem_of_opened(make_case(chosen, (20, 24), "fp32", "torch"), "repeated")
    x = expected.inputs["x"]
    assert expected.accepts({"place": place(x)})
    assert not expected.accepts({"place": 23 - place(x.flip(-1))})


def on_grid(divisor: float) -> OpenOperator:
    """The nearest multiple of a number."""

    def nearest(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x / divisor) * divisor

    return operator("x[M,N] -> y[M,N]", dtypes=("fp32",))(nearest)


def away(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """The same, halves away from zero."""
    return (x.abs() / divisor + 0.5).floor().copysign(x) * divisor


def test_halves_of_a_step_are_rounded_as_the_definition_says() -> None:
    case = make_case(on_grid(0.25), (20, 24), "fp32", "torch")
    expected = problem_of_opened(case, STEPPED)
    assert expected.accepts({"y": torch.round(expected.inputs["x"] * 4) / 4})
    assert not expected.accepts({"y": away(expected.inputs["x"], 0.25)})


def test_where_rounding_decides_halves_either_is_right() -> None:
    case = make_case(on_grid(0.1), (20, 24), "fp32", "torch")
    expected = problem_of_opened(case, STEPPED)
    assert expected.accepts({"y": away(expected.inputs["x"], 0.1)})


def test_steps_are_for_definitions_with_some() -> None:
    for function, expected in ((lambda x: x.floor(), True), (lambda x: x % 0.5, True), (lambda x: x * 2, False)):
        chosen = operator("x[M,N] -> y[M,N]", dtypes=("fp32",), name="some")(function)
        assert (STEPPED in checked(make_case(chosen, (20, 24), "fp32", "torch"))[0]) is expected


def test_eighths_are_halves_of_quarters() -> None:
    found = CHANGES[STEPPED](torch.randn(500, generator=generator()).double(), generator())
    assert ((found * 8).round() == found * 8).all()
    assert 200 < int(((found * 8) % 2 == 1).sum()) < 300


def problem_of_opened(case: KernelCase, name: str) -> Expected:
    check = next(check for check in opened(case).checks if check.input_distribution == name)
    assert isinstance(check, Problem)
    return check.expected


@pytest.mark.parametrize(("function", "exact"), [
    (lambda x: x.flip(0), True),
    (lambda x: torch.empty_like(x).copy_(x.flip(0)), True),
    (lambda x: torch.where(x > 0, x, x.roll(1, 0)), False),
    (lambda x: x.flip(0).to(torch.bfloat16).to(x.dtype), False),
    (lambda x: torch.empty_like(x).copy_(torch.empty_like(x, dtype=torch.bfloat16).copy_(x.flip(0))), False),
    (lambda x: x.flip(0) * 2, False),
    (lambda x: x.tril().masked_fill(x.isnan(), 0.1), False),
])  # fmt: skip
def test_what_only_moves_has_no_tolerance(function: Any, exact: bool) -> None:
    def moved(x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = function(x)
        return answer

    case = make_case(operator("x[M,N] -> y[M,N]", dtypes=("fp32",))(moved), (12, 12), "fp32", "torch")
    bounds = [check.expected.bounds["y"] for check in opened(case).checks if isinstance(check, Problem)]
    assert bounds
    assert all((bound == 0) == exact for bound in bounds)


def test_moved_numbers_may_have_a_declared_tolerance() -> None:
    chosen = operator("x[M,N] -> y[N,M]", dtypes=("fp32",), tolerance=allclose(rtol=1e-3), name="turned")(
        lambda x: x.t().contiguous()
    )
    case = make_case(chosen, (12, 8), "fp32", "torch")
    chosen.examine(case, chosen.make_inputs(case, generator(), "well_conditioned"))
    inputs = chosen.make_inputs(case, generator(1), "well_conditioned")
    assert Expected(chosen, case, inputs).accepts({"y": inputs["x"].t() * 1.0001})
    wrong = chosen.oracle(case, inputs)
    inputs, expected = chosen.further_problem(case, "large", generator(1), wrong)
    assert expected.accepts({"y": inputs["x"].t() * 1.0001})


def test_another_value_of_an_option_is_drawn_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(layer_norm, (16, 40), "fp32", "torch")
    seen = set()
    for drawn in (0, 250):
        further.not_foreseen.cache_clear()
        monkeypatch.setattr(further.secrets, "randbelow", lambda _below, drawn=drawn: drawn)
        seen.add(layer_norm.further_names(case)[-4:])
    further.not_foreseen.cache_clear()
    others = ("eps=0.5", "eps=0.0001", "eps=2.5", "eps=0.0"), ("eps=0.625", "eps=0.000125", "eps=3.12", "eps=0.0")
    assert seen == {*others}


def test_one_row_stands_out() -> None:
    for shape, rows in (((6, 5), (6, 5)), ((2, 3, 4), (6, 4)), ((7,), (7, 1)), ((), (1, 1))):
        found = CHANGES["outlier"](torch.ones(shape, dtype=torch.float64), generator())
        firsts = found.view(rows).unique(dim=1).flatten().tolist()
        assert sorted(firsts) == [*[1.0] * (rows[0] - 1), 1000.0]
        assert firsts[0] == 1 or rows[0] == 1


def test_zeros_are_rows_and_places() -> None:
    found = CHANGES["zeros"](torch.randn(40, 50, generator=generator()), generator())
    assert not found[::2].any()
    assert 0.4 < float((found[1::2] == 0).float().mean()) < 0.6
    assert not CHANGES["zeros"](torch.ones(7), generator()).any()
    assert CHANGES["zeros"](torch.arange(-3, 3).view(2, 3), generator()).tolist() == [[0, 0, 0], [0, 1, 2]]


def test_small_numbers_are_small_for_their_type() -> None:
    case = make_case(softmax, (8, 50), "fp16", "torch")
    assert float(problem_of_opened(case, "small").inputs["x"].abs().max()) > 1e-3
    case = make_case(softmax, (8, 50), "fp32", "torch")
    assert float(problem_of_opened(case, "small").inputs["x"].abs().max()) < 1e-7


def test_slices_are_changed_by_turns() -> None:
    case = make_case(layer_norm, (8, 4000), "fp32", "torch")
    inputs = further.after(layer_norm, case, BY_TURNS, generator())
    means, spreads = inputs["x"].mean(1).tolist(), inputs["x"].std(1).tolist()
    assert means == pytest.approx([0, 0, -240, 1000] * 2, abs=2)
    assert spreads == pytest.approx([1, 30, 30, 1] * 2, rel=0.1)
    assert float(inputs["w"].abs().max()) < 6


def test_what_a_user_leaves_out_comes_at_no_turn() -> None:
    case = make_case(softmax, (8, 50), "fp32", "torch")
    assert softmax.elsewhere_names(case)[0] == BY_TURNS
    tame = operator("x[M,N] -> y[M,N]", dtypes=("fp32",), defaults=("zeros",))(softmax.function)
    assert tame.elsewhere_names(case) == ("zeros",)
    replaced = operator("x[M,N] -> y[M,N]", dtypes=("fp32",))(softmax.function)
    replaced.inputs("far")(lambda x: x + 9)
    assert further.turns(replaced) == ["large", "lowered"]


def test_a_little_more_than_the_largest_number_is_the_largest() -> None:
    @operator("x[M,N] -> y[M,N]: fp8_e4m3, scale[M]: fp32", dtypes=("fp32",))
    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1) / 448
        return (x / scale[:, None]).to(torch.float8_e4m3fn), scale

    names, absent = checked(make_case(quantise, (64, 128), "fp32", "torch"))
    assert set(ALL) - {*names} == {"zeros"}
    assert absent == ["not checked with zeros: the answer is not finite"]
    signature = quantise.signature(make_case(quantise, (1, 1), "fp32", "torch"))
    for value, fits in ((448.0, True), (461.0, True), (465.0, False)):
        outputs = {"y": torch.tensor([[value]]).double(), "scale": torch.ones(1).double()}
        if fits:
            assert float(torch.tensor(value).to(torch.float8_e4m3fn)) == 448
            further.object_to_range(signature, outputs)
        else:
            with pytest.raises(further.Unusable):
                further.object_to_range(signature, outputs)


def test_large_integers_that_overflow_are_left_out() -> None:
    @operator("x[N]: int32 -> y[N]: int32", dtypes=("fp32",))
    def squared(x: torch.Tensor) -> torch.Tensor:
        return x * x

    names, absent = checked(make_case(squared, (64,), "fp32", "torch"))
    assert "integers_wide" not in names
    assert absent == ["not checked with integers_wide: integers overflow"]

    @operator("x[N]: int32 -> y[N]: int32", dtypes=("fp32",))
    def negated(x: torch.Tensor) -> torch.Tensor:
        return -x

    @negated.inputs("default")
    def small(x: torch.Tensor) -> torch.Tensor:
        return x % 7

    assert "integers_wide" not in checked(make_case(negated, (64,), "fp32", "torch"))[0]


def test_what_the_definition_does_not_allow_is_left_out() -> None:
    names, absent = checked(make_case(logarithm, (50,), "fp32", "torch"))
    assert set(ALL) - set(names) == {"zeros"}
    assert absent == ["not checked with zeros: the answer is not finite"]
    # Answers of a million do not fit in fp16.
    names, absent = checked(make_case(product, (16, 64, 16), "fp16", "torch"))
    assert "mixed" not in names
    assert "large" in names


def test_one_input_alone_is_large() -> None:
    @operator("x[M,N], n[M]: int32, s[] -> y[M,N]", dtypes=("fp32", "fp16"))
    def scaled(x: torch.Tensor, n: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * s + n[:, None]

    for dtype, largest in (("fp32", 1e6), ("fp16", 1e3)):
        found = opened(make_case(scaled, (8, 50), dtype, "torch")).checks
        inputs = {check.input_distribution: check.inputs for check in found if isinstance(check, Problem)}
        assert [name for name in inputs if name.startswith(ALONE)] == ["alone:x", "alone:s"]
        rows = inputs["alone:x"]["x"].float().abs().mean(1)
        assert int((rows > largest / 10).sum()) == (2 if largest > 1e3 else 8)
        assert rows.min() > 100
        assert float(inputs["alone:x"]["s"].abs()) < 10
        assert float(inputs["alone:s"]["x"].abs().max()) < 10


def test_all_of_a_types_range_is_for_comparisons() -> None:
    def inputs(function: Any) -> dict[str, Tensors]:
        chosen = operator("x[N]: int32, y[N]: int32 -> z[N]: int32", name="some")(function)
        found = opened(make_case(chosen, (500,), "fp32", "torch")).checks
        return {check.input_distribution: check.inputs for check in found if isinstance(check, Problem)}

    found = inputs(larger_of)[WHOLE]
    for tensor in found.values():
        assert {-(2**31), 2**31 - 1} <= {*tensor.tolist()}
    assert (found["x"].long() - found["y"]).abs().max() > 2**31
    for function in (lambda x, y: x - y, lambda x, y: x.abs().maximum(y), lambda x, y: x.where(x.float() < y, y)):
        assert WHOLE not in inputs(function)


def test_a_difference_in_the_place_of_a_comparison_is_seen() -> None:
    chosen = operator("x[N]: int32, y[N]: int32 -> z[N]: int32", name="greater")(larger_of)
    case = make_case(chosen, (500,), "fp32", "torch")
    chosen.examine(case, chosen.make_inputs(case, generator(1), "well_conditioned"))
    found = chosen.further_problem(case, WHOLE, generator(3), another_answer(chosen, case))
    assert not isinstance(found, str)
    inputs, expected = found
    difference = inputs["x"] - inputs["y"]
    assert not expected.accepts({"z": inputs["x"] - (difference & (difference >> 31))})
    assert expected.accepts({"z": torch.maximum(inputs["x"], inputs["y"])})


def test_integers_that_rounding_decides_are_left_out() -> None:
    names, absent = checked(make_case(best_square, (20, 30), "fp32", "torch"))
    assert "large" in names
    assert not {"constant", "zeros"} & set(names)
    assert any("the answer jumps" in note for note in absent)


def test_a_user_switches_them_off_or_replaces_them() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def checks(defaults: Any) -> list[str]:
        found = operator("x[N] -> y[N]", dtypes=("fp32",), defaults=defaults)(doubled)
        return list(found.further_names(make_case(found, (8,), "fp32", "torch")))

    assert checks(False) == []
    assert checks(("zeros", "large")) == ["zeros", "large"]
    with pytest.raises(UsageError, match="unknown distribution in defaults= 'huge'"):
        checks(("huge",))
    found = operator("x[N] -> y[N]", dtypes=("fp32",))(doubled)
    found.inputs("large")(lambda x: x * 4)
    case = make_case(found, (8,), "fp32", "torch")
    assert "large" not in found.further_names(case)
    assert "large" in found.input_distributions


def test_inputs_keep_what_the_users_default_makes_of_them() -> None:
    @operator("p[M,N] -> y[M,N]", dtypes=("fp32",))
    def entropy(p: torch.Tensor) -> torch.Tensor:
        return p * p.log()

    @entropy.inputs("default")
    def probabilities(p: torch.Tensor) -> torch.Tensor:
        return torch.softmax(p.clamp(-40, 40), -1)

    found = opened(make_case(entropy, (12, 30), "fp32", "torch"))
    further = [check for check in found.checks if check.input_distribution in ALL]
    assert len(further) >= 4
    for check in further:
        assert not isinstance(check, Remade)
        assert torch.allclose(check.inputs["p"].sum(-1), torch.ones(12), atol=1e-5)


def test_inputs_that_a_file_makes_itself_are_left_alone() -> None:
    @operator("x[M,N] -> y[M,N]", dtypes=("fp32",))
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @doubled.inputs("default")
    def own(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(6, 7, generator=generator)}

    assert checked(make_case(doubled, (6, 7), "fp32", "torch")) == ([], [])


# --- options ----------------------------------------------------------------------------------------------------------


def test_every_other_value_of_an_option_is_a_check() -> None:
    case = make_case(power, (30,), "fp32", "torch")
    names = [name for name in power.further_names(case) if name not in ALL]
    assert names == ["exponent=3", "negated=True"]
    assert dict(power.further_case(case, "exponent=3").options) == {"exponent": 3}
    found = opened(case)
    cases = [layout.options for layout in found.layouts()]
    assert cases == [{}, {"exponent": 3}, {"negated": True}]
    check = next(check for check in found.checks if check.input_distribution == "negated=True")
    assert not isinstance(check, Remade)
    assert found.layout_of(check) == 2
    assert not check.expected.accepts(power.baseline_output(case, check.inputs))
    assert check.expected.accepts(power.baseline_output(check.case, check.inputs))


def test_other_values_of_an_option_meet_several_kinds_of_inputs() -> None:
    case = make_case(layer_norm, (16, 256), "fp32", "torch")
    name = layer_norm.further_names(case)[-4]
    expected = problem(case, name)
    x, w, eps = expected.inputs["x"], expected.inputs["w"], expected.case.options["eps"]
    assert float(x.abs().max()) > 900
    assert expected.accepts(layer_norm.baseline_output(expected.case, expected.inputs))
    mean, squares = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True)
    assert not expected.accepts({"y": (x - mean) / ((squares - mean.square()).abs() + eps).sqrt() * w})


def test_an_option_beside_a_bias_shows_on_small_numbers() -> None:
    @operator("x[M,N], b[N] -> y[M,N]", dtypes=("bf16",))
    def normalised(x: torch.Tensor, b: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) + b.float()).to(x.dtype)

    names, _ = checked(make_case(normalised, (24, 160), "bf16", "torch"))
    assert len([name for name in names if name.startswith("eps=")]) == 4


def test_an_option_may_be_ignored() -> None:
    def scaled(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        return x + eps

    free = operator("x[N] -> y[N]", dtypes=("fp32",))(scaled)
    fixed = operator("x[N] -> y[N]", dtypes=("fp32",), may_ignore=("eps",))(scaled)
    assert any(name.startswith("eps=") for name in free.further_names(make_case(free, (8,), "fp32", "torch")))
    assert not any(name.startswith("eps=") for name in fixed.further_names(make_case(fixed, (8,), "fp32", "torch")))
    assert lint_case(fixed, make_case(fixed, (64,), "fp32", "torch"), generator()) == []


# --- what they see, and what they leave alone -------------------------------------------------------------------------


def another_answer(chosen: OpenOperator, case: KernelCase) -> Tensors:
    """The answer to inputs that are not those of `generator(3)`."""
    return chosen.oracle(case, chosen.make_inputs(case, generator(4), "well_conditioned"))


def problem(case: KernelCase, name: str) -> Expected:
    chosen = operator_of(case)
    assert isinstance(chosen, OpenOperator)
    found = chosen.further_problem(case, name, generator(3), another_answer(chosen, case))
    assert not isinstance(found, str), found
    return found[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [*ALL, BY_TURNS])
@pytest.mark.parametrize("way", ["one_pass", "backwards", "tree"])
def test_honest_norms_pass_everywhere(way: str, name: str, dtype: str) -> None:
    if (name, dtype) == ("far", "bf16"):
        pytest.skip("left out: another answer passes")
    expected = problem(make_case(layer_norm, (16, 256), dtype, "torch"), name)
    inputs = expected.inputs
    # Beside a mean of a thousand spreads the squares of a float32 hold nothing of the variance.
    hopeless = way == "one_pass" and name in ("far", BY_TURNS) and dtype == "fp32"
    assert expected.accepts({"y": norm_by(inputs["x"], inputs["w"], way)}) is not hopeless


def test_a_statistic_that_is_left_out_is_seen() -> None:
    expected = problem(make_case(layer_norm, (16, 256), "bf16", "torch"), "large")
    inputs = expected.inputs
    assert not expected.accepts({"y": inputs["x"] * inputs["w"]})


def test_a_softmax_without_its_maximum_is_seen() -> None:
    case = make_case(softmax, (33, 40), "fp32", "torch")
    for name, double in (("large", False), ("mixed", True)):
        expected = problem(case, name)
        powers = (expected.inputs["x"].double() if double else expected.inputs["x"]).exp()
        assert not expected.accepts({"y": (powers / powers.sum(-1, keepdim=True)).float()})


# --- how many elements may err ----------------------------------------------------------------------------------------


@operator("x[N] -> y[N-2]", dtypes=("fp32",))
def accelerated(x: torch.Tensor) -> torch.Tensor:
    first, second = x[1:] - x[:-1], x[2:] - 2 * x[1:-1] + x[:-2]
    return x[:-2] - first[:-1].square() / second


@pytest.mark.parametrize("seed", range(5))
def test_one_hard_element_excuses_itself_only(seed: int) -> None:
    case = make_case(accelerated, (4096,), "fp32", "torch")
    inputs = accelerated.make_inputs(case, generator(seed), "well_conditioned")
    expected = Expected(accelerated, case, inputs)
    honest = accelerated.baseline_output(case, inputs)["y"]
    assert expected.bounds["y"] > 100
    assert expected.accepts({"y": honest})
    assert expected.accepts({"y": expected.outputs["y"].float()})
    decimals = {"y": (expected.outputs["y"] * 1e3).round().div(1e3).float()}
    assert not expected.accepts(decimals)
    one_off = honest.clone()
    one_off[0] += float(expected.units["y"][0]) * expected.bounds["y"] / 2
    assert expected.accepts({"y": one_off})


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("secret", ["a", "b", "c"])
def test_problems_of_8_bit_inputs_are_made(secret: str, kind: str) -> None:
    @operator(f"x[M,N]: {kind}, s[M] -> y[M,N]", dtypes=("fp32",))
    def dequantise(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.float() * s[:, None]

    case = make_case(dequantise, (8, 8), "fp32", "torch")
    found = ProblemSet(OpenCase(case=case, secret=secret, seeds=2, flush_bytes=0, threads=1))
    assert "one_element_changed" in {check.input_distribution for check in found.planned()}


# --- timed problems that are made before ------------------------------------------------------------------------------


def test_slow_problems_come_from_a_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.worker.problems.NOVEL_LIMIT_S", 0.0)
    case = make_case(softmax, (5, 6), "fp32", "torch")
    found, turns = opened(case), Turns()
    assert (found.has_symmetry, found.novel_is_cheap, found.stock_size, found.stock) == (True, False, 14, [])
    found.make_stock()
    assert len(found.stock) == 14
    known = {id(problem) for problem in found.stock}
    warm = [turns.next_view(found, fresh=True, timed=False)[0] for _ in range(40)]
    assert not known & {id(view.problem) for view in warm}
    views = [turns.next_view(found, fresh=True)[0] for _ in range(200)]
    new = [id(view.problem) for view in views if id(view.problem) in known]
    # Each once: a second time it would be known.
    assert sorted(new) == sorted(known)
    sums = {round(float(problem.inputs["x"].sum()), 4) for problem in found.stock}
    assert len(sums) == 14


def test_quick_problems_need_no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.worker.problems.NOVEL_LIMIT_S", 60.0)
    found = opened(make_case(softmax, (5, 6), "fp32", "torch"))
    assert (found.novel_is_cheap, found.stock_size) == (True, 0)


def test_the_oracle_makes_the_stock_once_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.worker.problems.NOVEL_LIMIT_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        oracle = Oracle(Channel(ours))
    oracle.turns.problems = opened(make_case(softmax, (5, 6), "fp32", "torch"))
    oracle.stock(Stock())
    made = list(oracle.turns.problems.stock)
    oracle.stock(Stock())
    assert len(made) == 14
    assert oracle.turns.problems.stock == made


def test_a_stock_that_would_take_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_klineage.worker.problems.NOVEL_LIMIT_S", 0.0)
    monkeypatch.setattr("pytest_klineage.worker.problems.STOCK_LIMIT_S", 0.0)
    found = opened(make_case(softmax, (5, 6), "fp32", "torch"))
    found.make_stock()
    assert found.stock == []
    assert any("none is made for timing" in note for note in found.notes)


def test_large_checks_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(layer_norm, (6, 8), "fp32", "torch")
    kept = opened(case)
    monkeypatch.setattr("pytest_klineage.worker.problems.KEPT_ELEMENTS", 1)
    again = opened(case)
    assert kept.planned() == again.planned()
    assert sum(isinstance(check, Remade) for check in again.checks) >= 9, "the drawn values of eps may show or not"
    for index in range(len(kept.checks)):
        assert torch.equal(kept.check(index).inputs["x"], again.check(index).inputs["x"])
        assert kept.layout_of(kept.check(index)) == again.layout_of(again.check(index))
