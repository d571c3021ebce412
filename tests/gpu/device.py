"""Whether this machine has what a test needs, a GPU, nvcc or an optional library; skips with the reason otherwise."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import KlineageError
from pytest_klineage.gate import GateSettings
from pytest_klineage.gate.host.platforms import resolve_platform

MARKER = "gpu: needs a GPU that kernels can be judged on; skipped, with the reason, where there is none"
BUILD_TIMEOUT_S = 120.0


def gpu_platform(config: pytest.Config) -> str:
    """The GPU platform to judge on: the one of `--platform`, else the machine's. Skips where there is none."""
    asked = config.getoption("klineage_platform", default=None) or "auto"
    try:
        platform = resolve_platform(asked)
    except KlineageError as error:
        pytest.skip(f"no GPU to judge on: {error}")
    if platform == "cpu":
        pytest.skip("no GPU to judge on: this machine has none, or --platform cpu was asked for")
    if asked != "auto" and resolve_platform("auto") != platform:
        pytest.skip(f"no GPU to judge on: {platform} was asked for, and this machine has none of that architecture")
    return platform


def quick_settings(config: pytest.Config, cache: Path, **changed: Any) -> GateSettings:
    """Settings for tests that ask who gets through, not how fast anyone is.

    Built kernels come from --klineage-artifacts or --klineage-cache-dir where they are given: on a GPU that is lent by
    the minute nothing should be compiled.
    """
    given = config.getoption("klineage_cache_dir", default=None)
    artifacts = config.getoption("klineage_artifacts", default=None)
    return GateSettings(
        time_limit_s=0.05, precision=0.5, busy_limit=1.0, spread_limit=1e6, seeds=1, build_timeout_s=BUILD_TIMEOUT_S,
        cache_dir=Path(given).absolute() if given else cache,
        artifacts=Path(artifacts).absolute() if artifacts else None, **changed,
    )  # fmt: skip


def need_nvcc() -> str:
    """Path of nvcc; skips where it is not installed."""
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("nvcc is not on PATH: install a CUDA 13 toolkit")
    return found


def need_module(name: str) -> None:
    """Skips where a Python package is not installed, without importing it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def compile_for_hopper(nvcc: str, source: Path, *include: Path, timeout_s: float = 110.0) -> str:
    """Compile one file to an object that is thrown away. Returns the compiler's words; empty when it had none."""
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O1", "-c", "-o", str(source.with_suffix(".o"))]
    command = [nvcc, *flags, *(f"-I{folder}" for folder in include), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.stderr + done.stdout if done.returncode else ""
