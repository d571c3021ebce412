"""What models said is replayed: the recorded replies lead to the recorded cards, kernels and classes of verdicts.

A part of it, in which every class of verdict occurs that any recording has; all of it is `pytest suites/lineage
suites/admission suites/ablations suites/head_to_head --platform cpu --klineage-llm replay`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.lab.library.cards import read_card, write_card
from pytest_klineage.records import CardStatus

QUICK = (
    "--klineage-time-limit=0.5",
    "--klineage-precision=0.3",
    "--klineage-busy-limit=1",
    "--klineage-spread-limit=1e6",
)
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        pytest.param("suites/admission/test_lift.py", "replayed_lift", id="cards"),
        pytest.param("suites/admission/test_admission.py", "replayed_trial and weight", id="trials", marks=NIGHTLY),
        pytest.param("suites/admission/test_admission.py", "replayed_trial and cache", id="more-trials", marks=NIGHTLY),
        pytest.param("suites/lineage/test_induce.py", "replay and topk", id="lineage", marks=NIGHTLY),
        pytest.param("suites/ablations/test_roundtrip_recovery.py", "conv2d-3 or table", id="recovery", marks=NIGHTLY),
        pytest.param("suites/ablations/test_roundtrip_recovery.py", "gdn-1", id="more-recovery", marks=NIGHTLY),
        pytest.param("suites/ablations/test_generated_only.py", "fmha-2 or table", id="without-cards", marks=NIGHTLY),
        pytest.param("suites/head_to_head", "accelopt-conv2d-1 or tables", id="head-to-head", marks=NIGHTLY),
        pytest.param(
            "suites/head_to_head",
            "klineage-topk-1 or generated-only-conv2d-1 or adaexplore-topk-1",
            id="other-methods",
            marks=NIGHTLY,
        ),
    ],
)
def test_a_recording_is_replayed(pytestconfig: pytest.Config, suite: str, chosen: str) -> None:
    done = replayed(pytestconfig, suite, "-k", chosen)
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("retired", [True, False])
def test_a_card_whose_step_no_longer_pays_is_named(retired: bool, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    skills, card = pytestconfig.rootpath / "skills", "cpu-cpp-cache-block-recurrent-state-column-panels"
    (tmp_path / "lifts").mkdir()
    shutil.copyfile(*(at / "lifts" / "cpu-cpp-cache-block-phase-2-avx512-40af2be9.jsonl" for at in (skills, tmp_path)))
    status = CardStatus.RETIRED if retired else CardStatus.CANDIDATE
    write_card(tmp_path, msgspec.structs.replace(read_card(skills / card), status=status))
    done = replayed(pytestconfig, "suites/admission/test_lift.py", "-k=replayed_lift", f"--admission-skills={tmp_path}")
    assert (done.returncode == pytest.ExitCode.OK) == retired, done.stdout[-4000:]
    assert (f"retire {card}" in done.stdout) == (not retired)


def replayed(pytestconfig: pytest.Config, *chosen: str) -> subprocess.CompletedProcess[str]:
    """A suite's replay on a CPU, judged quickly."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--platform=cpu", *chosen]
    return subprocess.run(
        [*command, "--klineage-llm=replay", *QUICK],
        cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
