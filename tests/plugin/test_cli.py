"""The command pytest-klineage: exit codes, one-line errors, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage import __version__
from pytest_klineage.cli.doctor import MachinePart, cpu_ready, examine, finding_lines
from pytest_klineage.cli.main import RECORDS, main


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_klineage", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_help_documents_commands_and_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("doctor", "report", "schema", "cases", "exit codes:", "  2  "):
        assert word in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"pytest-klineage {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("dcotor",), "invalid choice: 'dcotor'"),
        (
            ("report", "nowhere"),
            "pytest-klineage: nowhere is not there; give a run's directory, its records.jsonl, or: latest\n",
        ),
        (("report", "latest"), "pytest-klineage: there is no run in results/runs; give the run's directory\n"),
        (("schema", "verdit"), "pytest-klineage: unknown record 'verdit'. Did you mean 'verdict'? Valid: card, case,"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_damaged_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"schema_version": 7}\n')
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "schema version 7; this pytest-klineage reads 1" in done.stderr


def test_a_folder_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_cache: Path | None) -> list[MachinePart]:
        raise PermissionError(13, "Permission denied", "/closed/cache")

    monkeypatch.setattr("pytest_klineage.cli.doctor.examine", refused)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "pytest-klineage: [Errno 13] Permission denied: '/closed/cache'\n"


def test_the_report_is_made_without_torch(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_fast(kernel_gate):
            kernel_gate("fast.cpp")
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)
    code = (
        "import sys; sys.modules['torch'] = None\n"  # an import of torch would fail
        "from pytest_klineage.cli.main import main\n"
        "assert main(['report', 'latest']) == 0\n"
        "assert main(['report', 'latest', '--markdown', '--output', 'table.md']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=fake_gate)
    assert "geomean 2.00x over 1 of 1 scored" in done.stdout
    text = (fake_gate / "table.md").read_text()
    assert "| gemm-8x8x8-fp32 | fast" in text
    assert "**geomean 2.00x over 1 of 1 scored**" in text
    assert run("report", "latest", "--output", "no/such/folder/x.md", cwd=fake_gate).returncode == 2


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m pytest_klineage schema verdict | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n0\n"
    assert done.stderr == ""


@pytest.mark.parametrize("name", RECORDS)
def test_every_schema_is_json_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "$ref" in schema
    assert schema["$defs"]


def test_cases_lists_operators_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases"]) == 0
    text = capsys.readouterr().out
    for line in ("gemm\n  axes:     M, N, K", "option:   causal = False, True (default False)",
                 "compared: cublas, torch, vendor", "cpu shape: fp32: M=1024, N=1024, K=1024"):  # fmt: skip
        assert line in text


def test_cases_lists_what_a_kernel_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases"]) == 0
    text = capsys.readouterr().out
    for line in (
        "    inputs:  a[1024,1024] fp32, b[1024,1024] fp32\n    outputs: c[1024,1024] fp32\n    scalars: none\n",
        "    outputs: values[64,512] fp32, indices[64,512] int64\n",
        "    scalars: scale = 0.125, causal = 0\n",
        "    inputs with initial_state=True, also: state0[12,64,64] fp32\n",
    ):
        assert line in text


def test_doctor_says_what_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    text = capsys.readouterr().out
    for part in ("python", "pytest", "C++ compiler", "OpenMP", "torch", "GPU", "nvcc", "Landlock", "seccomp",
                 "namespaces", "cores", "/dev/shm", "cache"):  # fmt: skip
        assert f" {part}" in text
    assert ("The cpu platform can run" in text) == (status == 0)


def test_doctor_finds_a_missing_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "MISSING  C++ compiler" in text
    assert "try: apt-get install g++" in text
    assert "The cpu platform cannot run: C++ compiler" in text


def test_doctor_names_a_cxx_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "MISSING  C++ compiler" in text
    assert "the C++ compiler that CXX names, 'no-such-compiler', is missing" in text


def test_doctor_finds_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {finding.name: finding for finding in examine(tmp_path / "file" / "cache")}
    assert not found["cache"].present
    assert found["cache"].remedy


def test_doctor_does_not_import_torch() -> None:
    code = "import sys; from pytest_klineage.cli.doctor import examine; examine(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_findings_as_text() -> None:
    findings = [
        MachinePart("python", True, "3.11", needed=True),
        MachinePart("torch", False, "not installed", needed=True, remedy="pip install torch"),
        MachinePart("nvcc", False, "not on PATH"),
    ]
    assert not cpu_ready(findings)
    assert cpu_ready([findings[0], findings[2]])
    lines = finding_lines(findings)
    assert lines[0] == "ok       python  3.11"
    assert lines[1] == "MISSING  torch   not installed"
    assert lines[2].strip() == "try: pip install torch"
    assert lines[3] == "absent   nvcc    not on PATH"
