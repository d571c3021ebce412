"""What the suite's tests share: when time is up, on which device they are, and the table at the end."""

from __future__ import annotations

import time

import pytest
from table import TEXT

from pytest_klineage import KlineageSession


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the rows by family, where any was measured."""
    if text := config.stash.get(TEXT, ""):
        terminalreporter.section("suites/flaggems")
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def until(request: pytest.FixtureRequest) -> float:
    """With --for: when nothing further is begun, in seconds of the monotonic clock; else 0."""
    minutes = request.config.getoption("--for")
    return time.monotonic() + 60 * minutes if minutes else 0.0


@pytest.fixture(scope="session")
def device(klineage_session: KlineageSession) -> str:
    """Product name of what kernels are judged on: times of another one are neither shown nor taken for known."""
    return klineage_session.gate.machine().device
