"""The lineages that authors wrote, validated step by step: each judged, and brought back by a model.

pytest suites/lineage/test_derive.py --platform sm90 -k gemm --klineage-llm anthropic --klineage-model NAME
pytest suites/lineage/test_derive.py --platform sm90 --klineage-executor batch:JUDGE --klineage-llm exchange \\
    --klineage-exchange REPLIES --klineage-model NAME --klineage-trajectories DIR    # all steps go forward together

With --lineages DIR it reads DIR/<operator>/<platform>-<surface>/stages instead of experts/, such as kernels of others.
What is done is kept beside lineage.json, and is not asked for again; remove its files to make a step again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_klineage import KlineageSession
from pytest_klineage.lab.induction.derive import derive
from pytest_klineage.lab.induction.verdicts import GateJudge
from pytest_klineage.lab.library.lineages import KEPT, find_hand_made, judged_on, load_lineage, read_record
from pytest_klineage.lab.optimizers.instructions import instructions_for, machine_text
from pytest_klineage.plugin.session import SESSION_KEY

if TYPE_CHECKING:
    from pytest_klineage.lab.plugin import Models

REFERENCE = "another kernel for the same case"
NO_MODEL = "re-derives steps with a language model: choose one with --klineage-llm=anthropic, command or exchange"


class Step(NamedTuple):
    """One step of a lineage."""

    folder: Path
    index: int
    name: str


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every step of every lineage that an author wrote for the platform."""
    platform, root = metafunc.config.stash[SESSION_KEY].platform, metafunc.config.getoption("--lineages")
    steps = [step for folder in find_hand_made(root) for step in steps_of(folder, platform)]
    metafunc.parametrize("step", steps, ids=[step.name for step in steps])


def steps_of(folder: Path, platform: str) -> list[Step]:
    """The steps of one lineage; none of a lineage for another platform."""
    lineage = read_record(folder)
    stem = f"{lineage.operator}-{lineage.platform}-{lineage.surface.value}"
    return [
        Step(folder, index, f"{stem}-{state.name}")
        for index, state in enumerate(lineage.states[1:])
        if lineage.platform == platform
    ]


def test_derive(
    step: Step, klineage_models: Models, klineage_session: KlineageSession, write_line: Callable[[str], None]
) -> None:
    """The simpler state is right, and a model that saw it with a sentence brought the next one's speed back."""
    if (step.folder / KEPT / f"{step.index + 1:02d}.jsonl").exists():
        pytest.skip(f"{step.name} is done; remove its files in {step.folder / KEPT} to make it again")
    if klineage_models.backend in ("none", "replay"):
        pytest.skip(NO_MODEL)
    session = klineage_models.session(f"derive/{step.name}")
    judge, text = GateJudge(klineage_session.gate), contract(step, klineage_session)
    found = derive(step.folder, step.index, session, judge, contract=text)
    came = "derived" if found.forward.source is not None else "not derived"
    write_line(f"{step.name}: {came}, {len(found.forward.rejected)} attempts refused")


def contract(step: Step, session: KlineageSession) -> str:
    """What the kernel must promise, as text for a model."""
    stored = load_lineage(step.folder)
    source = stored.sources[step.index]
    machine = machine_text(judged_on(stored.lineage) or session.gate.machine(), threads=session.gate_settings.threads)
    return instructions_for(
        stored.lineage.case, source.surface, session.platform, source.entry, source.flags, machine=machine,
        reference=REFERENCE,
    )  # fmt: skip
