"""`--lineages`: lineages of another folder are derived, timed and gone on with instead of this repository's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITES = ("test_derive", pytest.param("test_spans", marks=pytest.mark.nightly))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with one of the lineages, in a folder named otherwise."""
    shutil.copytree(ROOT / "experts" / "gdn" / "sm90-cuda" / "stages", tmp_path / "of_others" / "sm90-cuda" / "stages")
    return tmp_path


@pytest.mark.parametrize("suite", SUITES)
def test_only_the_other_folder_is_read(suite: str, elsewhere: Path) -> None:
    own, other = (collected(suite, elsewhere / "judges", *given) for given in ((), ("--lineages", str(elsewhere))))
    assert other
    assert set(other) == {name for name in own if "[gdn-" in name}
    assert len(own) > len(other)


def test_walks_are_kept_there(tmp_path: Path) -> None:
    walked = shutil.copytree(
        ROOT / "experts" / "gemm" / "cpu-cpp" / "lineage", tmp_path / "gemm" / "cpu-cpp" / "lineage"
    )
    command = [sys.executable, "-m", "pytest", "suites/lineage/test_induce.py", "-p", "no:cacheprovider", "-rs"]
    asked = ["-k", "test_induce and cpu-cpp", "--klineage-platform=cpu", f"--lineages={tmp_path}"]
    model = ["--klineage-llm=exchange", f"--klineage-exchange={tmp_path / 'prompts'}", "--klineage-model=unbilled"]
    model += [f"--klineage-executor=batch:{tmp_path / 'judge'}", f"--klineage-trajectories={tmp_path / 'walks'}"]
    done = subprocess.run([*command, *asked, *model], cwd=ROOT, check=False, capture_output=True, text=True)
    assert f"{walked} is whole" in done.stdout
    assert "5 chains" not in done.stdout
    assert "4 chains: 4 wait for verdicts" in done.stdout


def collected(suite: str, judges: Path, *options: str) -> list[str]:
    """The tests of a suite, by name. Verdicts of a GPU come from elsewhere, so that none is needed here."""
    pytest_here = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    suite_on_gpu = [f"suites/lineage/{suite}.py", "--klineage-platform=sm90", f"--klineage-executor=batch:{judges}"]
    done = subprocess.run([*pytest_here, *suite_on_gpu, *options], cwd=ROOT, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]
