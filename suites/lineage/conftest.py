"""What the lineage sessions share: a gate in a hurry, and a judge by it that shows its progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_klineage import Gate, GateSettings, KernelCase, KernelSource, KlineageSession, Verdict
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.lab.induction.verdicts import Judge

QUICK = {"time_limit_s": 1.0, "precision": 0.05}
"""A sign needs no sharp figure: one second of pairs at most, less when they agree within 5 %. Given options win."""


@pytest.fixture(scope="session")
def lineage_gate(klineage_session: KlineageSession) -> Iterator[Gate | ExecutorGate]:
    """A gate that stops as soon as a sign is clear."""
    settings = GateSettings(**(QUICK | klineage_session.settings.gate))
    with klineage_session.gate_with(settings) as gate:
        yield gate


@pytest.fixture
def quick_judge(
    request: pytest.FixtureRequest, lineage_gate: Gate | ExecutorGate, klineage_session: KlineageSession
) -> Judge:
    """Judges by that gate; every verdict is kept with the run's records."""

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        progress = klineage_session.progress
        if progress is not None:
            progress.begin(request.node.name)
        try:
            verdict = lineage_gate.judge(case, source, reference_source=against)
        finally:
            if progress is not None:
                progress.end()
        klineage_session.remember(request.node.nodeid, verdict)
        return verdict

    return judge
