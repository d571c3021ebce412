"""Where the head-to-head reads and writes, and the gate of its replays. Its options are in suites/conftest.py.

results/head_to_head/<platform>/<method>/<workload>-<run>.jsonl   one optimization (--klineage-trajectories)
results/head_to_head/<platform>.verdicts.jsonl                    every verdict with its samples
results/head_to_head/<platform>.md                                the tables, made from the trajectories
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_klineage import GateSettings, KlineageSession, gate
from pytest_klineage.plugin.models import Models
from pytest_klineage.records import Verdict

FOLDER = "head_to_head"
QUICK = {"time_limit_s": 0.5, "precision": 0.2, "seeds": 1, "busy_limit": 1.0}
"""Of the gate of replays, which need only see whether a kernel is right. What the user gives counts."""


@pytest.fixture
def klineage_models(klineage_session: KlineageSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Language models as chosen, with the trajectories of this suite. Without any, what is recorded is replayed."""
    settings = dict(klineage_session.settings.llm)
    if settings.get("llm", "none") == "none":
        settings["llm"] = "replay"
    models = Models(
        settings,
        trajectories=klineage_session.settings.results / FOLDER,
        replays=lambda: tmp_path_factory.mktemp("klineage-replay"),
    )
    yield models
    models.close()


@pytest.fixture(scope="session")
def quick_gate(klineage_session: KlineageSession) -> Iterator[gate.Gate]:
    """The gate that replays are judged by. Its processes start when it is first asked."""
    settings = GateSettings(**(QUICK | klineage_session.settings.gate))
    with gate.Gate(klineage_session.platform, settings, progress=klineage_session.progress) as quick:
        yield quick


@pytest.fixture(scope="session")
def judged_before() -> dict[tuple[str, str], Verdict]:
    """Verdicts of this session's replays by case and source."""
    return {}
