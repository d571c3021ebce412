"""New problems made for timing: each has the bounds of its own honest run."""

from __future__ import annotations

import pytest
import torch

from pytest_klineage import operator
from pytest_klineage.operators import make_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records.messages import OpenCase
from pytest_klineage.worker.problems import LEAST_STOCK, STOCK, ProblemSet


@operator("x[N] -> y[N-2]", dtypes=("fp32",))
def cancelling(x: torch.Tensor) -> torch.Tensor:
    """Quotients by differences that cancel: the honest error is heavy-tailed, and there is no symmetry."""
    first, second = x[1:] - x[:-1], x[2:] - 2 * x[1:-1] + x[:-2]
    return x[:-2] - first[:-1].square() / second


def test_new_problems_have_their_own_bounds() -> None:
    case = make_case(cancelling, (256,), "fp32", "torch")
    problems = ProblemSet(OpenCase(case=case, secret="s", seeds=1, flush_bytes=0, threads=1))
    assert not problems.has_symmetry
    new = [problems.novel() for _ in range(20)]
    assert len({problem.expected.bounds["y"] for problem in new}) > 1
    for problem in new:
        assert problem.expected.bounds == Expected(cancelling, case, problem.inputs).bounds
        assert problem.expected.accepts(cancelling.baseline_output(case, problem.inputs))


@pytest.mark.parametrize(
    ("seconds", "expected", "said"), [(1.0, STOCK, ""), (4.5, 13, ""), (5.0, LEAST_STOCK, ""), (6.0, 0, "takes 6.0 s")]
)
def test_a_stock_fits_into_its_time(seconds: float, expected: int, said: str) -> None:
    problems = object.__new__(ProblemSet)
    problems.notes = ["before"]
    assert problems.size_of_stock(seconds) == expected
    assert problems.notes[:1] == ["before"]
    assert said in "".join(problems.notes[1:])
    assert bool(problems.notes[1:]) == bool(said)
