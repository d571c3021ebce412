"""What lifting and admission share: lineages, cards, shapes, a quick gate, replays. Nothing is asked or judged here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import begun_of

from pytest_klineage.errors import UsageError
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.lab.induction.admit import Compare
from pytest_klineage.lab.induction.admit_targets import Shapes
from pytest_klineage.lab.induction.lift_groups import grouped, timed_sites
from pytest_klineage.lab.induction.verdicts import GateJudge, judged_in_peace
from pytest_klineage.lab.library.lineages import StoredLineage, find_all, judged_on
from pytest_klineage.lab.library.lint import known_lineages
from pytest_klineage.lab.library.outlines import read_outline
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.making import read_shapes, verified_lineages
from pytest_klineage.lab.optimizers.instructions import machine_text
from pytest_klineage.lab.plugin import Models
from pytest_klineage.plugin.session import KlineageSession
from pytest_klineage.records import Code, KernelCase, KernelSource, Lineage, Verdict

QUICK = {"time_limit_s": 1.5, "precision": 0.05, "busy_limit": 1.0, "spread_limit": 1e6}
"""Of a gate that need only see whether a kernel is right, and which of two is faster."""
TRIAL = {"time_limit_s": 4.0, "precision": 0.02}
"""Of the gate of trials: half of a card's effect is more than this. What the user gives counts, here and above."""
PATIENT = TRIAL | {"time_limit_s": 30.0}
"""Of trials whose pairs were too few in that time, as of kernels that take a tenth of a second and more."""
Replaying = Callable[[Path], Session]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Before groups are lifted: the steps that make no card, and why."""
    if not any(item.path.name == "test_lift.py" for item in items):
        return []
    _, left = grouped(timed_sites(verified_lineages(config.getoption("--admission-experts"))))
    return [f"makes no card: {each.site.position}: {each.reason}" for each in left]


@pytest.fixture(scope="session")
def skills(pytestconfig: pytest.Config) -> Path:
    """Folder of the cards."""
    folder: Path = pytestconfig.getoption("--admission-skills")
    return folder


@pytest.fixture(scope="session")
def lineages(pytestconfig: pytest.Config) -> list[StoredLineage]:
    """Every lineage, verified."""
    return verified_lineages(pytestconfig.getoption("--admission-experts"))


@pytest.fixture(scope="session")
def timed(lineages: list[StoredLineage]) -> dict[str, Lineage]:
    """Every lineage with the effects that count, by name."""
    return known_lineages(stored.directory for stored in lineages)


@pytest.fixture(scope="session")
def citable(lineages: list[StoredLineage], pytestconfig: pytest.Config) -> dict[str, Lineage]:
    """Lineages that cards may cite, by name: these, and outlines of those from kernels of others."""
    outlines = [read_outline(folder) for folder in find_all(pytestconfig.getoption("--admission-outlines"))]
    return {lineage.name: lineage for lineage in (*(stored.lineage for stored in lineages), *outlines)}


@pytest.fixture(scope="session")
def shapes(klineage_session: KlineageSession, pytestconfig: pytest.Config) -> Shapes:
    """Shapes to try cards at on this platform, by operator."""
    return read_shapes(pytestconfig.getoption("--admission-targets"), klineage_session.platform)


@pytest.fixture(scope="session")
def quickly(klineage_session: KlineageSession) -> Iterator[Compare]:
    """Compares two kernels as fast as may be."""
    with gate_with(klineage_session, QUICK) as gate:
        yield lambda case, source, against: gate.judge(case, source, reference_source=against)


@pytest.fixture(scope="session")
def trial_gate(klineage_session: KlineageSession) -> Iterator[Gate | ExecutorGate]:
    """The gate that trials are judged by."""
    with gate_with(klineage_session, TRIAL) as gate:
        yield gate


@pytest.fixture(scope="session")
def patient_gate(klineage_session: KlineageSession) -> Iterator[Gate | ExecutorGate]:
    """The gate of trials that were not decided for want of time."""
    with gate_with(klineage_session, PATIENT) as gate:
        yield gate


@pytest.fixture(scope="session")
def machine(klineage_session: KlineageSession, trial_gate: Gate | ExecutorGate, lineages: list[StoredLineage]) -> str:
    """The machine in a line; of a judge elsewhere that on which the lineages were judged: prompts need not wait."""
    known = [judged_on(stored.lineage) for stored in lineages if stored.lineage.platform == trial_gate.platform]
    there = next(filter(None, known), None) if klineage_session.elsewhere else None
    return machine_text(there or trial_gate.machine(), threads=trial_gate.settings.threads)


@pytest.fixture(scope="session")
def carefully(trial_gate: Gate | ExecutorGate, patient_gate: Gate | ExecutorGate) -> Compare:
    """Compares two kernels for a trial; again when others used the machine meanwhile, or time was too short.

    Raises UsageError when they do not stop: such a verdict says nothing, and a trajectory would keep it.
    """
    judge = GateJudge(trial_gate)
    patiently = GateJudge(patient_gate) if patient_gate.settings != trial_gate.settings else None

    def compare(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        verdict = judged_in_peace(judge, case, source, against, patiently)
        if verdict.code is Code.INCONCLUSIVE_BUSY:
            raise UsageError(
                f"{case.id}: {verdict.reasons[0].message}; wait until the machine is quiet, or raise "
                "--klineage-busy-limit, and go on with --klineage-resume"
            )
        return verdict

    return compare


def gate_with(session: KlineageSession, settings: dict[str, Any]) -> Gate | ExecutorGate:
    """A gate with these settings, but for what the user gave. Its processes start when it is first asked."""
    return session.gate_with(GateSettings(**(settings | session.settings.gate)))


@pytest.fixture
def replaying(tmp_path: Path) -> Iterator[Replaying]:
    """Opens a session that answers from a stored trajectory, with the recorded budget; its own goes to a scratch."""
    opened: list[Session] = []

    def replay(path: Path) -> Session:
        begun = begun_of(path)
        own = tmp_path / f"replay-{len(opened)}.jsonl"
        session = Session.begin(own, ReplayBackend(path), limit_usd=begun.budget_usd, name=begun.name)
        opened.append(session)
        return session

    yield replay
    for session in opened:
        session.close()


@pytest.fixture
def needs(klineage_models: Models) -> Callable[[str], None]:
    """Skips the test unless the chosen backend is of this kind: "none", "replay", or "model" for all others."""

    def check(kind: str) -> None:
        chosen = klineage_models.backend
        have = chosen if chosen in ("none", "replay") else "model"
        if have != kind:
            pytest.skip(f"{WHY[kind]}; chosen: --klineage-llm={chosen}")

    return check


WHY = {
    "none": "re-validates without a language model",
    "replay": "replays stored trajectories: --klineage-llm=replay",
    "model": "asks a language model: --klineage-llm=anthropic, command or exchange",
}
