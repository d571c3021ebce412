"""Recording: nothing that was judged is lost, neither to a crash nor to a disk, and the tables can be made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.results.runs import read_run

SUITE = """
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm")
def test_fast(kernel_gate):
    kernel_gate("fast.cpp")

@kernel_case((4, 4, 4), "fp32", op="gemm")
def test_faster(kernel_gate):
    kernel_gate("faster.cpp")

@kernel_case((2, 2, 2), "fp32", op="gemm")
def test_wrong(kernel_gate):
    kernel_gate("wrong.cpp")
"""


def only_run(root: Path) -> Path:
    (path,) = (path.parent for path in root.glob("results/runs/*/records.jsonl"))
    return path


def table_of(lines: list[str]) -> list[str]:
    """From the table's head to its mean."""
    start = next(index for index, line in enumerate(lines) if line.startswith("case "))
    end = next(index for index, line in enumerate(lines) if line.startswith("geomean"))
    return lines[start : end + 1]


def test_verdicts_are_recorded_and_shown(
    fake_gate: Path, pytester: pytest.Pytester, processes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest(*processes, "--klineage-run=my trial")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*= klineage: cpu (Pretended CPU) =*",
            "case *kernel *ref *ref ms *cand ms *speedup *status",
            "gemm-8x8x8-fp32 * fast * torch * 1.000 * 0.5000 * 2.00x [[]1.80, 2.20] * accepted",
        ]
    )
    result.stdout.fnmatch_lines(["geomean 4.00x over 2 of 3 scored"])
    result.stdout.fnmatch_lines(["gemm-2x2x2-fp32 wrong: wrong_value.mismatch: pretended", "    next: *"])
    assert max(map(len, table_of(result.outlines))) <= 100

    path = only_run(fake_gate)
    assert path.name.endswith("-cpu-my-trial")
    result.stdout.fnmatch_lines([f"records: results/runs/{path.name}", f"again:   pytest-klineage report *{path.name}"])
    run = read_run(path)
    assert sorted(record.nodeid.partition("::")[2] for record in run.records) == [
        "test_fast",
        "test_faster",
        "test_wrong",
    ]
    assert run.info is not None
    assert run.info.machine is not None
    assert "--klineage-run=my trial" in run.info.argv
    assert run.info.settings["mode"] == "gate"
    assert run.info.settings["workers"] == (2 if processes else 0)

    capsys.readouterr()
    assert main(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert table_of(lines) == table_of(result.outlines)


def test_the_mode_decides_what_a_bad_kernel_is(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        @pytest.mark.parametrize("name", ["fast", "slow", "unclear", "wrong", "cheat", "skipped"])
        def test_kernel(kernel_gate, name):
            assert kernel_gate(f"{name}.cpp").label == name
        """
    )
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=2, failed=3, skipped=1)
    result.stdout.fnmatch_lines(["kernel 'wrong' is not accepted on gemm-8x8x8-fp32: wrong value"])
    result.stdout.fnmatch_lines(["  wrong_value.mismatch: pretended", "    size = 3", "  next: compare*"])
    result.stdout.fnmatch_lines(["SKIPPED *klineage: skipped.missing_dependency: pretended"])
    result.stdout.no_fnmatch_line("*Error*")
    pytester.runpytest("--klineage-mode=record").assert_outcomes(passed=6)


def test_a_skip_fails_where_that_is_asked_for(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_kernel(kernel_gate):
            kernel_gate("skipped.cpp")
        """
    )
    result = pytester.runpytest("--klineage-fail-skipped")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kernel 'skipped' is not accepted on gemm-8x8x8-fp32: skipped", "  next: *doctor*"])
    pytester.runpytest("--klineage-fail-skipped", "--klineage-mode=record").assert_outcomes(passed=1)


@pytest.mark.parametrize("folder", [".", "tests"], ids=["beside-the-test", "in-the-root-directory"])
def test_a_module_that_is_a_file_of_the_project_is_read_as_one(
    fake_gate: Path, pytester: pytest.Pytester, folder: str
) -> None:
    (fake_gate / "wrap.py").write_text("# accepted.faster 2.0\n")
    (fake_gate / folder).mkdir(exist_ok=True)
    (fake_gate / folder / "test_wrap.py").write_text(
        "from pytest_klineage import kernel_case\n\n"
        "@kernel_case((8, 8, 8), 'fp32', op='gemm')\n"
        "def test_kernel(kernel_gate):\n"
        "    assert kernel_gate('wrap:run').label == 'wrap:run'\n"
        "    assert kernel_gate('wrap:run', label='mine').label == 'mine'\n"
    )
    pytester.runpytest(f"--rootdir={fake_gate}", folder, "--import-mode=importlib").assert_outcomes(passed=1)


def test_one_name_where_several_belong_is_said(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        @pytest.mark.parametrize("wrong", [{"also": "tile.h"}, {"flags": "-O3"}], ids=["also", "flags"])
        def test_kernel(kernel_gate, wrong):
            kernel_gate("fast.cpp", **wrong)
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["klineage: also= is a sequence of files, got 'tile.h'"])
    result.stdout.fnmatch_lines(["klineage: flags= is a sequence of strings, got the string '-O3'"])


SAYS_NOTHING = "klineage: the harness failed, which says nothing about the kernel: "
FAULTS = {
    "the oracle could not open the case": [f"{SAYS_NOTHING}the oracle could not open the case"],
    """the template ended. It printed: Traceback (most recent call last):
  File "/x/pytest_klineage/worker/template.py", line 3, in serve
    spawn()
OSError: no more processes
""": [
        f"{SAYS_NOTHING}OSError: no more processes",
        "    the template ended. It printed: Traceback (most recent call last):",
    ],
}


@pytest.mark.parametrize("fault", FAULTS, ids=["sentence", "traceback"])
def test_a_fault_of_the_harness_says_the_useful_line_first(
    fake_gate: Path, pytester: pytest.Pytester, fault: str
) -> None:
    raising = "from pytest_klineage import HarnessError\n        raise HarnessError(open('fault').read())"
    text = (
        (fake_gate / "conftest.py")
        .read_text()
        .replace("_, code, *speedup =", f"{raising}\n        _, code, *speedup =")
    )
    (fake_gate / "conftest.py").write_text(text)
    (fake_gate / "fault").write_text(fault)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("-k", "fast")
    result.stdout.fnmatch_lines(FAULTS[fault], consecutive=True)


def test_a_worker_that_crashes_keeps_what_was_recorded(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_a(kernel_gate):
            kernel_gate("fast.cpp")

        def test_b():
            os._exit(1)

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_c(kernel_gate):
            kernel_gate("fast.cpp")
        """
    )
    result = pytester.runpytest("-n1")
    result.stdout.fnmatch_lines(["*worker 'gw0' crashed*", "geomean 2.00x over 2 of 2 scored"])
    names = [record.nodeid.partition("::")[2] for record in read_run(only_run(fake_gate)).records]
    assert sorted(names) == ["test_a", "test_c"]


def test_a_test_that_is_interrupted_keeps_its_verdicts(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_a(kernel_gate):
            kernel_gate("fast.cpp")
            raise KeyboardInterrupt
        """
    )
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["geomean 2.00x over 1 of 1 scored"])
    assert len(read_run(only_run(fake_gate)).records) == 1


