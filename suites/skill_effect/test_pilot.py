"""The pilot: first shots without cards, to find thresholds that are neither out of reach nor too easy.

pytest suites/skill_effect/test_pilot.py --platform sm90 --klineage-executor batch:JUDGE --klineage-llm exchange \\
    --klineage-exchange REPLIES --klineage-model exchange --klineage-prices suites/exchange-prices.toml \\
    --klineage-trajectories DIR
pytest suites/skill_effect/test_pilot.py -k decision --klineage-trajectories DIR [--publish]     # thresholds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from design import Design, read_design, write_thresholds
from running import Runner, method_of, task_of

from pytest_klineage import UsageError
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.studies.chains import Chain, chains_below
from pytest_klineage.lab.studies.pilot import Decision, threshold

DESIGN = read_design()


@pytest.mark.parametrize("repeat", range(1, DESIGN.pilot.replies + 1))
@pytest.mark.parametrize("target", DESIGN.targets)
def test_pilot(
    target: str, repeat: int, design: Design, runner: Runner, agree: Callable[[Sequence[Rejudged]], None]
) -> None:
    """One shot of the arm without cards."""
    pilot = design.pilot
    task = task_of(design, target)
    method = method_of(design, pilot.arm, task.case, (), design.shots)
    settings = {
        "method": method.name, "arm": pilot.arm, "target": target, "repeat": str(repeat), "case": task.case.id,
        "platform": design.platform, "surface": design.surface.value, "steps": "1",
    }  # fmt: skip
    outcome = runner.run(
        f"pilot/{target}-{repeat}", task, method, settings, steps=1, budget_usd=design.budget_usd, gate=design.gate
    )
    agree(outcome.rejudged)


def test_decision(
    design: Design, runner: Runner, write_line: Callable[[str], None], pytestconfig: pytest.Config
) -> None:
    """Says of every target from which speed on a shot is to be a success."""
    chains = piloted(runner)
    if not chains:
        pytest.skip("no chain of the pilot is judged yet")
    made: dict[str, float | Decision] = {}
    for target in design.targets:
        shots = [chain.first for chain in chains if chain.target == target and chain.first is not None]
        speeds = [shot.speedup for shot in shots]
        found = threshold(speeds, replies=design.pilot.replies, rank=design.pilot.rank)
        said = ", ".join("wrong" if speed is None else f"{speed:.3f}x" for speed in speeds)
        write_line(f"{target}: {said or 'no reply'}: {found}")
        made[target] = found
    if pytestconfig.getoption("--publish"):
        try:
            write_thresholds(made)
        except UsageError as error:
            pytest.fail(f"klineage: {error}", pytrace=False)


def piloted(runner: Runner) -> list[Chain]:
    """The pilot's chains that have a verdict."""
    return [chain for chain in chains_below(runner.folder / "pilot") if chain.first is not None]
