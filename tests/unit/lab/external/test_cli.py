"""The command from end to end: a real kernel through the real gate, its row in the report, and what is misused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.records import Judged, Stopped, parse_trajectory

pytest.importorskip("httpx", reason="needs the extra external")
pytest.importorskip("starlette", reason="needs the extra external")

KERNEL = """\
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const int64_t M = a.shape[0], K = a.shape[1], N = b.shape[1];
    for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < N; ++j) {
            float sum = 0.0f;
            for (int64_t k = 0; k < K; ++k) sum += ((float *)a.data)[i * K + k] * ((float *)b.data)[k * N + j];
            ((float *)c.data)[i * N + j] = sum WRONG;
        }
    return 0;
}
"""
OPTIMIZER = """\
import subprocess, sys
command = [sys.executable, "-m", "pytest_klineage", "external"]
contract = subprocess.run([*command, "task"], capture_output=True, text=True, check=True).stdout
assert "gemm-48x40x56-fp32" in contract and "klineage_call" in contract
for name, status in (("wrong.cpp", 1), ("right.cpp", 0), ("nonesuch.cpp", 2)):
    done = subprocess.run([*command, "judge", name, "--note", "by hand"], capture_output=True, text=True)
    print(name, done.returncode, done.stdout, done.stderr)
    assert done.returncode == status, done.stderr
"""
CASE = ["--op", "gemm", "--shape", "48,40,56", "--dtype", "fp32", "--threads", "1", "--time-limit", "0.3"]


def run(tmp_path: Path, *arguments: str, command: list[str]) -> int:
    fixed = ["--model", "unbilled", "--method", "by-hand", "--cache-dir", str(tmp_path / "cache"),
             "--trajectories", str(tmp_path / "out")]  # fmt: skip
    return main(["external", "run", *CASE, *fixed, *arguments, "--", *command])


def test_from_an_optimizer_to_a_row(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for name, wrong in (("right", ""), ("wrong", "+ 1")):
        (tmp_path / f"{name}.cpp").write_text(KERNEL.replace("WRONG", wrong))
    (tmp_path / "optimizer.py").write_text(OPTIMIZER)
    status = run(tmp_path, command=[sys.executable, "optimizer.py"])
    shown = capsys.readouterr().out
    trajectory = tmp_path / "out" / "by-hand-gemm-48x40x56-fp32.jsonl"
    assert status == 0, (shown, trajectory.with_suffix(".log").read_text())
    assert "step 1: (wrong_value.mismatch), best none yet" in shown
    assert "ended: finished" in shown
    events = [line.event for line in parse_trajectory(trajectory.read_bytes())[0]]
    judged = [event for event in events if isinstance(event, Judged)]
    wrong, right = judged
    assert (wrong.code.status.value, wrong.speedup) == ("wrong_value", None)
    assert right.speedup is not None
    assert isinstance(events[-1], Stopped)
    best = trajectory.with_suffix(".best") / "right.cpp"
    assert best.read_text() == (tmp_path / "right.cpp").read_text()
    assert main(["report", str(trajectory), "--markdown"]) == 0
    report = capsys.readouterr().out
    assert "by-hand" in report
    assert "gemm-48x40x56-fp32" in report


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rewrite", "nonesuch"], "unknown rewrite"), (["--surface", "fortran"], "unknown surface"),
        (["--platform", "nonesuch"], "nonesuch"), (["--budget", "-1"], "budget"), (["--shape", "1,x,2"], "--shape"),
        (["--option", "causal"], "NAME=VALUE"), (["--model", "nonesuch"], "no price"),
        (["--root", "nonesuch.cpp"], "nonesuch.cpp"), (["--op", "nonesuch"], "unknown operator"),
    ],
)  # fmt: skip
def test_misuse_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert run(tmp_path, *arguments, command=["true"]) == 2
    captured = capsys.readouterr().err
    assert text in captured
    assert len(captured.splitlines()) == 1


def test_an_optimizer_that_fails_ends_it_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, command=["false"]) == 1
    assert "optimizer_failed" in capsys.readouterr().out
    assert run(tmp_path, command=["true"]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("action", [["judge", "kernel.cpp"], ["task"]])
def test_without_a_run(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], action: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.cpp").write_text("x")
    monkeypatch.delenv("KLINEAGE_URL", raising=False)
    assert main(["external", *action]) == 2
    assert "KLINEAGE_URL" in capsys.readouterr().err
    monkeypatch.setenv("KLINEAGE_URL", "http://127.0.0.1:9")
    assert main(["external", *action]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_problem_for_adaexplore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent_entry.py").write_text("")
    assert main(["external", "prepare", "adaexplore", str(tmp_path), *CASE]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "1_gemm-48x40x56-fp32.py"


def test_a_trace_set_for_accelopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "main.py").write_text(
        "import torch\nfrom ctypes import c_float\n\ndef run(a, b):\n"
        "    rows = [[sum(x * y for x, y in zip(row, column)) for column in zip(*b.tolist())] for row in a.tolist()]\n"
        "    out = torch.empty(len(rows), len(rows[0]))\n"
        "    flat = (c_float * out.numel()).from_address(out.data_ptr())\n"
        "    flat[:] = [value for row in rows for value in row]\n    return out\n"
    )
    given = [*CASE, "--surface", "python", "--root", str(tmp_path / "main.py"), "--cache-dir", str(tmp_path / "cache")]
    assert main(["external", "prepare", "accelopt", str(tmp_path / "set"), *given]) == 0, capsys.readouterr().err
    start = Path(capsys.readouterr().out.strip())
    trace = json.loads(next((tmp_path / "set" / "traces").rglob("*.json")).read_text())
    assert trace["evaluation"]["performance"]["latency_ms"] > 0
    assert start.read_text().startswith("definition_path,solution_path,workload_path,trace_path\n")
