"""The main tier collects what it says, for the methods and the platform that the user names. Nothing is measured.

Where nvcc is, one GPU kernel of each surface is built for each platform: `.ci/run` builds all of two variants itself.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import Code, Surface
from pytest_klineage.results.runs import list_runs, read_run
from pytest_klineage.surfaces.toolkit import find_toolkit


def main_tier(config: pytest.Config, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "suites/main_tier", *arguments]
    return subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, timeout=300, check=False)


def test_ids_are_sorted_and_name_the_method(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--collect-only", "-q", "--klineage-method=naive", "--klineage-method=expert")
    ids = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "::" in line]
    operators = ("conv2d", "fmha", "gdn", "gemm", "topk")
    assert ids == [f"{operator}-{method}" for operator in operators for method in ("naive", "expert")]


def test_an_unknown_method_names_the_known(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--klineage-method=exprt")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "klineage: unknown method 'exprt'. Did you mean 'expert'? Valid: accelopt, adaexplore, " in done.stdout
    assert " expert, generated-only, " in done.stdout
    assert "Traceback" not in done.stdout


def test_the_compile_stage_builds_all_of_a_platform(pytestconfig: pytest.Config) -> None:
    def ids(*arguments: str) -> set[str]:
        done = main_tier(pytestconfig, "--collect-only", "-q", "--klineage-stage=compile", *arguments)
        return {line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "::" in line}

    every = ids("--platform=sm90")
    assert {"gemm-cuda-naive", "gemm-cuda-expert", "gemm-cuda-07-wgmma"} <= every
    assert "gemm-cuda-00-naive" not in every, "the variant naive is the same file"
    stages = ids("--platform=sm90", "--klineage-method=stages")
    variants = {name for name in every if name.endswith(("-naive", "-expert")) and not name.endswith("-00-naive")}
    assert stages == every - variants
    assert ids("--platform=sm120") == every
    assert "gemm-cpp-expert" in ids("--platform=cpu")


def test_stages_are_a_method_where_a_platform_has_some(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--klineage-method=stages", "--collect-only")
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "unknown method" not in done.stdout


def nvcc_is_missing() -> str:
    """Why there is no nvcc, or nothing."""
    try:
        find_toolkit()
    except MissingDependency as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(nvcc_is_missing()), reason=nvcc_is_missing() or "nvcc is there")
@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["sm90", "sm120"])
def test_some_kernels_are_built_without_a_device(pytestconfig: pytest.Config, tmp_path: Path, platform: str) -> None:
    done = main_tier(
        pytestconfig, f"--platform={platform}", "--klineage-stage=compile", "--klineage-method=naive",
        "-k", "topk-cuda or triton or tilelang",
        f"--klineage-results={tmp_path}", f"--klineage-cache-dir={tmp_path / 'cache'}",
    )  # fmt: skip
    (run,) = list_runs(tmp_path)
    verdicts = [record.verdict for record in read_run(run).records]
    assert {verdict.surface: verdict.code for verdict in verdicts} == {
        Surface.CUDA: Code.ACCEPTED_BUILT, Surface.TRITON: built_where("triton"),
        Surface.TILELANG: built_where("tilelang"),
    }, done.stdout  # fmt: skip
    for build in (verdict.build for verdict in verdicts if verdict.code is Code.ACCEPTED_BUILT):
        assert build is not None
        assert build.platform == platform
        assert [kernel.registers > 0 for kernel in build.kernels] == [True]


def built_where(package: str) -> Code:
    """What a kernel of that package's surface comes to: built, or skipped where the package is not installed."""
    return Code.ACCEPTED_BUILT if importlib.util.find_spec(package) else Code.SKIPPED_DEPENDENCY


def test_a_kernel_for_hopper_is_not_built_for_blackwell(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    done = main_tier(
        pytestconfig, "--platform=sm120", "--klineage-stage=compile", "--klineage-method=expert", "-k", "gemm", "-rs",
        f"--klineage-results={tmp_path}",
    )  # fmt: skip
    assert "3 skipped" in done.stdout, done.stdout
    assert "skipped.platform: the kernel was written for sm90, not for sm120" in done.stdout
