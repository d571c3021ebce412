"""The sweeps of suites/experts: every case is one that its operator and its reference take."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.records import KernelCase
from pytest_klineage.references import reference_of
from pytest_klineage.references.functions import load_function, reference_files

SUITE = Path(__file__).parents[2] / "suites" / "experts" / "test_sweeps.py"
SMALL = {"linear": (40, 32, 48), "gated_linear": (40, 32, 48), "grouped_mm": (64, 32, 4, 48), "scaled_mm": (32, 64, 48)}
"""By operator of the GEMM's entries: a small shape."""
LEAST_CASES = {"gemm": 16, "fmha": 16, "topk": 12, "conv2d": 12, "gdn": 10} | dict.fromkeys(SMALL, 6)


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
        operator_of(case).validate(case)


@pytest.mark.parametrize("operator", LEAST_CASES)
def test_a_sweeps_reference_takes_its_cases(operator: str) -> None:
    for case in suite().cases_of(operator):
        reference = reference_of(case)
        assert operator in reference.operators()
        assert not reference.limits(case, "sm90"), case.id


def small(name: str) -> KernelCase:
    case: KernelCase = suite().cases_of(name)[0]
    return case.at_shape(dict(zip(case.shape, SMALL[name], strict=True)))


@pytest.mark.parametrize("name", SMALL)
def test_an_entrys_reference_computes_what_its_operator_defines(name: str) -> None:
    torch = pytest.importorskip("torch")
    case = small(name)
    inputs = operator_of(case).make_inputs(case, torch.Generator().manual_seed(3), DEFAULT_DISTRIBUTION)
    (expected,) = operator_of(case).oracle(case, inputs).values()
    found = load_function(case.reference, reference_files([case.reference]))(*inputs.values())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected.double(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SMALL)
def test_no_shortcut_passes_for_an_entry(name: str) -> None:
    torch = pytest.importorskip("torch")
    case = small(name)
    assert lint_case(operator_of(case), case, torch.Generator().manual_seed(3)) == []


@pytest.mark.parametrize("name", SMALL)
def test_the_gemms_folder_has_the_kernel_of_an_entry(name: str) -> None:
    module = suite()
    sweep = module.SWEEPS[name]
    expert = module.expert_of(sweep.expert, module.Surface.CUDA)
    source = expert.source(sweep.variant)
    assert f'extern "C" int {source.entry}(' in source.files[0].text


def test_every_operator_with_a_tilelang_expert_is_in_its_sweep() -> None:
    assert [case.operator for case in suite().in_tilelang()] == ["gemm", "fmha", "topk", "conv2d", "gdn"]
