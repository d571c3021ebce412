"""The signature line: what it means, and one clear error for everything that it cannot mean."""

from __future__ import annotations

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators.signature_line import formula, parse_signature


def test_all_of_the_grammar() -> None:
    line = parse_signature("inout x[M,2*N], idx[T]: int64 < V, w[] : fp32 -> y[(M+1)//2, N], n[3]: int32")
    assert [(t.name, t.dtype, t.inout, len(t.dims)) for t in line.inputs] == [
        ("x", "", True, 2), ("idx", "int64", False, 1), ("w", "fp32", False, 0),
    ]  # fmt: skip
    assert [tensor.name for tensor in line.results] == ["x", "y", "n"]
    assert line.names == ("M", "N", "T", "V")
    assert line.bare == {"M", "T", "N"}
    sizes = {"M": 5, "N": 4, "T": 2, "V": 9}
    assert line.inputs[0].spec(sizes, "bf16").shape == (5, 8)
    assert line.inputs[2].spec(sizes, "bf16").num_elements == 1
    assert line.outputs[0].spec(sizes, "bf16").shape == (3, 4)
    assert line.outputs[1].spec(sizes, "bf16").dtype == "int32"


@pytest.mark.parametrize(
    ("text", "value"), [("2*N", 6), ("(H + 2*pad - K)//stride + 1", 4), ("N % 2", 1), ("-N + 5", 2), ("7", 7)]
)
def test_formulas(text: str, value: int) -> None:
    assert formula(text).value({"N": 3, "H": 7, "pad": 1, "K": 3, "stride": 2}) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the signature is a string"),
        ("x[M]", "neither outputs after '->' nor inout tensors"),
        ("-> y[M]", "has no inputs"),
        ("x(M) -> y[M]", "'x(M)' is no tensor"),
        ("x[M/2] -> y[M]", "'M/2' is no size"),
        ("x[len(M)] -> y[M]", "'len(M)' is no size"),
        ("x[2.5] -> y[M]", "'2.5' is no size"),
        ("x[M] -> x[M]", "x occurs twice"),
        ("x[M] -> inout y[M]", "takes neither inout nor a bound"),
        ("x[M] < 3 -> y[M]", "only a tensor of integers has a bound"),
    ],
)
def test_misuse(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_signature(text)
    assert words in str(raised.value)


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="fp8_e4m3"):
        parse_signature("x[M]: float8 -> y[M]")


@pytest.mark.parametrize(("text", "sizes"), [("x[M-4] -> y[M]", {"M": 4}), ("x[M//K] -> y[M]", {"M": 4, "K": 0})])
def test_sizes_that_cannot_be(text: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"must be 1 at least|divides by zero"):
        parse_signature(text).inputs[0].spec(sizes, "fp32")
