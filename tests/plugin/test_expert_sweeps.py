"""The sweeps of suites/experts: every case is one that its operator and its reference take."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from pytest_klineage.operators import find_operator
from pytest_klineage.references import reference_of

SUITE = Path(__file__).parents[2] / "suites" / "experts" / "test_sweeps.py"
LEAST_CASES = {"gemm": 16, "fmha": 16, "topk": 12, "conv2d": 12, "gdn": 10}


def suite():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("expert_sweeps", SUITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the types of its records are looked up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("operator", LEAST_CASES)
def test_a_sweep_has_different_cases_that_its_operator_takes(operator: str) -> None:
    cases = suite().cases_of(operator)
    assert len({case.id for case in cases}) == len(cases) >= LEAST_CASES[operator]
    for case in cases:
        find_operator(case.operator).validate(case)


@pytest.mark.parametrize("operator", LEAST_CASES)
def test_a_sweeps_reference_takes_its_cases(operator: str) -> None:
    for case in suite().cases_of(operator):
        reference = reference_of(case)
        assert operator in reference.operators()
        assert not reference.limits(case, "sm90"), case.id


def test_every_operator_with_a_tilelang_expert_is_in_its_sweep() -> None:
    assert [case.operator for case in suite().in_tilelang()] == ["gemm", "fmha", "topk", "conv2d", "gdn"]
