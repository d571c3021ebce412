"""The plugin with the real gate on tiny cases: outcomes, messages and records from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.records import Status
from pytest_klineage.results.runs import read_run

SUITE = """
import pytest
from pytest_klineage import kernel_case, make_case, read_source

CASE = dict(op="gemm", at_least=0.0001)

@kernel_case((24, 16, 8), "fp32", also=[(3, 5, 7)], **CASE)
def test_good(kernel_gate):
    verdict = kernel_gate("good.cpp")
    assert verdict.timing.speedup.estimate > 0
    assert verdict.machine.platform == "cpu"
    assert verdict.label == "good"

def test_explicit(kernel_gate):
    case = make_case("gemm", (24, 16, 8), "fp32", "torch", at_least=0.0001)
    source = read_source(kernel_gate.session.config.rootpath / "good.cpp", label="given")
    assert kernel_gate(source, case=case, against="good.cpp").case == case

@kernel_case((24, 16, 8), "fp32", **CASE)
@pytest.mark.parametrize("name", ["wrong", "broken", "noentry", "crash"])
def test_bad(kernel_gate, name):
    kernel_gate(f"{name}.cpp")

@kernel_case((24, 16, 8), "fp32", **CASE)
def test_misuse_unreadable(kernel_gate):
    kernel_gate("nowhere.cpp")

@kernel_case((24, 16, 8), "fp32", **CASE)
def test_misuse_suffix(kernel_gate):
    kernel_gate("good.f90")

def test_misuse_no_case(kernel_gate):
    kernel_gate("good.cpp")
"""
MESSAGES = [
    "kernel 'wrong' is not accepted on gemm-24x16x8-fp32: wrong value",
    "  wrong_value.mismatch: *",
    "kernel 'broken' is not accepted on gemm-24x16x8-fp32: build error",
    "  build_error.compile: *",
    "  the compiler said:",
    "    | *undeclared_name*",
    "kernel 'noentry' is not accepted on gemm-24x16x8-fp32: build error",
    "  build_error.entry_missing: *run*",
    "kernel 'crash' is not accepted on gemm-24x16x8-fp32: runtime error",
    "  runtime_error.crash: *",
    "klineage: the kernel source *nowhere.cpp cannot be read: No such file or directory",
    "klineage: good.f90: the suffix says no surface; pass surface= one of cpp*package.module:function*",
    "klineage: this test has no kernel_case marker; add one, or pass case= to kernel_gate",
]
STATUSES = {
    "test_good": Status.ACCEPTED,
    "test_explicit": Status.ACCEPTED,
    "test_bad[wrong]": Status.WRONG_VALUE,
    "test_bad[broken]": Status.BUILD_ERROR,
    "test_bad[noentry]": Status.BUILD_ERROR,
    "test_bad[crash]": Status.RUNTIME_ERROR,
}


def test_every_outcome_has_its_message_and_its_record(
    kernels: Path, pytester: pytest.Pytester, processes: tuple[str, ...], quick: tuple[str, ...]
) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess(*processes, *quick, "--klineage-platform=cpu")
    result.assert_outcomes(passed=2, failed=7)
    text = result.stdout
    for message in MESSAGES:
        text.fnmatch_lines([message])
    text.no_fnmatch_line("*Traceback*")
    text.no_fnmatch_line("*Error: *")
    text.fnmatch_lines(["geomean *x over 2 of 6 scored"])

    (path,) = kernels.glob("results/runs/*/records.jsonl")
    records = {record.nodeid.partition("::")[2]: record.verdict for record in read_run(path).records}
    found = {name: verdict.status for name, verdict in records.items()}
    assert {name: found[name] for name in STATUSES if found[name] not in (Status.SLOWER, Status.INCONCLUSIVE)} == {
        name: status for name, status in STATUSES.items() if found[name] not in (Status.SLOWER, Status.INCONCLUSIVE)
    }
    good = records["test_good"]
    assert good.timing is not None
    assert good.timing.candidate_samples_ms
    assert good.checks
    assert good.reference["torch"]


def test_record_mode_lets_every_kernel_pass(kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-k", "bad", *quick, "--klineage-mode=record")
    result.assert_outcomes(passed=4, deselected=5)


def test_a_missing_compiler_is_a_skip_with_the_remedy(
    kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(kernels))
    monkeypatch.delenv("CXX", raising=False)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-rs", "-k", "test_good", *quick)
    result.assert_outcomes(skipped=1, deselected=8)
    result.stdout.fnmatch_lines(["SKIPPED *klineage: *compiler*"])


def test_a_python_kernel_by_its_import_path(kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((24, 16, 8), "fp32", op="gemm", at_least=0.0001, library="allow")
        def test_function(kernel_gate):
            assert kernel_gate("torch:matmul").label == "torch:matmul"

        @kernel_case((24, 16, 8), "fp32", op="gemm", at_least=0.0001)
        def test_forbidden(kernel_gate):
            kernel_gate("torch:matmul")
        """
    )
    result = pytester.runpytest_subprocess(*quick)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["  wrapper.*"])


