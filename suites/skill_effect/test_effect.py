"""Cards against none, against labels, against a placebo: all chains of all arms go forward together, a shot each.

pytest suites/skill_effect/test_effect.py --platform sm90 --klineage-executor batch:JUDGE --klineage-llm exchange \\
    --klineage-exchange REPLIES --klineage-model exchange --klineage-prices suites/exchange-prices.toml \\
    --klineage-trajectories DIR [-k "cards or none"]
pytest-klineage judge JUDGE --for 8m                                    # on a machine with the GPU, after each turn
pytest suites/skill_effect/test_effect.py --platform sm90 -k report --klineage-trajectories DIR
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from design import NONE, Design, read_design
from running import Runner, frozen_now, method_of, task_of

from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.studies.chains import chains_below, root_speeds
from pytest_klineage.lab.studies.effect import report

DESIGN = read_design()


@pytest.fixture(scope="session")
def is_frozen(design: Design) -> bool:
    """Whether cards and prompts are those of the frozen design."""
    return design.frozen == frozen_now(design)


@pytest.mark.parametrize("repeat", range(1, DESIGN.repeats + 1))
@pytest.mark.parametrize("arm", DESIGN.arms)
@pytest.mark.parametrize("target", DESIGN.targets)
def test_chain(
    target: str, arm: str, repeat: int, design: Design, runner: Runner, is_frozen: bool,
    agree: Callable[[Sequence[Rejudged]], None],
) -> None:  # fmt: skip
    """A model gets as far as it gets in its shots: only a replay can fail."""
    assert is_frozen or runner.models.is_replay, "cards or prompts are not the frozen ones: see test_frozen.py"
    task, cards = task_of(design, target), design.cards(target, arm)
    method = method_of(design, arm, task.case, cards, design.shots)
    settings = {
        "method": method.name, "arm": arm, "target": target, "repeat": str(repeat), "case": task.case.id,
        "platform": design.platform, "surface": design.surface.value, "steps": str(design.shots),
        "design": design.frozen.design if design.frozen is not None else "",
    }  # fmt: skip
    outcome = runner.run(
        f"effect/{arm}/{target}-{repeat}", task, method, settings, steps=design.shots, budget_usd=design.budget_usd,
        gate=design.gate,
    )  # fmt: skip
    agree(outcome.rejudged)


def test_report(design: Design, runner: Runner, write_line: Callable[[str], None]) -> None:
    """Says what the chains of the frozen design come to; others are in no comparison."""
    frozen = design.frozen.design if design.frozen is not None else NONE
    chains = [chain for chain in chains_below(runner.folder / "effect") if chain.design == frozen]
    if not chains:
        pytest.skip("no chain of the frozen design is there yet")
    write_line(report(design.study, chains, root_speeds(runner.verdicts)))
