"""The main tier: five kernels of experts/ against the platform's own library, at the paper's shapes for that platform.

pytest suites/main_tier --platform auto
pytest suites/main_tier --platform cpu --klineage-method naive --klineage-method expert
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_klineage import KernelCase, KernelGate, KlineageSession, UnknownName, paper_case
from pytest_klineage.library.experts import Expert, find_experts

EXPERTS = Path(__file__).parents[2] / "experts"
OPERATORS = ("conv2d", "fmha", "gdn", "gemm", "topk")
REFERENCE = "torch"

AT_LEAST = {"cpu": {"conv2d": 0.8, "fmha": 1.0, "gdn": 3.0, "gemm": 0.8, "topk": 3.0}}
"""Speedup that an expert must reach, by platform and operator; 1.0 where none is given.

GEMM and convolution on a CPU are what vendors tune most: coming near their library is the aim there.
"""
BASELINE_AT_LEAST = 1e-4
"""Other methods are measured, not held to a speed: a naive kernel is the starting point."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each operator and each method given with --klineage-method."""
    from pytest_klineage.plugin.session import SESSION_KEY

    methods = metafunc.config.stash[SESSION_KEY].methods
    known = sorted({name for expert in find_experts(EXPERTS) for name in expert.variants})
    for method in methods:
        if method not in known:
            pytest.fail(f"klineage: {UnknownName('method', method, known)}", pytrace=False)
    pairs = [(operator, method) for operator in OPERATORS for method in methods]
    metafunc.parametrize(("operator", "method"), pairs, ids=[f"{operator}-{method}" for operator, method in pairs])


@pytest.fixture
def expert(klineage_session: KlineageSession, operator: str, method: str) -> Expert:
    """The folder of kernels for this operator that has the method."""
    platform = klineage_session.platform
    for found in find_experts(EXPERTS, platform):
        if found.operator == operator and method in found.variants:
            return found
    pytest.skip(f"experts/{operator} has no {method!r} kernel for {platform}")


@pytest.fixture
def case(klineage_session: KlineageSession, operator: str, method: str) -> KernelCase:
    """The paper's case for this platform, with the speedup that the method must reach."""
    platform = klineage_session.platform
    chosen = paper_case(operator, "cpu" if platform == "cpu" else "gpu", REFERENCE)
    required = AT_LEAST.get(platform, {}).get(operator, 1.0) if method == "expert" else BASELINE_AT_LEAST
    return msgspec.structs.replace(chosen, at_least=required)


def test_main_tier(kernel_gate: KernelGate, expert: Expert, case: KernelCase, method: str) -> None:
    """The gate accepts the kernel: right on every input, not a wrapper, and as fast as the table above demands."""
    kernel_gate(expert.source(method), case=case)
