"""The steps of walked lineages, each timed again alone; what the walk saw on a busy machine comes first.

pytest suites/lineage/test_retime.py --platform cpu --for 2.5 [-k gemm]      2.5 minutes more; the same command goes on

What is timed is kept beside lineage.json; remove its file to time a lineage again. On a busy machine nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_klineage import KlineageSession
from pytest_klineage.lab.induction.retime import Disturbed, retime
from pytest_klineage.lab.induction.verdicts import GateJudge
from pytest_klineage.lab.library.lineages import find_lineages, load_lineage, read_record
from pytest_klineage.lab.library.rendering import speedup_text
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.records.verdict import DISTURBED
from pytest_klineage.results.retimed import keep_retimed, read_retimed

EXPERTS = Path(__file__).parents[2] / "experts"
BEGAN = time.monotonic()


class Step(NamedTuple):
    """One step of a lineage."""

    folder: Path
    index: int
    name: str
    was_disturbed: bool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every step of every lineage that was walked for the platform."""
    platform = metafunc.config.stash[SESSION_KEY].platform
    steps = [step for folder in find_lineages(EXPERTS) for step in steps_of(folder, platform)]
    steps.sort(key=lambda step: not step.was_disturbed)
    metafunc.parametrize("step", steps, ids=[step.name for step in steps])


def steps_of(folder: Path, platform: str) -> list[Step]:
    """The steps of one lineage; none of a lineage for another platform."""
    lineage = read_record(folder)
    found = []
    for index, (step, state) in enumerate(zip(lineage.transitions, lineage.states, strict=False)):
        disturbed = state.verdict is not None and state.verdict.code in DISTURBED
        name = f"{lineage.operator}-{lineage.surface.value}-{index + 1:02d}-{step.category.value}"
        found.append(Step(folder, index, name, disturbed))
    return found if lineage.platform == platform else []


def test_retime(step: Step, klineage_session: KlineageSession, request: pytest.FixtureRequest,
                write_line: Callable[[str], None]) -> None:  # fmt: skip
    """The step is timed, and was not disturbed."""
    minutes = request.config.getoption("--for")
    if not minutes:
        pytest.skip("writes beside lineage.json: pass --for MIN")
    stored = load_lineage(step.folder)
    transition = stored.lineage.transitions[step.index]
    if transition.digest in read_retimed(step.folder):
        pytest.skip("it was timed again already")
    if time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip("time is up; the same command goes on")
    try:
        found = retime(stored, step.index, GateJudge(klineage_session.gate))
    except Disturbed as error:
        pytest.skip(f"nothing is kept: {error}")
    keep_retimed(step.folder, found)
    figures = [speedup_text(effect) for effect in (transition.effect, found.effect) if effect is not None]
    write_line(f"{step.name}: {', now '.join(figures)}{', by the re-derived kernel' if found.better else ''}")
