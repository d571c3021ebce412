"""Ctrl-C in the middle of a judgement: no process is left behind, and the verdicts so far are kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_klineage.results.runs import read_run

SUITE = """
import pathlib
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.0001)
def test_first(kernel_gate):
    kernel_gate("good.cpp")

@kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.0001)
def test_second(kernel_gate):
    pathlib.Path("second").touch()
    kernel_gate("hangs.cpp")
"""
HANGS = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) { for (volatile int i = 0;; i = i + 1) {} return 0; }
"""
RECORDS = "results/runs/*/records.jsonl"
TOKEN = "KLINEAGE_TEST_OF_INTERRUPT"


def descendants(token: str) -> list[str]:
    """Command lines of the living processes that inherited the token, zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if line]


def wait_for(condition: Callable[[], bool], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def interruptible(command: list[str], folder: Path, token: str) -> Iterator[subprocess.Popen[str]]:
    """A process that Ctrl-C ends, also where the parent of these tests ignores it, as a shell does behind `&`."""
    default = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, token: "1"}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, default)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="one-process"), pytest.param(("-n1",), id="xdist", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "after_s",
    [pytest.param(0.05, id="while-building", marks=pytest.mark.nightly), pytest.param(1.5, id="while-running")],
)
def test_ctrl_c_leaves_records_and_no_processes(
    kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...], workers: tuple[str, ...], after_s: float
) -> None:
    pytester.makepyfile(SUITE)
    (kernels / "hangs.cpp").write_text(HANGS)
    token = f"{TOKEN}_{os.getpid()}_{time.monotonic_ns()}"
    command = [sys.executable, "-m", "pytest", *workers, *quick]
    with interruptible(command, kernels, token) as process:
        assert wait_for((kernels / "second").exists, 90), "the second test never began"
        # xdist's controller, which records, reads the first test's report after the second test has begun.
        assert wait_for(lambda: any(kernels.glob(RECORDS)), 30), "the first verdict was never recorded"
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=30)
        assert wait_for(lambda: not descendants(token), 10), descendants(token)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, text
    assert "KeyboardInterrupt" in text
    (path,) = kernels.glob(RECORDS)
    assert [record.nodeid.partition("::")[2] for record in read_run(path).records] == ["test_first"], text
    assert "over 1 of 1 scored" in text
