"""Trials on disk: stored, read, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from admission_trials import (
    BAD,
    FAST,
    NO_KERNEL,
    block,
    source_of,
)

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.induction.admit import Compare, basis, roundtrip
from pytest_klineage.lab.induction.admit_store import VERDICTS_FILE, read_trial, save_trial, trial_folders, tried
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget, targets_for
from pytest_klineage.lab.library.lineages import StoredLineage, read_json, save_lineage
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import SkillCard, Verdict
from pytest_klineage.results.packed import read_lines


def test_a_trial_is_stored_and_read_and_replayed(
    run: Any, judge: Compare, card: SkillCard, target: AdmissionTarget, tmp_path: Path
) -> None:
    done = run(block(BAD), block(FAST))
    folder = tmp_path / "skills" / card.name
    first = basis(target, judge)
    saved = save_trial(folder, card.name, done, trajectory=run.trajectory, verdicts=run.verdicts, basis=first)
    assert saved.directory.name == "01-gemm-96x48x64-fp32"
    assert read_json(saved.directory / "basis.json", Verdict) == first
    assert (saved.target.rule, saved.target.expected) == (target.rule, target.expected)
    assert [path.name for path in trial_folders(folder)] == [saved.directory.name]
    read = read_trial(saved.directory)
    assert read == saved
    assert (read.kernel.digest, read.target.state.digest) == (done.kernel.digest, target.state.digest)
    assert (read.target.context, read.target.case) == (target.context, target.case)
    assert [verdict.source_digest for verdict in read_lines(saved.directory / VERDICTS_FILE, Verdict)] == [
        source_of(BAD).digest, done.kernel.digest,
    ]  # fmt: skip
    assert tried([read]) == {target.name}

    backend = ReplayBackend(read.trajectory)
    with Session.begin(tmp_path / "again.jsonl", backend, limit_usd=10.0, name="again") as session:
        again = roundtrip(card, read.target, session, judge)
    assert again.trial.outcome is done.trial.outcome
    assert again.trial.source_digest == done.trial.source_digest
    assert [found.agrees for found in again.rejudged] == [True, True]


def test_a_state_of_a_lineage_is_referred_to(
    run: Any, card: SkillCard, stored: StoredLineage, tmp_path: Path
) -> None:  # fmt: skip
    done = run(block(FAST), target=targets_for(card, [stored], {})[-1])
    at = save_lineage(tmp_path / "experts" / "lineage", stored.lineage, stored.sources)
    folder, files = tmp_path / "skills" / card.name, {"trajectory": run.trajectory, "verdicts": run.verdicts}
    saved = save_trial(folder, card.name, done, **files, lineages=[at])
    assert not list(saved.directory.glob("state.*"))
    assert saved.target.state.files == done.target.state.files
    assert saved.record.state.lineage == "../../../../experts/lineage"
    (at.directory / "lineage.json").unlink()
    with pytest.raises(UsageError, match=r"lineage\.json cannot be read"):
        read_trial(saved.directory)


def test_a_second_trial_lies_beside_the_first(run: Any, card: SkillCard, tmp_path: Path) -> None:
    done = run(NO_KERNEL, repairs=0)
    for number in (1, 2):
        saved = save_trial(tmp_path / "a", card.name, done, trajectory=run.trajectory, verdicts=run.verdicts)
        assert saved.directory.name.startswith(f"{number:02d}-")
        assert saved.kernel is None


def test_what_is_no_trial_is_not_stored(run: Any, card: SkillCard, tmp_path: Path) -> None:
    done = run(BackendFailed(Failure.OVERLOADED, "busy", billed=False))
    with pytest.raises(UsageError, match="no trial to store"):
        save_trial(tmp_path / "a", card.name, done, trajectory=run.trajectory, verdicts=run.verdicts)


def test_a_kernel_that_was_changed_is_noticed(run: Any, card: SkillCard, tmp_path: Path) -> None:
    done = run(block(FAST))
    saved = save_trial(tmp_path / "a", card.name, done, trajectory=run.trajectory, verdicts=run.verdicts)
    with (saved.directory / "kernel.cpp").open("a") as file:
        file.write("// faster\n")
    with pytest.raises(BadRecord, match="the digest of its kernel"):
        read_trial(saved.directory)
    (saved.directory / "trial.json").write_text("{}")
    with pytest.raises(BadRecord, match=r"trial\.json"):
        read_trial(saved.directory)
