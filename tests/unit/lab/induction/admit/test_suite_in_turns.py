"""The suite by `batch:` and exchange: all prompts and requests in one turn, real kernels, then a replay."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from admission_trials import BAD, FAST, block

from pytest_klineage.lab.induction.admit_store import BASIS_FILE, read_trial, trial_folders
from pytest_klineage.lab.library.cards import read_card, write_card
from pytest_klineage.lab.library.lineages import StoredLineage, save_lineage
from pytest_klineage.plugin.waiting import WAITING_EXIT
from pytest_klineage.records import AdmissionRule, CardStatus, SkillCard, TrialOutcome

TARGETS = "[cpu]\ngemm = [[96, 48, 64], [48, 96, 64]]\n"
JUDGING = (
    "--klineage-time-limit=1",
    "--klineage-precision=0.08",
    "--klineage-seeds=1",
    "--klineage-busy-limit=1",
    "--klineage-spread-limit=1e6",
)
TRIALS = {AdmissionRule.STRICT: 2, AdmissionRule.PREDECESSOR: 1}
TURNS = 8
"""A verdict that a busy machine blurs is asked for again, twice at most."""


def admission(root: Path, at: Path, chosen: str, *options: str) -> subprocess.CompletedProcess[str]:
    """One run of the suite on the library in `at`."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "suites/admission/test_admission.py",
         "--platform=cpu", "-k", chosen, f"--admission-skills={at / 'skills'}", f"--admission-targets={at / 'targets'}",
         f"--admission-experts={at / 'experts'}", *JUDGING, *options],
        cwd=root, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.nightly
def test_all_trials_go_forward_together_and_are_replayed(
    pytestconfig: pytest.Config, tmp_path: Path, card: SkillCard, stored: StoredLineage
) -> None:
    root, folder = pytestconfig.rootpath, write_card(tmp_path / "skills", card)
    save_lineage(tmp_path / "experts" / "gemm" / "cpu-cpp" / "lineage", stored.lineage, stored.sources)
    (tmp_path / "targets").write_text(TARGETS)
    turn = (
        "--steps=1", f"--klineage-executor=batch:{tmp_path / 'judge'}", "--klineage-llm=exchange",
        f"--klineage-exchange={tmp_path / 'replies'}", "--klineage-model=unbilled",
        f"--klineage-trajectories={tmp_path / 'trajectories'}", "--klineage-resume=admission/*",
    )  # fmt: skip
    done = admission(root, tmp_path, "test_admit", *turn)
    assert done.returncode == WAITING_EXIT, done.stdout[-4000:]
    prompts = sorted((tmp_path / "replies").rglob("*-prompt.md"))
    assert len(prompts) == len(list((tmp_path / "judge" / "request").iterdir())) == sum(TRIALS.values())
    for prompt in prompts:
        wrong = prompt.parent.name.startswith("gemm-48x96x64")
        prompt.with_name("0001-reply.md").write_text(block(BAD if wrong else FAST))
    done = admission(root, tmp_path, "test_admit", *turn)
    assert done.returncode == WAITING_EXIT, done.stdout[-4000:]
    assert len(list((tmp_path / "judge" / "request").iterdir())) == 2 * len(prompts)
    for _ in range(TURNS):
        subprocess.run(
            [sys.executable, "-m", "pytest_klineage", "judge", str(tmp_path / "judge"), "--platform=cpu"],
            cwd=root, capture_output=True, timeout=400, check=True,
        )  # fmt: skip
        done = admission(root, tmp_path, "test_admit", *turn)
        if done.returncode != WAITING_EXIT:
            break

    trials, tried = [read_trial(path) for path in trial_folders(folder)], read_card(folder)
    assert Counter(trial.target.rule for trial in trials) == TRIALS, done.stdout[-4000:]
    assert [trial.record.trial for trial in trials] == list(tried.log)
    assert all((trial.directory / BASIS_FILE).is_file() for trial in trials)
    (wrong,) = [trial for trial in tried.log if trial.context.shape["M"] == 48]
    assert (wrong.rule, wrong.outcome) == (AdmissionRule.STRICT, TrialOutcome.REJECTED)
    won = any(one.rule is AdmissionRule.STRICT and one.outcome is TrialOutcome.SUCCESS for one in tried.log)
    assert (tried.status is CardStatus.ADMITTED) == won == (done.returncode == pytest.ExitCode.OK)
    again = admission(root, tmp_path, "replayed_trial", "--klineage-llm=replay")
    assert again.returncode == pytest.ExitCode.OK, again.stdout[-4000:]
    assert "3 passed" in again.stdout
