"""Operators of a user's own: what the decorator makes of a definition, and what is wrong with one that is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pytest_klineage import allclose, make_case, operator
from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, OpenOperator, operator_of
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.open_inputs import redrawn
from pytest_klineage.operators.resolve import from_file
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase, definition_digest, from_json, to_json

HERE = "tests/unit/operators/test_define.py"


@operator("x[M,N] -> y[M,N]", dtypes=("bf16", "fp32"), flops="5*M*N")
def softmax(x: torch.Tensor, *, log: bool = False) -> torch.Tensor:
    """The definition."""
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)


@softmax.inputs("shifted")
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 80


@operator("inout x[M,N], w[N]: fp32, scale[]: fp32 -> peak[M]")
def scaled(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, *, eps: float = 1e-6, mode: Literal["max", "min"] = "max"
) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.float() * w * scale + eps
    return y.to(x.dtype), (y.amax(-1) if mode == "max" else y.amin(-1)).to(x.dtype)


@operator("table[V,D], idx[T]: int64 < V, keep[T]: bool -> y[T,D], count[]: int64")
def lookup(table: torch.Tensor, idx: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return table[idx] * keep[:, None], keep.sum()


@operator("x[M,N] -> y[M,N]: fp8_e4m3, scale[M]: fp32", dtypes=("bf16", "fp32"))
def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


@operator("x[N,C,H], w[F,C,K] -> y[N,F,(H + 2*pad - K)//stride + 1]", dtypes=("fp32",), flops="2*N*F*C*K*H")
def conv1d(x: torch.Tensor, w: torch.Tensor, *, stride: int, pad: int) -> torch.Tensor:
    return torch.nn.functional.conv1d(x, w, stride=stride, padding=pad)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(case: KernelCase, input_distribution: str = DEFAULT_DISTRIBUTION) -> dict[str, torch.Tensor]:
    return operator_of(case).make_inputs(case, generator(), input_distribution)


CASES = [
    make_case(softmax, (17, 40), "bf16", "torch"),
    make_case(softmax, (17, 40), "fp32", "torch", log=True),
    make_case(scaled, (16, 30), "fp16", "torch", mode="min", eps=1e-5),
    make_case(lookup, (9, 8, 33), "fp32", "torch"),
    make_case(quantise, (20, 31), "bf16", "torch"),
    make_case(conv1d, (3, 4, 20, 5, 3, 2, 0), "fp32", "torch"),
]
IDS = [case.id for case in CASES]


# --- what it means ----------------------------------------------------------------------------------------------------


def test_words_of_the_definition() -> None:
    assert (softmax.name, softmax.axes, softmax.dtypes) == ("softmax", ("M", "N"), ("bf16", "fp32"))
    assert softmax.options == {"log": (False, True)}
    assert softmax.input_distributions == (DEFAULT_DISTRIBUTION, "shifted")
    assert scaled.options == {"eps": (1e-6,), "mode": ("max", "min")}
    assert conv1d.axes == ("N", "C", "H", "F", "K", "stride", "pad")
    assert torch.equal(softmax(torch.zeros(2, 4)), torch.full((2, 4), 0.25))


def test_a_case_says_where_it_was_defined() -> None:
    case = CASES[0]
    assert case.id == "softmax-17x40-bf16"
    assert case.definition is not None
    assert case.definition.source == f"{HERE}:softmax"
    assert case.definition.digest == definition_digest(Path(__file__).read_text())
    assert from_json(to_json(case), KernelCase) == case
    assert operator_of(case) is softmax


def test_signature_and_cost() -> None:
    signature = scaled.signature(CASES[2])
    assert [spec.name for spec in signature.inputs] == ["x", "w", "scale"]
    assert [spec.name for spec in signature.outputs] == ["x", "peak"]
    assert signature.inout == {"x"}
    assert signature.scalars == {"eps": 1e-5}
    assert scaled.min_bytes(CASES[2]) == 2 * 16 * 30 * 2 + 30 * 4 + 4 + 16 * 2
    # A table that is looked up need not be read as a whole.
    assert lookup.min_bytes(CASES[3]) == 33 * 8 + 33 + 33 * 8 * 4 + 8
    assert softmax.flops(CASES[0]) == 5 * 17 * 40
    assert conv1d.signature(CASES[5]).scalars == {"stride": 2.0, "pad": 0.0}
    assert conv1d.signature(CASES[5]).outputs[0].shape == (3, 5, 9)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_inputs_follow_the_signature(case: KernelCase) -> None:
    chosen = operator_of(case)
    assert isinstance(chosen, OpenOperator)
    for input_distribution in chosen.input_distributions:
        inputs = made(case, input_distribution)
        again = chosen.make_inputs(case, generator(), input_distribution)
        for spec in chosen.signature(case).inputs:
            assert tuple(inputs[spec.name].shape) == spec.shape
            assert inputs[spec.name].is_contiguous()
            assert torch.equal(inputs[spec.name], again[spec.name])


def test_bounds_and_named_distributions() -> None:
    inputs = made(CASES[3])
    assert 0 <= int(inputs["idx"].min()) <= int(inputs["idx"].max()) < 9
    assert inputs["keep"].dtype is torch.bool
    assert float(made(CASES[0], "shifted")["x"].float().mean()) == pytest.approx(80, abs=1)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_oracle_is_float64_and_the_baseline_within_bounds(case: KernelCase) -> None:
    chosen = operator_of(case)
    inputs = made(case)
    expected = Expected(chosen, case, inputs)
    assert {tensor.dtype for tensor in expected.outputs.values()} <= {torch.float64, torch.int64}
    baseline_output = chosen.baseline_output(case, inputs)
    assert [t.dtype for t in baseline_output.values()] == [
        torch_dtype(spec.dtype) for spec in chosen.signature(case).outputs
    ]
    assert expected.accepts(baseline_output)


def test_casts_in_the_definition_do_not_leave_float64() -> None:
    @operator("x[N] -> y[N]", dtypes=("fp32",))
    def casts(x: torch.Tensor) -> torch.Tensor:
        third = torch.full((1,), 1 / 3, dtype=torch.float32, device=x.device)
        return x.float().half().to(torch.bfloat16) * third + torch.zeros(1) + torch.softmax(x, 0, dtype=torch.float32)

    case = make_case(casts, (5,), "fp32", "torch")
    x = made(case)["x"]
    exact = x.double() * (1 / 3) + torch.softmax(x.double(), 0)
    assert torch.equal(casts.oracle(case, {"x": x})["y"], exact)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_shortcut_in_lower_precision_is_outside(case: KernelCase) -> None:
    chosen = operator_of(case)
    inputs = made(case)
    expected = Expected(chosen, case, inputs)
    low = {"fp32": torch.bfloat16, "fp16": torch.float8_e4m3fn, "bf16": torch.float8_e5m2}[case.dtype]
    rough = {n: t.to(low).to(t.dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    if case.operator == "quantise":
        rough = {"x": (inputs["x"] * 1.3)}
    assert not expected.accepts(chosen.baseline_output(case, rough))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_null_models_are_refused(case: KernelCase) -> None:
    assert lint_case(operator_of(case), case, generator()) == []


# --- symmetries and twins ---------------------------------------------------------------------------------------------


def triangular(size: int) -> torch.Tensor:
    return torch.randn(size, size, generator=generator()).tril()


@pytest.mark.parametrize("size", [1.0, 32.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_redrawn_tensor_keeps_what_held_of_all_of_it(size: float, seed: int) -> None:
    lower, positive = triangular(8), triangular(8).abs() + 1
    symmetric = lower + lower.T
    for tensor, changes in ((lower, 1), (positive, 1), (symmetric, 2)):
        found = redrawn(tensor, size, None, generator(seed))
        assert 1 <= int((found != tensor).sum()) <= changes
    assert torch.equal(redrawn(lower, size, None, generator(seed)).triu(1), torch.zeros(8, 8))
    assert float(redrawn(positive, size, None, generator(seed)).min()) > 0
    again = redrawn(symmetric, size, None, generator(seed))
    assert torch.equal(again, again.T)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("seed", range(4))
def test_tensors_of_8_bit_floats_are_redrawn(seed: int, kind: torch.dtype) -> None:
    lower = triangular(8)
    for tensor, changes in ((lower, 1), (lower + lower.T, 2), (lower.flatten(), 1)):
        found = redrawn(tensor.to(kind), 1.0, None, generator(seed))
        assert found.dtype is kind
        assert 1 <= int((found.float() != tensor.to(kind).float()).sum()) <= changes


PERMUTABLE = {"softmax": "M N", "scaled": "M N", "lookup": "D T", "quantise": "M N", "conv1d": "C F N"}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_permutable_axes_are_found(case: KernelCase) -> None:
    chosen = operator_of(case)
    assert isinstance(chosen, OpenOperator)
    assert " ".join(sorted(chosen.permutable_axes(case))) == PERMUTABLE[case.operator]
    inputs = made(case)
    expected = Expected(chosen, case, inputs)
    moved, undo = chosen.symmetry_transform(case, inputs, generator(3))
    assert any(not torch.equal(moved[name], inputs[name]) for name in inputs)
    assert expected.accepts(undo(chosen.baseline_output(case, moved)))


def test_what_depends_on_its_place_has_no_symmetry() -> None:
    @operator("x[N] -> y[N]", dtypes=("fp32",))
    def running(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    @operator("x[N] -> y[N]", dtypes=("fp32",))
    def flipped(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    @flipped.symmetry
    def flip(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return -x, lambda y: -y

    case = make_case(running, (30,), "fp32", "torch")
    assert not running.has_symmetry(case)
    assert "every timed input is a new problem" in running.examine(case, made(case))[0]
    other = make_case(flipped, (30,), "fp32", "torch")
    assert flipped.has_symmetry(other)
    inputs = made(other)
    moved, undo = flipped.symmetry_transform(other, inputs, generator())
    assert Expected(flipped, other, inputs).accepts(undo(flipped.baseline_output(other, moved)))
    assert "by the symmetry flip" in flipped.examine(other, inputs)[0]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_perturbed_problem_differs_visibly_in_one_element(case: KernelCase) -> None:
    chosen = operator_of(case)
    inputs = made(case)
    perturbed_problem = chosen.perturb(case, inputs, generator(5))
    assert sum(int((perturbed_problem[name] != inputs[name]).sum()) for name in inputs) == 1
    assert not Expected(chosen, case, perturbed_problem).accepts(chosen.baseline_output(case, inputs))


# --- what is refused, with the line -----------------------------------------------------------------------------------


def define(signature: str = "x[M,N] -> y[M,N]", **given: Any) -> OpenOperator:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return operator(signature, **given)(same)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"signature": "x[M -> y"}, "is no tensor"),
        ({"signature": "a[M] -> y[M]"}, "the parameters are (x), the signature's inputs are (a)"),
        ({"dtypes": ("float32",)}, "unknown dtype 'float32'"),
        ({"dtypes": "fp32"}, "dtypes= is a sequence"),
        ({"tolerance": 1e-3}, "tolerance= is allclose"),
        ({"tolerance": {"z": allclose(1e-3)}}, "unknown output in tolerance= 'z'"),
        ({"options": {"log": (True, False)}}, "unknown option 'log'"),
        ({"flops": "2*K"}, "unknown axis in a formula 'K'"),
        ({"name": "two words"}, "the name of an operator is an identifier"),
    ],
)
def test_misuse_says_the_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        define(**given)
    assert words in str(raised.value)
    assert re.match(rf"{HERE}:\d+: operator ", str(raised.value))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: operator("x[M] -> y[M]")(len), "stands before a function"),
        (lambda: operator(lambda x: x), "needs the signature first"),  # type: ignore[arg-type]
        (lambda: operator("x[M] -> y[M]")(lambda *x: x), "names all of its parameters"),
        (lambda: operator("x[M] -> y[M]")(eval("lambda x, *, mode='a': x")), "the option mode is a string"),
        (lambda: operator("x[M] -> y[M]")(eval("lambda x, *, mode=None: x")), "options are bool, int, float or str"),
        (lambda: allclose(-1.0), "rtol must be a number"),
        (lambda: allclose(), "needs an rtol or an atol"),
        (lambda: softmax.inputs(lambda x: x), "name the distribution"),
        (lambda: softmax.inputs("other")(lambda z: z), "unknown parameter of the distribution 'other'"),
        (lambda: softmax.inputs("shifted")(lambda x: x), "two distributions 'shifted'"),
        (lambda: softmax.symmetry(lambda z: z), "unknown parameter of the symmetry"),
    ],
)
def test_more_misuse(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        make()


def test_options_of_a_case_are_checked() -> None:
    with pytest.raises(UsageError, match="takes a value of type float"):
        make_case(scaled, (4, 4), "fp32", "torch", eps="small")
    with pytest.raises(UnknownName, match="value for scaled option 'mode'"):
        make_case(scaled, (4, 4), "fp32", "torch", mode="mean")
    assert make_case(scaled, (4, 4), "fp32", "torch", eps=1).options == {"eps": 1}
    with pytest.raises(UsageError, match=r"y has the size .* it must be 1 at least"):
        make_case(conv1d, (1, 1, 2, 1, 5, 1, 0), "fp32", "torch")


# --- files ------------------------------------------------------------------------------------------------------------

FILE = """
import torch
from pytest_klineage import operator

