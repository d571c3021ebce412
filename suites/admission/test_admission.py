"""Skill cards: whole, still working, and admitted by trials on held-out targets. One test per card.

Without a language model what is committed is validated again; with one, cards are tried; with --klineage-llm=replay the
stored trials are replayed. All trials go forward together, one attempt each:

pytest suites/admission/test_admission.py --platform sm90 -k sm90 --steps 1 --klineage-executor batch:JUDGE \\
    --klineage-llm exchange --klineage-exchange REPLIES --klineage-model NAME --klineage-trajectories DIR
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import begun_of

from pytest_klineage.errors import KlineageError, Waiting
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.gate import Gate
from pytest_klineage.lab.induction.admit import REPAIRS, Compare, roundtrip
from pytest_klineage.lab.induction.admit_store import read_trial, trial_folders
from pytest_klineage.lab.induction.admit_targets import Shapes
from pytest_klineage.lab.library.cards import card_folders, read_card, readable_cards
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.lint import lint_folder
from pytest_klineage.lab.library.rendering import speedup_text
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.making import admit_card, open_targets
from pytest_klineage.lab.optimizers.recording import disagreements, lacks_instructions
from pytest_klineage.lab.plugin import Models
from pytest_klineage.plugin.session import KlineageSession
from pytest_klineage.records import CardStatus, Lineage, Trial, TrialOutcome


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every card, and one for every stored trial."""
    folders = card_folders(metafunc.config.getoption("--admission-skills"))
    if "folder" in metafunc.fixturenames:
        metafunc.parametrize("folder", folders, ids=[folder.name for folder in folders])
    if "stored" in metafunc.fixturenames:
        trials = [trial for folder in folders for trial in trial_folders(folder)]
        ids = [f"{trial.parents[1].name}-{trial.name}" for trial in trials]
        metafunc.parametrize("stored", trials, ids=ids)


def test_card_is_whole(folder: Path, skills: Path, citable: dict[str, Lineage], needs: Callable[[str], None]) -> None:
    """Fields, evidence in the committed lineages, SKILL.md, no other card again, a stored trial behind each success."""
    needs("none")
    found = lint_folder(folder, citable, readable_cards(skills))
    errors = [f"{finding.rule.value}: {finding.message}" for finding in found if not finding.warning]
    assert not errors
    kept = [read_trial(trial).record.trial for trial in trial_folders(folder)]
    card = read_card(folder)
    assert [trial for trial in card.log if not trial.imported] == kept


def test_card_still_works(
    folder: Path, klineage_session: KlineageSession, quickly: Compare, needs: Callable[[str], None]
) -> None:
    """The kernel that admitted the card is right, and still faster than the one that it was made from."""
    needs("none")
    if read_card(folder).status is not CardStatus.ADMITTED:
        pytest.skip("not admitted")
    trials = [read_trial(path) for path in trial_folders(folder)]
    success = [trial for trial in trials if admits(trial.record.trial)][-1]
    target, kernel = success.target, success.kernel
    if kernel is None or target.platform != klineage_session.platform:
        pytest.skip(f"admitted on {target.platform}; this is {klineage_session.platform}")
    verdict = quickly(target.case, kernel, target.state)
    if verdict.timing is not None and verdict.timing.speedup.high < 1:
        verdict = quickly(target.case, kernel, target.state)  # one start of each side differs by a percent or two
    reason = verdict.reasons[0]
    assert verdict.scored, f"{reason.code.value}: {reason.message}"
    speedup = verdict.timing.speedup if verdict.timing is not None else None
    assert speedup is not None
    assert speedup.high >= 1, f"{success.directory}: no effect is left here: {speedup_text(speedup)}"


def test_admit(
    folder: Path, lineages: list[StoredLineage], shapes: Shapes, klineage_models: Models, carefully: Compare,
    quickly: Compare, trial_gate: Gate | ExecutorGate, machine: str, needs: Callable[[str], None],
    write_line: Callable[[str], None], pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    """A model with the card alone makes a fresh kernel faster at a held-out place. Every trial is kept."""
    needs("model")
    if (card := read_card(folder)).status is CardStatus.RETIRED:
        pytest.skip(card.status.value)
    if trial_gate.platform not in {origin.platform for origin in card.origins}:
        pytest.skip(f"it is not from {trial_gate.platform}")
    targets = open_targets(folder, lineages, shapes, trial_gate.platform)
    if not targets and card.log:
        pytest.skip(f"{card.status.value}; every trial is made")
    if not targets:
        pytest.fail("no target is there to try it on; add shapes to targets.toml", pytrace=False)
    steps = pytestconfig.getoption("--steps") or 1 + REPAIRS
    try:
        attempts = admit_card(
            folder, targets, lineages, klineage_models, carefully, machine,
            lambda line: write_line(f"{folder.name}: {line}"), repairs=steps - 1, quickly=quickly,
        )  # fmt: skip
    except Waiting:
        raise
    except KlineageError as error:
        pytest.fail(f"{folder.name}: {error}", pytrace=False)
    if read_card(folder).status is not CardStatus.ADMITTED:
        said = "\n".join(attempts or ["no target is of any use"])
        pytest.fail(f"{folder.name} is not admitted:\n{said}", pytrace=False)


def admits(trial: Trial) -> bool:
    """Whether a trial is a reason to admit its card."""
    return trial.held_out and trial.outcome is TrialOutcome.SUCCESS


def test_replayed_trial(
    stored: Path, klineage_session: KlineageSession, quickly: Compare, needs: Callable[[str], None],
    replaying: Callable[[Path], Session],
) -> None:  # fmt: skip
    """The recorded replies give the recorded outcome, and the gate's verdicts are of the recorded classes."""
    needs("replay")
    trial = read_trial(stored)
    if trial.target.platform != klineage_session.platform:
        pytest.skip(f"tried on {trial.target.platform}; this is {klineage_session.platform}")
    card = read_card(stored.parents[1])
    repairs = int(begun_of(trial.trajectory).settings.get("repairs", REPAIRS))
    try:
        again = roundtrip(card, trial.target, replaying(trial.trajectory), quickly, repairs=repairs)
    except Waiting:
        raise
    except KlineageError as error:
        pytest.fail(str(error), pytrace=False)
    recorded = trial.record.trial
    if why := lacks_instructions(again.rejudged):
        pytest.skip(why)
    assert again.trial is not None, again.message
    assert (again.trial.outcome, again.trial.source_digest) == (recorded.outcome, recorded.source_digest)
    assert not (other := disagreements(again.rejudged)), other
