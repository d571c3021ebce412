"""Definitions of a user's own that are no oracle, and what the refusal says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_klineage import allclose, make_case, operator
from pytest_klineage.errors import UsageError
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, OpenOperator, operator_of
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.resolve import from_file
from pytest_klineage.records import KernelCase

HERE = "tests/unit/operators/test_broken_definitions.py"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(case: KernelCase, input_distribution: str = DEFAULT_DISTRIBUTION) -> dict[str, torch.Tensor]:
    return operator_of(case).make_inputs(case, generator(), input_distribution)


def broken(signature: str, function: Any, **given: Any) -> tuple[OpenOperator, KernelCase]:
    found = operator(signature, name="bad", **given)(function)
    return found, make_case(found, (8, 8), "fp32", "torch")


def random_answer(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def mutating(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) if x.dtype is torch.float32 else x * 2


def mutating_data(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float32:
        x.data.add_(1)
    return x * 2


def mutating_in_numpy(x: torch.Tensor) -> torch.Tensor:
    values = x.numpy()
    if x.dtype is torch.float32:
        values += 1
    return x * 2


def leaving(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-1]


def on_a_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.cuda() * 2


def not_installed(x: torch.Tensor) -> torch.Tensor:
    import no_such_package

    return no_such_package.double(x)


def not_a_tensor(x: torch.Tensor) -> Any:
    return 3.0


def whole_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.long()


def two_results(x: torch.Tensor) -> Any:
    return x, x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (random_answer, "the definition is not deterministic: two calls give different y"),
        (mutating, "the definition changes its input x"),
        (mutating_data, "the definition changes its input x"),
        (mutating_in_numpy, "the definition changes its input x"),
        (leaving, "the definition failed: SystemExit: 3"),
        (wrong_shape, "the definition returns y with shape (8, 7), the signature says (8, 8)"),
        (not_installed, "ModuleNotFoundError: No module named 'no_such_package'"),
        (not_a_tensor, "returns a float for y, not a tensor"),
        (whole_numbers, "returns int64 for y, the signature says fp32"),
        (two_results, "returns 2 results, the signature has 1: y"),
    ],
)
def test_a_definition_that_is_no_oracle(function: Any, words: str) -> None:
    bad, case = broken("x[M,N] -> y[M,N]", function)
    with pytest.raises(UsageError) as raised:
        bad.examine(case, made(case))
    assert words in str(raised.value)
    assert re.match(rf"{HERE}:\d+: operator bad: ", str(raised.value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the definition runs")
def test_a_definition_that_needs_a_gpu() -> None:
    bad, case = broken("x[M,N] -> y[M,N]", on_a_gpu)
    with pytest.raises(UsageError, match=r"this is a CPU: write it in plain PyTorch") as raised:
        bad.examine(case, made(case))
    line = int(str(raised.value).split(":")[1])
    assert "x.cuda()" in Path(__file__).read_text().splitlines()[line - 1]


def test_a_tolerance_that_accepts_a_null_model() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    bad, case = broken("x[M,N] -> y[M,N]", doubled, tolerance=allclose(atol=100.0))
    findings = lint_case(bad, case, generator())
    with pytest.raises(
        UsageError, match="accepts answers that compute nothing: zeros, one number everywhere"
    ) as raised:
        bad.object_to(findings)
    assert str(raised.value).startswith(HERE)


def test_an_input_without_influence_may_be_ignored() -> None:
    def doubled(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x * 2

    bad, case = broken("x[M,N], unused[N] -> y[M,N]", doubled)
    assert lint_case(bad, case, generator()) == ["input unused does not influence outputs"]
    fine, case = broken("x[M,N], unused[N] -> y[M,N]", doubled, may_ignore=("unused",))
    assert lint_case(fine, case, generator()) == []
    with pytest.raises(UsageError, match="unknown input or option in may_ignore= 'w'"):
        operator("x[M,N], unused[N] -> y[M,N]", may_ignore=("w",))(doubled)


def test_an_invalid_symmetry() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    bad, case = broken("x[M,N] -> y[M,N]", doubled)
    bad.symmetry(lambda x: (x + 1, lambda y: y))
    with pytest.raises(UsageError, match="this is no symmetry: it does not lead back to the right y"):
        bad.examine(case, made(case))
    bad.symmetry(lambda x: x)
    with pytest.raises(UsageError, match=r"the symmetry returns \(inputs, way back\)"):
        bad.examine(case, made(case))


def test_a_distribution_that_returns_something_else() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    bad, case = broken("x[M,N] -> y[M,N]", doubled)
    for name, function, words in (
        ("short", lambda x: x[:4], r"returns x with shape \(4, 8\)"),
        ("many", lambda x: (x, x), "took x and returned 2 values"),
        ("other", lambda x: {"z": x}, "which is no input"),
        ("raising", lambda x: 1 / 0, "ZeroDivisionError"),
    ):
        bad.inputs(name)(function)
        with pytest.raises(UsageError, match=words):
            made(case, name)


LOOP = """
from pytest_klineage import operator

for name in ("twice", "twice", "once"):
    @operator("x[M] -> y[M]", name=name)
    def found(x):
        return 2 * x
"""


def test_an_operator_that_importing_does_not_make(tmp_path: Path) -> None:
    path = tmp_path / "ops.py"
    path.write_text(LOOP)
    assert from_file(path, "once").name == "once"
    with pytest.raises(UsageError, match="makes 2 operators of this name"):
        from_file(path, "twice")
    inside = Path(__file__)
    with pytest.raises(UsageError, match="not inside of a test"):
        from_file(inside, "bad")
