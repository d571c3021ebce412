"""The pytest plugin, which pytest finds by its entry point. Importing it loads neither torch nor the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_klineage.plugin.distribution import pytest_xdist_auto_num_workers
from pytest_klineage.plugin.hooks import Hooks
from pytest_klineage.plugin.markers import (
    MARKER_LINE,
    case_of,
    pytest_generate_tests,
    pytest_make_collect_report,
    pytest_pycollect_makeitem,
)
from pytest_klineage.plugin.options import COMPARING_NAMES, add_options
from pytest_klineage.plugin.session import SESSION_KEY, KlineageSession

if TYPE_CHECKING:
    from pytest_klineage.plugin.judging import KernelGate
    from pytest_klineage.records import KernelCase

__all__ = [
    "kernel_gate",
    "klineage_case",
    "klineage_session",
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_make_collect_report",
    "pytest_pycollect_makeitem",
    "pytest_xdist_auto_num_workers",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini keys."""
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that this plugin calls."""
    from pytest_klineage.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and this process's state; check the names in options before anything is collected."""
    config.addinivalue_line("markers", MARKER_LINE)
    session = config.stash[SESSION_KEY] = KlineageSession(config)
    if session.settings.given:
        session.check()
    config.pluginmanager.register(Hooks(session), "klineage-hooks")
    if not set(COMPARING_NAMES).isdisjoint(session.settings.given):
        from pytest_klineage.plugin.comparison.baselines import register_baselines

        register_baselines(session)


@pytest.fixture(scope="session")
def klineage_session(pytestconfig: pytest.Config) -> KlineageSession:
    """Settings, platform and gate of this pytest process. The gate starts on first use and ends with the session."""
    return pytestconfig.stash[SESSION_KEY]


@pytest.fixture
def klineage_case(request: pytest.FixtureRequest) -> KernelCase:
    """The case that the test's kernel_case marker describes."""
    case = case_of(request.node)
    if case is None:
        pytest.fail("klineage: the fixture klineage_case needs a kernel_case marker on the test", pytrace=False)
    return case


@pytest.fixture
def kernel_gate(request: pytest.FixtureRequest, klineage_session: KlineageSession) -> KernelGate:
    """Judge a kernel: kernel_gate("my_gemm.cpp") builds, checks and times it, and fails the test if it is bad."""
    from pytest_klineage.plugin.judging import KernelGate

    return KernelGate(klineage_session, request)
