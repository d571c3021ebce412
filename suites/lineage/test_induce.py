"""Make lineages: walk the experts of experts/ backward with a model, and keep what was validated beside them.

pytest suites/lineage/test_induce.py --platform cpu -k gemm --klineage-llm anthropic --klineage-model NAME
pytest suites/lineage/test_induce.py --platform cpu -k gemm --klineage-llm exchange --klineage-exchange DIR \\
    --klineage-model unbilled
pytest suites/lineage/test_induce.py --platform cpu -k gemm --klineage-llm replay     # the kept trajectories again

With --lineages DIR walks are kept in DIR/<operator>/<platform>-<surface>/lineage instead of experts/.
A walk that was ended goes on with --klineage-resume=lineage/gemm-cpu-cpp, and with a larger --klineage-budget.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_klineage import KernelCase, KernelSource, KlineageSession, Verdict
from pytest_klineage.lab.induction.lineage_store import TRAJECTORY_FILE, replay
from pytest_klineage.lab.induction.verdicts import GateJudge, Judge
from pytest_klineage.lab.induction.walk import WalkOrigin
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.lineages import FOLDER, LINEAGE_FILE, read_record
from pytest_klineage.lab.making import expert_name, instruction_sets, make_lineage, walk_origin
from pytest_klineage.lab.optimizers.instructions import machine_text
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.results.packed import is_there

if TYPE_CHECKING:
    from pytest_klineage.lab.plugin import Models

EXPERTS = Path(__file__).parents[2] / "experts"
NO_MODEL = (
    "makes a lineage with a language model: choose one with --klineage-llm=anthropic, command or exchange, or replay "
    "the kept trajectories with --klineage-llm=replay"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every expert of the platform."""
    platform = metafunc.config.stash[SESSION_KEY].platform
    experts = {expert_name(expert): expert for expert in find_experts(EXPERTS, platform) if "expert" in expert.variants}
    metafunc.parametrize("expert", experts.values(), ids=list(experts))


@pytest.fixture
def kept(expert: Expert, request: pytest.FixtureRequest) -> Path:
    """The folder of an expert's walk."""
    root: Path = request.config.getoption("--lineages")
    return root / expert.directory.relative_to(EXPERTS) / FOLDER


def test_induce(
    expert: Expert, klineage_models: Models, klineage_session: KlineageSession, kept: Path,
    write_line: Callable[[str], None],
) -> None:  # fmt: skip
    """Walk from the expert to a naive kernel, and keep the lineage; it ends anywhere else only with a reason."""
    if klineage_models.backend in ("none", "replay"):
        pytest.skip(NO_MODEL if klineage_models.backend == "none" else "test_replay replays")
    name = f"lineage/{expert_name(expert)}"
    if (kept / LINEAGE_FILE).exists() and read_record(kept).complete:
        pytest.skip(f"{kept} is whole; remove the folder to make it again")
    origin = _origin(expert, klineage_session)
    judge = _judge(klineage_session, name)
    lineage = make_lineage(
        origin, expert, klineage_models, judge, lambda line: write_line(f"{origin.name} {line}"), kept
    ).lineage  # fmt: skip
    write_line(f"{lineage.name}: {len(lineage.transitions)} steps, {lineage.termination.value}")
    if not lineage.complete:
        pytest.fail(
            f"the walk ended before the naive kernel, after {len(lineage.transitions)} steps: "
            f"{lineage.termination.value}: {lineage.termination_reason}\nWhat was validated is kept. To go on after a "
            f"budget or an interruption: --klineage-resume={name}",
            pytrace=False,
        )


def test_replay(
    expert: Expert, klineage_models: Models, quick_judge: Judge, kept: Path, write_line: Callable[[str], None]
) -> None:  # fmt: skip
    """The kept replies lead to the kept lineage, and today's verdicts are of the kept classes."""
    if not klineage_models.is_replay:
        pytest.skip("replays kept trajectories with --klineage-llm=replay")
    if not is_there(kept / TRAJECTORY_FILE):
        pytest.skip(f"{expert_name(expert)} has no kept trajectory")
    again = replay(kept, quick_judge, report=lambda line: write_line(f"{expert_name(expert)} {line}"))
    wrong = [f"the lineage is another one: {difference}" for difference in again.differences]
    wrong += [
        f"kernel {pair.recorded.source_digest[:12]} was {pair.recorded.code.value} and is {pair.verdict.code.value}: "
        f"{pair.verdict.reasons[0].message}"
        for pair in again.rejudged
        if not pair.agrees
    ]
    if wrong:
        pytest.fail(f"the replay of {expert_name(expert)} differs:\n  " + "\n  ".join(wrong), pytrace=False)


def _judge(session: KlineageSession, name: str) -> Judge:
    """The session's own gate, with the precision that the user asked for."""
    if session.elsewhere:
        return GateJudge(session.gate)

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        if session.progress is not None:
            session.progress.begin(name)
        try:
            return session.gate.judge(case, source, reference_source=against)
        finally:
            if session.progress is not None:
                session.progress.end()

    return judge


def _origin(expert: Expert, session: KlineageSession) -> WalkOrigin:
    features = instruction_sets() if session.platform == "cpu" else ()
    machine = machine_text(session.gate.machine(), threads=session.gate_settings.threads, features=features)
    return walk_origin(expert, session.platform, machine)