def test_a_seed_brings_the_same_wrong_value_back(
    kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]
) -> None:
    test = f"{pytester.makepyfile(SUITE)}::test_bad[wrong]"
    for name in ("first", "second"):
        arguments = ("--klineage-seed=monday", f"--klineage-results={name}")
        pytester.runpytest_subprocess(test, *quick, *arguments).assert_outcomes(failed=1)
    first, second = (
        [check.error for record in read_run(path).records for check in record.verdict.checks]
        for path in sorted(kernels.glob("*/runs/*/records.jsonl"))
    )
    assert first == second
    assert len(set(first)) > 1


RAISES = "def run(a, b):\n    return halve(a)\n\n\ndef halve(a):\n    raise ValueError('not today')\n"


def test_python_kernels_that_cannot_run_say_why(
    kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]
) -> None:
    (kernels / "raises.py").write_text(RAISES)
    (kernels / "wrap.py").write_text("def run(a, b):\n    return a @ b\n")
    pytester.makepyfile(
        """
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((24, 16, 8), "fp32", op="gemm", at_least=0.0001, library="allow")
        @pytest.mark.parametrize("kernel", ["raises.py", "nomodule:f", "wrap:walk", "wrap:run", "kernel.cu"])
        def test_kernel(kernel_gate, kernel):
            kernel_gate(kernel)
        """
    )
    result = pytester.runpytest_subprocess(*quick)
    result.assert_outcomes(passed=1, failed=4)
    first = ["  runtime_error.exception: ValueError: not today", "    at kernel.py, line 2, in run: return halve(a)"]
    result.stdout.fnmatch_lines([*first, "    at kernel.py, line 6, in halve: raise ValueError(*", "  next: *"])
    result.stdout.fnmatch_lines(
        ["gemm-24x16x8-fp32 raises: runtime_error.exception: ValueError: not today (kernel.py,*"]
    )
    result.stdout.fnmatch_lines(
        ["  runtime_error.exception: No module named 'nomodule': *", "  next: install it, or *"]
    )
    result.stdout.fnmatch_lines(["  build_error.entry_missing: *'walk'*", "  next: define the function *"])
    result.stdout.fnmatch_lines(["klineage: the kernel source *kernel.cu cannot be read: No such file or directory"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*calls.py*")
    result.stdout.no_fnmatch_line('*extern "C"*')


def test_an_unwritable_cache_is_reported(kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]) -> None:
    (kernels / "cache").write_text("a file")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-k", "test_good", *quick, "--klineage-cache-dir=cache")
    result.assert_outcomes(failed=1, deselected=8)
    result.stdout.fnmatch_lines(["  build_error.io: *cache*", "  next: *--klineage-cache-dir*"])
