"""The pytest plugin, which pytest finds by its entry point. Importing it loads neither torch nor the gate."""

from __future__ import annotations

import pytest

from pytest_klineage.plugin.distribution import pytest_xdist_auto_num_workers
from pytest_klineage.plugin.fixtures import kernel_gate, klineage_case, klineage_session
from pytest_klineage.plugin.hooks import Hooks
from pytest_klineage.plugin.markers import MARKER_LINE, pytest_generate_tests, pytest_pycollect_makeitem
from pytest_klineage.plugin.options import COMPARING_NAMES, add_options
from pytest_klineage.plugin.session import SESSION_KEY, KlineageSession

__all__ = [
    "kernel_gate",
    "klineage_case",
    "klineage_session",
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
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
