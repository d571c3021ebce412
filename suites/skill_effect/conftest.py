"""What the tests of the experiment share: the design, and a runner of chains on the platform that it is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from design import Design, read_design
from running import Runner

from pytest_klineage import KlineageSession
from pytest_klineage.lab.plugin import Models


@pytest.fixture(scope="session")
def design() -> Design:
    """The design of the repository."""
    return read_design()


@pytest.fixture
def runner(
    design: Design, klineage_session: KlineageSession, klineage_models: Models, write_line: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> Runner:  # fmt: skip
    """Runs chains; skips the test on another platform."""
    if klineage_session.platform != design.platform:
        pytest.skip(f"the experiment is about {design.platform}")
    return Runner(klineage_session, klineage_models, request, write_line)
