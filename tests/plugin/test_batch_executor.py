"""--klineage-executor=batch:DIR from end to end: waiting, judging by the command, going on; and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.errors import WaitsForReply, WaitsForVerdict
from pytest_klineage.plugin.waiting import WAITING_EXIT, ending_turn, waiting_line

SUITE = """
import pytest
from pytest_klineage import kernel_case
from pytest_klineage.errors import WaitsForReply

@kernel_case((24, 16, 8), "fp32", op="gemm", at_least=0.0001)
@pytest.mark.parametrize("name", ["good", "wrong"])
def test_judged(kernel_gate, name):
    kernel_gate(f"{name}.cpp")

def test_other():
    pass
"""
REPLIES = """
import pytest
from pytest_klineage.errors import WaitsForReply

@pytest.fixture
def prompt():
    raise WaitsForReply("exchange/gemm/1", "not yet")

def test_in_a_fixture(prompt):
    pass

def test_in_the_test():
    raise WaitsForReply("exchange/gemm/2", "not yet")
"""
OWN = """
from pytest_klineage import kernel_case, operator

@operator("x[M,N] -> y[M,N]", dtypes=("fp32",))
def double(x):
    return x * 2

def twice(x):
    return x + x

@kernel_case((16, 8), "fp32", op=double, ref=twice, at_least=0.0001)
def test_own(kernel_gate):
    kernel_gate("double.cpp")

@kernel_case((24, 16, 8), "fp32", op="gemm", ref="refs.py:product", at_least=0.0001)
def test_shipped(kernel_gate):
    kernel_gate("good.cpp")
"""
DOUBLE = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &x = call->inputs[0], &y = call->outputs[0];
    for (int64_t i = 0; i < x.shape[0] * x.shape[1]; ++i) ((float *)y.data)[i] = 2 * ((const float *)x.data)[i];
    return 0;
}
"""
COMMAND = (sys.executable, "-m", "pytest_klineage")
OPTIONS = (
    "--klineage-platform=cpu", "--klineage-executor=batch:asked", "--klineage-time-limit=0.3",
    "--klineage-precision=0.5", "--klineage-seeds=1", "--klineage-busy-limit=1",
    "--klineage-flush=1M",
)  # fmt: skip
JUDGE_LIMIT_S = 120.0


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="here"), pytest.param(("-n", "1"), id="xdist", marks=pytest.mark.nightly)]
)
def test_a_suite_goes_on_with_the_verdicts_that_came(
    pytester: pytest.Pytester, kernels: Path, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    first = pytester.runpytest_subprocess(*OPTIONS, *workers)
    assert first.ret == WAITING_EXIT
    first.assert_outcomes(passed=1, skipped=2)
    first.stdout.fnmatch_lines(
        ["klineage: 2 chains: 2 wait for verdicts (pytest-klineage judge asked); then the same command goes on"]
    )
    judged = pytester.run(*COMMAND, "judge", "asked", "--platform", "cpu")
    judged.stdout.fnmatch_lines(["cpu: gemm-24x16x8-fp32*", "asked: 0 open, 0 claimed, 2 done*"])
    second = pytester.runpytest_subprocess(*OPTIONS, *workers)
    second.assert_outcomes(passed=2, failed=1)
    second.stdout.fnmatch_lines(["*wrong_value.mismatch*"])
    second.stdout.no_fnmatch_line("*chains:*")
    states = pytester.run(*COMMAND, "judges", "asked")
    states.stdout.fnmatch_lines(["asked: 0 open, 0 claimed, 2 done, 0 given up, 0 faults"])


def test_own_files_are_judged_where_they_are_not(pytester: pytest.Pytester, kernels: Path, tmp_path: Path) -> None:
    """The folder alone goes to a clean directory and back; an operator and both references are in the asker's files."""
    pytester.makepyfile(test_own=OWN, refs="def product(a, b):\n    return a @ b\n")
    (kernels / "double.cpp").write_text(DOUBLE)
    options = (*OPTIONS, "--klineage-spread-limit=1e6")
    assert pytester.runpytest_subprocess(*options).ret == WAITING_EXIT
    clean = tmp_path / "clean"
    shutil.copytree(pytester.path / "asked", clean / "asked")
    judged = subprocess.run(
        [*COMMAND, "judge", "asked", "--platform", "cpu", "--cache-dir", "cache"], cwd=clean, capture_output=True,
        text=True, timeout=JUDGE_LIMIT_S, check=False,
    )  # fmt: skip
    assert (judged.returncode, judged.stdout.count(" accepted.")) == (0, 2), judged.stdout + judged.stderr
    shutil.copytree(clean / "asked", pytester.path / "asked", dirs_exist_ok=True)
    second = pytester.runpytest_subprocess(*options)
    second.assert_outcomes(passed=2)
    second.stdout.fnmatch_lines(["*test_own.py:twice*", "*refs.py:product*"])


def test_waiting_for_replies_is_counted_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=REPLIES)
    result = pytester.runpytest_subprocess()
    assert result.ret == WAITING_EXIT
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["klineage: 2 chains: 2 wait for replies (exchange/gemm/...); *"])


def test_a_failure_is_a_failure_though_something_waits(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=REPLIES + "\ndef test_bad():\n    assert 0\n")
    assert pytester.runpytest_subprocess().ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("value", ["remote", "batch", "batch:", "local:here", "ray:", "ray://", "ray://a/b"])
def test_other_executors_are_refused(pytester: pytest.Pytester, value: str) -> None:
    result = pytester.runpytest(f"--klineage-executor={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*is not one of: local, batch:DIR*"])


def test_a_product_is_chosen_in_a_cluster_only(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest(*OPTIONS, "--klineage-gpu-product=H200")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--klineage-gpu-product chooses among the nodes of --klineage-executor=ray"])


def test_a_baseline_is_not_pinned_elsewhere(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest(*OPTIONS, "--klineage-save=main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--klineage-save judges more than once in one run: use it where the GPU is*"])


def test_a_gpu_platform_needs_no_gpu_to_ask(pytester: pytest.Pytester, kernels: Path) -> None:
    pytester.makepyfile(test_suite=SUITE.replace(".cpp", ".cu"))
    (kernels / "good.cu").write_text((kernels / "good.cpp").read_text())
    (kernels / "wrong.cu").write_text((kernels / "wrong.cpp").read_text())
    result = pytester.runpytest_subprocess("--klineage-platform=sm90", "--klineage-executor=batch:asked")
    assert result.ret == WAITING_EXIT
    states = pytester.run(*COMMAND, "judges", "asked")
    states.stdout.fnmatch_lines(["asked: 2 open, *; left: 2 for sm90"])


def test_the_line_names_both(tmp_path: Path) -> None:
    waiting = [ending_turn(WaitsForVerdict(str(tmp_path / "asked"), ""))] * 9
    waiting += [ending_turn(WaitsForReply(f"exchange/gemm/{number}", "")) for number in range(3)]
    assert waiting_line(waiting, tmp_path) == (
        "klineage: 12 chains: 9 wait for verdicts (pytest-klineage judge asked), 3 wait for replies "
        "(exchange/gemm/...); then the same command goes on"
    )
