"""Live progress: past the capture, one line on a terminal, sparse lines elsewhere, never in the way of pytest's own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

JUDGE = """    def judge(self, case, source, *, reference_source=None, platforms=(), precision=None):
        steps = [gate.Progress(stage="build", message="building it")]
        steps += [gate.Progress(stage="time", message="1.92x +-3.1 %", done=40 + n, total=200) for n in range(8)]
        for step in steps:
            time.sleep(0.15)
            if self.progress:
                self.progress(step)
"""
SUITE = """
import os
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm")
def test_kernel(kernel_gate, capsys):
    print("this is captured")
    kernel_gate("fast.cpp")
    assert capsys.readouterr().out == "this is captured\\n"

def test_plain():
    pass
"""


@pytest.fixture
def slow_gate(fake_gate: Path, pytester: pytest.Pytester) -> Path:
    """A pretended gate that takes a second and says so."""
    text = (fake_gate / "conftest.py").read_text()
    head = JUDGE.partition("\n")[0]
    assert head in text
    slow = text.replace(f"{head}\n", JUDGE, 1).replace(
        "self.platform = platform\n", "self.platform = platform\n        self.progress = progress\n", 1
    )
    (fake_gate / "conftest.py").write_text("import time\n" + slow)
    pytester.makepyfile(SUITE)
    return fake_gate


def on_a_terminal(folder: Path, *arguments: str) -> str:
    """What pytest writes when its output is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(theirs)
    written = bytearray()
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux says "input/output error" when the other side has closed
            break
        if not data:
            break
        written += data
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


def seen(text: str) -> list[str]:
    """The lines that are left on the screen, as far as carriage returns and line erasure decide it."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        lines.append(re.split(r"\r|\x1b\[2K", line)[-1].rstrip())
    return lines


@pytest.mark.parametrize(
    "verbose",
    [
        pytest.param((), id="plain"),
        pytest.param(("-v",), id="verbose", marks=pytest.mark.nightly),
        pytest.param(("-s",), id="no-capture", marks=pytest.mark.nightly),
    ],
)
def test_one_line_on_a_terminal_that_vanishes(slow_gate: Path, verbose: tuple[str, ...]) -> None:
    text = on_a_terminal(slow_gate, *verbose)
    assert "klineage gemm-8x8x8-fp32 fast: time 4" in text
    assert "/200, 1.92x +-3.1 %" in text
    left = seen(text)
    assert not [line for line in left if "/200" in line]
    marks = "PASSED" if verbose == ("-v",) else "."
    assert [line for line in left if re.search(rf"::test_kernel {marks}|\.py \.+|^\.", line)], left


def test_lines_now_and_then_elsewhere(slow_gate: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--klineage-progress=on")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["klineage gemm-8x8x8-fp32 fast: building it"])
    assert sum("klineage gemm-8x8x8-fp32 fast:" in line for line in result.outlines) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="short"),
        pytest.param(("--klineage-progress=off",), id="off"),
        pytest.param(("-n1", "--klineage-progress=on"), id="xdist", marks=pytest.mark.nightly),
    ],
)
def test_short_work_and_workers_say_nothing(
    slow_gate: Path, pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("klineage gemm-8x8x8-fp32 fast:*")
