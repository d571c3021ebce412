"""The fixtures that a test may ask for. What they return is made elsewhere, and imported only when a test asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_klineage.plugin.session import SESSION_KEY, KlineageSession

if TYPE_CHECKING:
    from pytest_klineage.plugin.judging import KernelGate
    from pytest_klineage.records import KernelCase


@pytest.fixture(scope="session")
def klineage_session(pytestconfig: pytest.Config) -> KlineageSession:
    """Settings, platform and gate of this pytest process. The gate starts on first use and ends with the session."""
    return pytestconfig.stash[SESSION_KEY]


@pytest.fixture
def klineage_case(request: pytest.FixtureRequest) -> KernelCase:
    """The case that the test's kernel_case marker describes."""
    from pytest_klineage.plugin.markers import case_of

    case = case_of(request.node)
    if case is None:
        pytest.fail("klineage: the fixture klineage_case needs a kernel_case marker on the test", pytrace=False)
    return case


@pytest.fixture
def kernel_gate(request: pytest.FixtureRequest, klineage_session: KlineageSession) -> KernelGate:
    """Judge a kernel: kernel_gate("my_gemm.cpp") builds, checks and times it, and fails the test if it is bad."""
    from pytest_klineage.plugin.judging import KernelGate

    return KernelGate(klineage_session, request)
