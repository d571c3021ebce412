"""`pytest-klineage import` and `export`: what they print, and how they end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pytest_klineage.cli.formats import add_formats
from pytest_klineage.formats import definition_of
from pytest_klineage.formats.trace_export import workload_of
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, Interval, Reason, Timing, Verdict, to_json
from pytest_klineage.results.runs import Record

PROBLEM = """import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, A, B):
        return {expression}

def get_inputs():
    return [torch.rand({m}, 64), torch.rand(64, {m})]

def get_init_inputs():
    return []
"""
CASE = make_case("gemm", (16, 16, 16), "fp32", "torch")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_formats(parser.add_subparsers())
    arguments = parser.parse_args(words)
    return int(arguments.command(arguments))


def test_a_folder_of_problems_is_gone_through_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems, output = tmp_path / "problems", str(tmp_path / "imported")
    problems.mkdir()
    (problems / "10_Zero.py").write_text(PROBLEM.format(expression="(A @ B) * 0", m=32))
    (problems / "2_Product.py").write_text(PROBLEM.format(expression="A @ B", m=32))
    (problems / "3_Broken.py").write_text(PROBLEM.format(expression="A @ A", m=32))
    assert run("import", str(problems), "--precision", "fp16", "--output", output) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2_Product: kb_2_Product-32x64-fp16")
    assert lines[1].startswith("unsupported: 3_Broken: RuntimeError")
    assert lines[2].startswith("10_Zero: ")
    assert lines[3] == "2 of 3 are cases"
    assert run("import", str(problems / "10_Zero.py"), "--lint", "--output", output) == 1
    assert "unsupported: 10_Zero: answers that compute nothing would pass: zeros" in capsys.readouterr().out


def test_sizes_are_set_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "1_sized.py"
    path.write_text(PROBLEM.format(expression="A @ B", m="SIDE") + "SIDE = 4096\n")
    assert run("import", str(path), "--set", "SIDE=8", "--output", str(tmp_path / "imported")) == 0
    assert run("import", str(path), "--at-most", "16", "--output", str(tmp_path / "imported")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1_sized: kb_1_sized-8x64-fp32"
    assert lines[2] == "1_sized: kb_1_sized-16x64-fp32"
    with pytest.raises(SystemExit):
        run("import", str(path), "--set", "8")
    assert "a size is written NAME=VALUE, got '8'" in capsys.readouterr().err


def test_a_folder_of_traces_is_gone_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "definitions").mkdir()
    (tmp_path / "workloads").mkdir()
    (tmp_path / "definitions" / "one.json").write_bytes(to_json(definition_of(CASE)))
    known = {"definition": definition_of(CASE).name, "workload": json.loads(to_json(workload_of(CASE)))}
    lines = [known, {**known, "definition": "other"}, {"definition": "half"}]
    (tmp_path / "workloads" / "w.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run("import", str(tmp_path), "--output", str(tmp_path / "imported")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "klineage_gemm_16x16x16_fp32: fi_klineage_gemm_16x16x16_fp32-16x16x16-fp32"
    assert said[1] == "unsupported: other: the workload gemm-16x16x16-fp32 is of a definition that is not there"
    assert said[2].startswith("not read: ")
    assert said[3] == "1 of 3 are cases"


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import", str(tmp_path / "none.py"), "--output", str(tmp_path)) == 1
    assert "not read: the problem" in capsys.readouterr().out


def test_a_run_becomes_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(
        policy="paired", reference_ms=2.0, candidate_ms=1.0, speedup=Interval(2.0, 1.9, 2.1), reference_samples_ms=(),
        candidate_samples_ms=(), warmup=1, flush_bytes=0, statistic="",
    )  # fmt: skip
    records = [
        Record(nodeid="test", verdict=Verdict(
            case=CASE, status=code.status, reasons=(Reason(code=code, message="because"),), source_digest="00" * 32,
            timing=timing if code is Code.ACCEPTED_FASTER else None,
        ))
        for code in (Code.ACCEPTED_FASTER, Code.CRASH, Code.SKIPPED_PLATFORM)
    ]  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(to_json(record) + b"\n" for record in records))
    assert run("export", str(path), "--output", str(tmp_path / "traces.jsonl")) == 0
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [line["evaluation"]["status"] for line in lines] == ["PASSED", "RUNTIME_ERROR"]
    assert lines[0]["evaluation"]["performance"]["speedup_factor"] == 2.0
    assert "1 of 3 verdicts are skips or builds, and left out" in capsys.readouterr().err
    assert run("export", str(path)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
