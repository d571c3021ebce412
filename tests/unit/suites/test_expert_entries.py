"""The sweeps of the GEMM's entries: their operators, what these are timed against, and the kernels that are named."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.records import KernelCase, Surface
from pytest_klineage.references import reference_of
from pytest_klineage.references.functions import load_function, reference_files

torch = pytest.importorskip("torch")

SUITE = Path(__file__).parents[3] / "suites" / "experts" / "test_sweeps.py"
SMALL = {"linear": (40, 32, 48), "gated_linear": (40, 32, 48), "grouped_mm": (64, 32, 4, 48), "scaled_mm": (32, 64, 48)}
"""By operator: a small shape."""
LEAST_CASES = 6


@cache
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_entries", SUITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the types of its records are looked up
    spec.loader.exec_module(module)
    return module


def small(name: str) -> KernelCase:
    case: KernelCase = suite().cases_of(name)[0]
    return case.at_shape(dict(zip(case.shape, SMALL[name], strict=True)))


@pytest.mark.parametrize("name", SMALL)
def test_a_sweep_has_cases_that_operator_and_reference_take(name: str) -> None:
    cases = suite().cases_of(name)
    assert len({case.id for case in cases}) == len(cases) >= LEAST_CASES
    for case in cases:
        operator_of(case).validate(case)
        assert case.operator == name
        assert not reference_of(case).limits(case, "sm90"), case.id


@pytest.mark.parametrize("name", SMALL)
def test_a_reference_computes_what_the_operator_defines(name: str) -> None:
    case = small(name)
    inputs = operator_of(case).make_inputs(case, torch.Generator().manual_seed(3), DEFAULT_DISTRIBUTION)
    (expected,) = operator_of(case).oracle(case, inputs).values()
    found = load_function(case.reference, reference_files([case.reference]))(*inputs.values())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected.double(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SMALL)
def test_no_shortcut_passes_for_an_answer(name: str) -> None:
    case = small(name)
    assert lint_case(operator_of(case), case, torch.Generator().manual_seed(3)) == []


@pytest.mark.parametrize("name", SMALL)
def test_a_sweep_names_a_kernel_that_is_there(name: str) -> None:
    sweep = suite().SWEEPS[name]
    expert = suite().expert_of(sweep.expert, Surface.CUDA)
    source = expert.source(sweep.variant)
    assert f'extern "C" int {source.entry}(' in source.files[0].text
