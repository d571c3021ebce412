"""Trials on disk: stored, read, replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admission_trials import (
    AGAIN,
    BAD,
    FAST,
    NO_KERNEL,
    SLOW,
    block,
    source_of,
)

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.induction.admit import Compare, Roundtrip, basis, roundtrip
from pytest_klineage.lab.induction.admit_store import (
    TRIAL_FILE,
    VERDICTS_FILE,
    StoredTrial,
    read_trial,
    save_trial,
    trial_folders,
    tried,
)
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget
from pytest_klineage.lab.induction.derive import without_header
from pytest_klineage.lab.library.cards import card_folders
from pytest_klineage.lab.library.lineages import StoredLineage, read_json, save_lineage
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import KernelSource, SkillCard, Verdict
from pytest_klineage.results.packed import read_lines

LONG = "// a line that no kernel changes\n" * 40
ROOT = Path(__file__).parents[5]
Save = Callable[..., StoredTrial]


@pytest.fixture
def save(run: Any, card: SkillCard, tmp_path: Path) -> Save:
    """Stores a trial on a state, of which nothing was judged, with a kernel."""

    def saved(state: KernelSource, kernel: KernelSource, **options: Any) -> StoredTrial:
        done: Roundtrip = run(NO_KERNEL, repairs=0)
        target = msgspec.structs.replace(done.target, state=state)
        trial = msgspec.structs.replace(done.trial, source_digest=kernel.digest)
        done = msgspec.structs.replace(done, target=target, trial=trial, kernel=kernel)
        files = {"trajectory": run.trajectory, "verdicts": run.verdicts}
        return save_trial(tmp_path / "skills" / card.name, card.name, done, **files, **options)

    return saved


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


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(source_of(SLOW), id="state"),
        pytest.param(source_of(AGAIN), id="re-derived"),
        pytest.param(without_header(source_of(AGAIN)), id="without header"),
    ],
)
def test_what_a_lineage_has_is_referred_to(
    save: Save, state: KernelSource, stored: StoredLineage, tmp_path: Path
) -> None:
    at = save_lineage(tmp_path / "experts" / "lineage", stored.lineage, stored.sources)
    saved = save(state, source_of(FAST), lineages=[at])
    assert not list(saved.directory.glob("state.*"))
    assert (saved.target.state.files, saved.target.state.digest) == (state.files, state.digest)
    assert saved.record.state.lineage == "../../../../experts/lineage"
    path = saved.directory / TRIAL_FILE
    path.write_text(path.read_text().replace(state.digest, "0" * 64))
    with pytest.raises(BadRecord, match="experts/lineage has no kernel 000000000000"):
        read_trial(saved.directory)
    (at.directory / "lineage.json").unlink()
    with pytest.raises(UsageError, match=r"lineage\.json cannot be read"):
        read_trial(saved.directory)


@pytest.mark.parametrize("end", ["", "no line feed", "\r\n\f\n"])
def test_a_kernel_is_an_edit_where_that_is_shorter(save: Save, end: str) -> None:
    kernel = msgspec.structs.replace(source_of(LONG + FAST + end), flags=("-O2",))
    saved = save(source_of(LONG + SLOW), kernel)
    assert not list(saved.directory.glob("kernel.*"))
    assert (saved.kernel.files, saved.kernel.digest) == (kernel.files, kernel.digest)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("+        for (int64_t p", "+        for (int64_t q", "the digest of its kernel is .* it was changed"),
        ("-            volatile", "-            register", "the edit of the state does not apply: kernel.cpp, line"),
    ],
)
def test_an_edit_that_was_changed_is_noticed(save: Save, old: str, new: str, match: str) -> None:
    path = save(source_of(LONG + SLOW), source_of(LONG + FAST)).directory / TRIAL_FILE
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadRecord, match=match):
        read_trial(path.parent)


def test_a_trial_in_its_first_form_is_read(save: Save) -> None:
    saved = save(source_of(SLOW), source_of(FAST))
    record = json.loads((saved.directory / TRIAL_FILE).read_text())
    for stored in (record["state"], record["kernel"]):
        del stored["lineage"], stored["edit"]
    (saved.directory / TRIAL_FILE).write_text(json.dumps(record))
    assert (saved.directory / "state.cpp").read_text() == SLOW
    assert read_trial(saved.directory) == saved


def test_committed_trials_are_read_and_refer_to_lineages() -> None:
    trials = [read_trial(path) for card in card_folders(ROOT / "skills") for path in trial_folders(card)]
    assert trials
    assert not [trial.directory for trial in trials if not trial.record.state.lineage]


def test_a_second_trial_lies_beside_the_first(run: Any, card: SkillCard, tmp_path: Path) -> None:
    done = run(NO_KERNEL, repairs=0)
    for number in (1, 2):
        saved = save_trial(tmp_path / "a", card.name, done, trajectory=run.trajectory, verdicts=run.verdicts)
        assert saved.directory.name.startswith(f"{number:02d}-")
        assert saved.kernel is None


def test_a_trial_that_was_cut_off_is_stored_again(run: Any, card: SkillCard, tmp_path: Path) -> None:
    done, files = run(NO_KERNEL, repairs=0), {"trajectory": run.trajectory, "verdicts": run.verdicts}
    whole = save_trial(tmp_path / "a", card.name, done, **files).directory
    (whole / TRIAL_FILE).unlink()
    (whole / "kernel.cpp").touch()
    assert save_trial(tmp_path / "a", card.name, done, **files).directory == whole
    assert not (whole / "kernel.cpp").exists()


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
