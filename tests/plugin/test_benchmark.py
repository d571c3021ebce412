"""Export through pytest-benchmark: its numbers are exactly our samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SUITE = """
import pytest
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm")
@pytest.mark.benchmark(group="mine")
def test_kernel(kernel_gate, benchmark):
    kernel_gate("fast.cpp")
    kernel_gate("faster.cpp")
"""


def test_the_samples_are_exported(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("--benchmark-json=out.json")
    result.assert_outcomes(passed=1)
    (entry,) = json.loads((fake_gate / "out.json").read_text())["benchmarks"]
    assert entry["stats"]["data"] == [0.00025, 0.0005, 0.00075]
    assert entry["group"] == "mine"
    assert entry["extra_info"]["klineage_speedup"] == 2.0
    assert entry["extra_info"]["klineage_case"] == "gemm-8x8x8-fp32"


def test_a_comparison_works_on_them(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.runpytest("--benchmark-autosave").assert_outcomes(passed=1)
    (fake_gate / "fast.cpp").write_text("// accepted.faster 2.0\n")
    result = pytester.runpytest("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("arguments", [("-n1",), ("--benchmark-disable",), ("--benchmark-skip",)])
def test_where_pytest_benchmark_is_off_the_gate_works(
    fake_gate: Path, pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.OK


def test_the_users_own_timer_is_left_alone(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        @pytest.mark.benchmark(timer=time.process_time)
        def test_kernel(kernel_gate, benchmark):
            kernel_gate("fast.cpp")
            benchmark(sum, [1, 2])
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)
