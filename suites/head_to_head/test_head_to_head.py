"""Head to head: methods, workloads and runs under equal budgets. Same model, gate, references and prices for all.

pytest suites/head_to_head --platform cpu -k "topk or conv2d"                     replays what is recorded, offline
pytest suites/head_to_head --platform cpu -k "topk or conv2d" --klineage-llm exchange --klineage-exchange DIR \\
    --klineage-model NAME [--methods klineage,adaexplore] [--runs 3] [--klineage-budget 10]
pytest-klineage report results/head_to_head --html page.html                      bars, cost curves, every step

A model gets as far as it gets: a bad kernel is data. A replay judges every kernel again, and fails where a verdict is
of another class than recorded, or where the tables are not those of the trajectories. Speeds are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from contest import (
    OPERATORS,
    VERDICTS_SUFFIX,
    ask,
    folder_of,
    methods_asked,
    replay,
    run_numbers,
)
from judged_roots import judging_once
from searches import judging, screening
from standings import standings_in, tables

from pytest_klineage import KlineageSession, UsageError
from pytest_klineage.lab.optimizers.recording import Rejudged
from pytest_klineage.lab.plugin import Models, model_settings
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.results.packed import line_files

FOLDER = "head_to_head"
Contest = tuple[str, str, int]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each method, workload and run; for a replay those that are recorded, if any are."""
    if "run" not in metafunc.fixturenames:
        return
    config = metafunc.config
    session = config.stash[SESSION_KEY]
    methods = methods_asked(config)
    found: list[Contest] = []
    if not asks_a_model(session):
        found = recorded_below(base_of(session) / session.platform, methods if config.getoption("--methods") else None)
    found = found or [(method, name, run) for method in methods for name in OPERATORS for run in run_numbers(config)]
    metafunc.parametrize(("method", "operator", "run"), found, ids=[f"{m}-{name}-{run}" for m, name, run in found])


@pytest.fixture(scope="module", autouse=True)
def written_tables(klineage_session: KlineageSession, request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the tables again from all trajectories, when a model was asked."""
    yield
    if not asks_a_model(klineage_session):
        return
    base, platform = base_of(klineage_session), klineage_session.platform
    found, problems = standings_in(base / platform)
    if not found:
        return
    text = tables(found, problems, platform)
    (base / f"{platform}.md").write_text(text)
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("")
        reporter.write_line(text)


def test_head_to_head(
    method: str, operator: str, run: int, klineage_session: KlineageSession, klineage_models: Models,
    write_line: Callable[[str], None], request: pytest.FixtureRequest, tmp_path: Path,
    agree: Callable[[Sequence[Rejudged]], None],
) -> None:  # fmt: skip
    """Asks a model, or replays what one has said. A case that cannot be judged here is skipped."""
    platform, nodeid = klineage_session.platform, request.node.nodeid
    name = f"{platform}/{folder_of(method, klineage_session.config)}/{operator}-{run}"
    try:
        if klineage_models.is_replay:
            quick, known = request.getfixturevalue("quick_gate"), request.getfixturevalue("judged_before")
            judge = judging_once(judging(klineage_session, quick, nodeid, label=method), known)
            outcome = replay(name, operator, klineage_session, klineage_models, judge, tmp_path / "replay.jsonl")
        else:
            kept = base_of(klineage_session) / f"{platform}{VERDICTS_SUFFIX}"
            judge = judging(klineage_session, klineage_session.gate, nodeid, label=method, keep=kept)
            screen = screening(klineage_session.gate, label=method)
            outcome = ask(name, method, operator, klineage_session, klineage_models, judge, write_line, kept, screen)
    except UsageError as error:
        pytest.fail(f"klineage: {error}", pytrace=False)
    if outcome.stopped == "not_judged":
        pytest.skip(f"klineage: {outcome.message}")
    agree(outcome.rejudged)


def test_tables_are_those_of_the_trajectories(klineage_session: KlineageSession) -> None:
    """The committed tables follow from the committed trajectories, to the letter; --publish makes them again."""
    if asks_a_model(klineage_session):
        pytest.skip("the tables are being made")
    base, platform = base_of(klineage_session), klineage_session.platform
    found, problems = standings_in(base / platform)
    if not found:
        pytest.skip(f"{base / platform} holds no run")
    path = base / f"{platform}.md"
    if klineage_session.config.getoption("--publish"):
        path.write_text(tables(found, problems, platform))
    assert path.is_file(), f"{path} is not there; --publish makes it from the trajectories"
    assert path.read_text() == tables(found, problems, platform)


def asks_a_model(session: KlineageSession) -> bool:
    """Whether a model is asked, so that trajectories and tables are made."""
    return model_settings(session.config).get("llm", "none") not in ("none", "replay")


def base_of(session: KlineageSession) -> Path:
    """The folder of trajectories and tables."""
    base: Path = model_settings(session.config).get("trajectories") or session.settings.results / FOLDER
    return base


def recorded_below(folder: Path, methods: list[str] | None) -> list[Contest]:
    """The runs whose trajectories lie below a folder: <method>/<operator>-<run>.jsonl."""
    found = []
    for path in line_files(folder, "*/*"):
        operator, _, run = path.stem.rpartition("-")
        if run.isdigit() and (methods is None or path.parent.name in methods):
            found.append((path.parent.name, operator, int(run)))
    return found
