"""The main tier collects what it says, for the methods and the platform that the user names. Nothing is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest


def main_tier(config: pytest.Config, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "suites/main_tier", *arguments]
    return subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, timeout=120, check=False)


def test_ids_are_sorted_and_name_the_method(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--collect-only", "-q", "--klineage-method=naive", "--klineage-method=expert")
    ids = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "::" in line]
    operators = ("conv2d", "fmha", "gdn", "gemm", "topk")
    assert ids == [f"{operator}-{method}" for operator in operators for method in ("naive", "expert")]


def test_an_unknown_method_names_the_known(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--klineage-method=exprt")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "klineage: unknown method 'exprt'. Did you mean 'expert'? Valid: expert, naive." in done.stdout
    assert "Traceback" not in done.stdout


def test_an_unknown_platform_names_the_known(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--platform", "gpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: unknown platform 'gpu'." in done.stderr
    assert "Valid: auto, cpu, sm120, sm90." in done.stderr


def test_a_platform_that_is_not_judged_yet_stops_at_once(pytestconfig: pytest.Config) -> None:
    done = main_tier(pytestconfig, "--platform", "sm120")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: platform sm120: this version judges on cpu only; valid: auto, cpu" in done.stderr
