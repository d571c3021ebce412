"""Repair: kernels of the lineages, broken in one place, one shot with and one without the card that knows of it.

pytest suites/skill_effect/test_repair.py --platform sm90 -k builds
pytest suites/skill_effect/test_repair.py --platform sm90 -k repair --klineage-executor batch:JUDGE \\
    --klineage-llm exchange --klineage-exchange REPLIES --klineage-model exchange \\
    --klineage-prices suites/exchange-prices.toml --klineage-trajectories DIR

The broken kernel is judged first, and its verdict stands in the prompt. One that the gate accepts is in no comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from design import CARDS, NONE, Design, read_design
from running import REFERENCE, Runner, method_of

from pytest_klineage import GateSettings, KlineageSession
from pytest_klineage.lab.optimizers.instructions import instructions_for
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.lab.studies.chains import chains_below
from pytest_klineage.lab.studies.effect import Study, report

DESIGN = read_design()


@pytest.mark.parametrize("name", DESIGN.repair.kernels)
def test_builds(name: str, design: Design, klineage_session: KlineageSession) -> None:
    """The broken kernel and the whole one are built: nothing but the gate says which is which."""
    if klineage_session.platform != design.platform:
        pytest.skip(f"the experiment is about {design.platform}")
    case, broken, whole = design.broken(name)
    assert broken.digest != whole.digest
    with klineage_session.gate_with(GateSettings(**(klineage_session.settings.gate | {"stage": "compile"}))) as gate:
        for source in (broken, whole):
            verdict = gate.judge(case, source)
            assert verdict.ok, f"{source.label}: {verdict.reasons[0].message}"


@pytest.mark.parametrize("arm", DESIGN.repair.arms)
@pytest.mark.parametrize("name", DESIGN.repair.kernels)
def test_repair(
    name: str, arm: str, design: Design, runner: Runner, agree: Callable[[Sequence[Rejudged]], None]
) -> None:
    """One shot at the broken kernel, timed against the whole one."""
    case, broken, whole = design.broken(name)
    text = instructions_for(
        case, broken.surface, design.platform, broken.entry, broken.flags, machine=design.machine, reference=REFERENCE
    )
    task = Task(case=case, platform=design.platform, surface=broken.surface, root=broken, instructions=text)
    method = method_of(design, arm, case, design.repair_cards(name, arm), 1)
    settings = {
        "method": method.name, "arm": arm, "target": name, "repeat": "1", "case": case.id, "steps": "1",
        "platform": design.platform, "surface": design.surface.value,
    }  # fmt: skip
    outcome = runner.run(
        f"repair/{arm}/{name}", task, method, settings, steps=1, budget_usd=design.budget_usd, against=whole,
        gate=design.gate | {"run_timeout_s": design.repair.run_timeout_s}, submit_root=True,
    )  # fmt: skip
    agree(outcome.rejudged)


def test_report(design: Design, runner: Runner, write_line: Callable[[str], None]) -> None:
    """Says what the repairs come to. A broken kernel that the gate accepted is no task."""
    asked = design.repair.at_least
    chains = chains_below(runner.folder / "repair")
    accepted = {chain.target for chain in chains if chain.root is not None and chain.root.ok}
    chains = [chain for chain in chains if chain.root is not None and chain.target not in accepted]
    if not chains:
        pytest.skip("no broken kernel is judged yet")
    study = Study(contrasts=((CARDS, NONE),), success=asked, seed=design.seed)
    write_line(f"accepted though broken, left out: {', '.join(sorted(accepted)) or 'no kernel'}")
    write_line(report(study, chains))
