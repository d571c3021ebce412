"""Where the head-to-head reads and writes. Its options, and the gate of its replays, are in suites/conftest.py.

results/head_to_head/<platform>/<method>/<workload>-<run>.jsonl   one optimization (--klineage-trajectories)
results/head_to_head/<platform>.verdicts.jsonl                    every verdict with its samples
results/head_to_head/<platform>.md                                the tables, made from the trajectories
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_klineage import KlineageSession
from pytest_klineage.lab.plugin import Models, model_settings

FOLDER = "head_to_head"


@pytest.fixture
def klineage_models(klineage_session: KlineageSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Language models as chosen, with the trajectories of this suite. Without any, what is recorded is replayed."""
    settings = dict(model_settings(klineage_session.config))
    if settings.get("llm", "none") == "none":
        settings["llm"] = "replay"
    models = Models(
        settings,
        trajectories=klineage_session.settings.results / FOLDER,
        replays=lambda: tmp_path_factory.mktemp("klineage-replay"),
        in_turns=klineage_session.elsewhere,
    )
    yield models
    models.close()
