"""The pilot: first shots without cards, to find targets that are neither out of reach nor too easy.

pytest suites/skill_effect/test_pilot.py --platform sm90 --klineage-executor batch:JUDGE --klineage-llm exchange \\
    --klineage-exchange REPLIES --klineage-model exchange --klineage-prices suites/exchange-prices.toml \\
    --klineage-trajectories DIR
pytest suites/skill_effect/test_pilot.py -k decision --klineage-trajectories DIR     # which targets to keep
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from design import Design, read_design
from running import Runner, method_of, task_of

from pytest_klineage.lab.optimizers.recording import disagreements
from pytest_klineage.lab.studies.chains import Chain, chains_below
from pytest_klineage.lab.studies.pilot import Decision, decide

DESIGN = read_design()


@pytest.mark.parametrize("repeat", range(1, DESIGN.pilot.most + 1))
@pytest.mark.parametrize("target", DESIGN.targets)
def test_pilot(target: str, repeat: int, design: Design, runner: Runner) -> None:
    """One shot of the arm without cards. Later repeats wait until the first ones ask for them."""
    pilot = design.pilot
    if repeat > pilot.first and decided(design, target, piloted(runner)) is not Decision.MORE:
        pytest.skip(f"the first {pilot.first} decide, or are not judged yet")
    task = task_of(design, target)
    method = method_of(design, pilot.arm, task.case, (), design.shots)
    settings = {
        "method": method.name, "arm": pilot.arm, "target": target, "repeat": str(repeat), "case": task.case.id,
        "platform": design.platform, "surface": design.surface.value, "steps": "1",
    }  # fmt: skip
    outcome = runner.run(
        f"pilot/{target}-{repeat}", task, method, settings, steps=1, budget_usd=design.budget_usd, gate=design.gate
    )
    assert not (found := disagreements(outcome.rejudged)), found


def test_decision(design: Design, runner: Runner, write_line: Callable[[str], None]) -> None:
    """Says of every target whether it is kept."""
    chains = piloted(runner)
    if not chains:
        pytest.skip("no chain of the pilot is judged yet")
    for target in design.targets:
        shots = [chain.first for chain in chains if chain.target == target and chain.first is not None]
        won = sum(shot.succeeds(design.success) for shot in shots)
        write_line(f"{target}: {won} of {len(shots)}: {decided(design, target, chains).value}")


def piloted(runner: Runner) -> list[Chain]:
    """The pilot's chains that have a verdict."""
    return [chain for chain in chains_below(runner.folder / "pilot") if chain.first is not None]


def decided(design: Design, target: str, chains: list[Chain]) -> Decision:
    """What the replies so far say of a target."""
    pilot = design.pilot
    shots = [chain.first for chain in chains if chain.target == target and chain.first is not None]
    won = sum(shot.succeeds(design.success) for shot in shots)
    return decide(won, len(shots), first=pilot.first, most=pilot.most, rates=(pilot.least_rate, pilot.most_rate))