@operator("x[M] -> y[M]", dtypes=("fp32",))
def twice(x):
    return 2 * x
"""


def test_an_operator_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    path = tmp_path / "ops.py"
    path.write_text(FILE)
    case = make_case(f"{path}:twice", (4,), "fp32", "torch")
    assert case.operator == "twice"
    assert case.definition is not None
    assert case.definition.source == "ops.py:twice"
    assert torch.equal(operator_of(case).oracle(case, {"x": torch.ones(4)})["y"], torch.full((4,), 2.0).double())
    with pytest.raises(UsageError, match=r"unknown operator in ops\.py 'thrice'.*twice"):
        from_file(path, "thrice")
    with pytest.raises(UsageError, match="there is no file"):
        make_case(f"{tmp_path}/none.py:twice", (4,), "fp32", "torch")


def test_an_imported_function_is_defined_at_its_operator() -> None:
    found = operator("input[M] -> y[M]", name="softsign")(torch.nn.functional.softsign)
    assert found.definition.source == f"{HERE}:softsign"


def test_a_file_that_cannot_be_imported_says_the_line(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "ops.py").write_text("import torch\n\nimport no_such_package\n")
    with pytest.raises(UsageError, match=r"^ops\.py:3: importing it failed: ModuleNotFoundError: .*no_such_package"):
        make_case(f"{tmp_path}/ops.py:twice", (4,), "fp32", "torch")


def test_a_file_inside_a_package_may_import_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "klineage_test_pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "factor.py").write_text("FACTOR = 3\n")
    (package / "ops.py").write_text(
        FILE.replace("import torch", "from .factor import FACTOR").replace("2 * x", "FACTOR * x")
    )
    case = make_case(f"{package}/ops.py:twice", (4,), "fp32", "torch")
    assert float(operator_of(case).oracle(case, {"x": torch.ones(4)})["y"][0]) == 3.0


def test_the_digest_leaves_tests_out() -> None:
    def with_test(body: str) -> str:
        return f"{FILE}\n@mark\ndef test_it(gate):\n    {body}\n\nclass TestMore:\n    pass\n"

    assert definition_digest(with_test("gate()")) == definition_digest(with_test("gate(1)")) == definition_digest(FILE)
    assert definition_digest(FILE) != definition_digest(FILE.replace("2 * x", "3 * x"))
    assert definition_digest("not Python (") != definition_digest("nor this (")


@pytest.mark.filterwarnings("error")
def test_the_digest_does_not_depend_on_filters_of_warnings() -> None:
    """Python warns of an odd escape; as an error that would be text that is no Python, and taken whole."""
    odd = 'def half(x):\n    """Half of \\d."""\n    return x / 2\n\ndef test_it():\n    pass\n'
    assert definition_digest(odd) == definition_digest(odd.replace("    pass", "    return"))
