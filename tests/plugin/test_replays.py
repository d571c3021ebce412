"""What models said is replayed: the recorded replies lead to the recorded cards, kernels and classes of verdicts.

A part of it, in which every class of verdict occurs that any recording has; all of it is `pytest suites/lineage
suites/admission suites/ablations suites/head_to_head --platform cpu --klineage-llm replay`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        pytest.param("suites/ablations/test_roundtrip_recovery.py", "conv2d-3 or table", id="recovery"),
        pytest.param("suites/ablations/test_roundtrip_recovery.py", "gdn-1", id="more-recovery", marks=NIGHTLY),
        pytest.param("suites/ablations/test_generated_only.py", "fmha-2 or table", id="without-cards", marks=NIGHTLY),
        pytest.param("suites/head_to_head", "accelopt-conv2d-2 or tables", id="head-to-head", marks=NIGHTLY),
        pytest.param(
            "suites/head_to_head",
            "klineage-topk-1 or generated-only-conv2d-1 or adaexplore-topk-3",
            id="other-methods",
            marks=NIGHTLY,
        ),
    ],
)
def test_a_recording_is_replayed(pytestconfig: pytest.Config, suite: str, chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", suite, "--platform=cpu"]
    done = subprocess.run(
        [*command, "--klineage-llm=replay", "-k", chosen, *QUICK],
        cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-4000:]
    assert " passed" in done.stdout