def test_an_unwritable_store_costs_only_a_message(
    fake_gate: Path, pytester: pytest.Pytester, processes: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    pytester.makepyfile(SUITE)
    (fake_gate / "results").write_text("a file where a folder should be")
    result = pytester.runpytest(*processes)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["geomean 4.00x over 2 of 3 scored"])
    text = result.stdout.str()
    assert text.count("klineage: the run store") == 1
    result.stdout.fnmatch_lines(
        ["klineage: the run store *results cannot be written: *", "klineage: records from * kept in *"]
    )
    (rescued,) = tmp_path.glob("klineage-*/runs/*/records.jsonl")
    assert len(read_run(rescued).records) == 3
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_good_run_with_a_bad_store_has_a_bad_exit_status(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    (fake_gate / "results").write_text("")
    assert pytester.runpytest("-k", "fast").ret == pytest.ExitCode.TESTS_FAILED


def test_a_disk_that_fills_up_in_the_middle(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import resource
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        @pytest.mark.parametrize("number", range(4))
        def test_kernel(kernel_gate, number):
            if number == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))
            kernel_gate("fast.cpp")
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["geomean 2.00x over 4 of 4 scored", "klineage: the run store *"])
    assert len(read_run(only_run(fake_gate)).records) >= 2


def test_the_json_file_has_everything(fake_gate: Path, pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    pytester.makepyfile(SUITE)
    pytester.runpytest(*processes, "--klineage-json=out/all.json")
    data = json.loads((fake_gate / "out" / "all.json").read_text())
    assert data["summary"] == {"geomean": pytest.approx(4.0), "scored": 2, "judged": 3, "skipped": 0}
    assert len(data["records"]) == 3


def test_a_json_file_that_cannot_be_written_is_said(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    (fake_gate / "out").write_text("")
    result = pytester.runpytest("--klineage-json=out/all.json", "-k", "fast")
    result.stdout.fnmatch_lines(["klineage: */out/all.json cannot be written: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_junit_has_the_figures(fake_gate: Path, pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    from xml.etree import ElementTree

    pytester.makepyfile(SUITE)
    pytester.runpytest(*processes, "--junitxml=junit.xml", "-k", "test_fast or wrong")
    cases = {case.get("name"): case for case in ElementTree.parse(fake_gate / "junit.xml").iter("testcase")}
    found = {
        name: {item.get("name"): item.get("value") for item in case.iter("property")} for name, case in cases.items()
    }
    assert found["test_fast"] == {
        "klineage_case": "gemm-8x8x8-fp32",
        "klineage_kernel": "fast",
        "klineage_status": "accepted",
        "klineage_code": "accepted.faster",
        "klineage_speedup": "2.0",
        "klineage_speedup_low": "1.8",
        "klineage_speedup_high": "2.2",
        "klineage_reference_ms": "1.0",
        "klineage_candidate_ms": "0.5",
    }
    assert found["test_wrong"]["klineage_code"] == "wrong_value.mismatch"
    assert "klineage_speedup" not in found["test_wrong"]


def test_the_gate_is_closed_when_the_session_ends(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_a(kernel_gate, klineage_session):
            kernel_gate("fast.cpp")
            kernel_gate("faster.cpp")
            assert type(klineage_session.gate).open_gates == 1
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)  # the pretended gate counts the open ones when pytest ends


def test_a_screening_is_not_taken_into_a_run_store(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import msgspec
        import pytest
        from pytest_klineage import UsageError, kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm")
        def test_a(kernel_gate, klineage_session):
            screened = msgspec.structs.replace(kernel_gate("fast.cpp"), screened=1.0)
            with pytest.raises(UsageError, match="is a screening: judge it in full"):
                klineage_session.remember("a", screened)
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)
