"""Do the lineages of experts/ still hold on this machine? Every state is built and judged, every step compared.

pytest suites/lineage --platform cpu                       # all of them: five minutes at most on two cores
pytest suites/lineage --platform cpu -k gemm
pytest suites/lineage --platform cpu --klineage-time-limit 10 --klineage-precision 0.01    # as sharp as when recorded
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from pytest_klineage import BadRecord, UsageError
from pytest_klineage.lab.induction.revalidate import recheck
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.library.lineages import all_problems_of, find_lineages, load_lineage, read_record, read_timed
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.records import Status

EXPERTS = Path(__file__).parents[2] / "experts"
NONE = pytest.mark.skip(reason="experts/ holds no lineage for this platform; test_induce.py makes one with a model")


class State(NamedTuple):
    """One state of a committed lineage."""

    folder: Path
    index: int


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every lineage of the platform, and one for each of its states."""
    folders = find_lineages(EXPERTS)
    if "lineage_folder" in metafunc.fixturenames:
        found = [pytest.param(folder, id=_name(folder)) for folder in folders]
        metafunc.parametrize("lineage_folder", found or [pytest.param(None, marks=NONE)])
    if "state" in metafunc.fixturenames:
        platform = metafunc.config.stash[SESSION_KEY].platform
        states = [param for folder in folders for param in _states(folder, platform)]
        metafunc.parametrize("state", states or [pytest.param(None, marks=NONE)])


def test_chain(lineage_folder: Path) -> None:
    """Files, edits (the re-derived ones too), verdicts and digests of the lineage fit together."""
    problems = all_problems_of(load_lineage(lineage_folder))
    if problems:
        pytest.fail(f"the lineage {_name(lineage_folder)} is broken:\n  " + "\n  ".join(problems), pytrace=False)


def test_state(state: State, quick_judge: Judge) -> None:
    """The state is right, and the step that leads on from it has the recorded sign."""
    stored = msgspec.structs.replace(load_lineage(state.folder), lineage=read_timed(state.folder))
    found = recheck(stored, state.index, quick_judge)
    if found.problem:
        pytest.fail(f"{_name(state.folder)}, state {state.index:02d} {found.state}: {found.problem}", pytrace=False)
    if found.verdict.status is Status.SKIPPED:
        pytest.skip(f"{_name(state.folder)}: {found.note}")


def _name(folder: Path) -> str:
    return "-".join(folder.parts[-3:-1])


def _states(folder: Path, platform: str) -> list[object]:
    """Parameters for the states of one lineage; none for a record that cannot be read, which test_chain reports."""
    try:
        lineage = read_record(folder)
    except (BadRecord, UsageError):
        return []
    if lineage.platform != platform:
        return []
    return [
        pytest.param(State(folder, index), id=f"{_name(folder)}-{index:02d}-{state.name}")
        for index, state in enumerate(lineage.states)
    ]
