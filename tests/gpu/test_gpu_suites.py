"""Without a GPU: the tables of suites/gate_quality's GPU measurements, and the library kernels that a CPU can run."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import msgspec
import on_gpu
import pytest
import test_gpu_a_a as a_a
import test_gpu_corpus as corpus
import test_gpu_references as references
import test_gpu_verdict_time as verdict_time

from pytest_klineage.errors import BadRecord
from pytest_klineage.operators import make_case, operator, operator_of
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import LibraryPolicy, Surface
from pytest_klineage.surfaces.python import parse

JUNIT = """<testsuites><testsuite>
<testcase name="test_attack_is_rejected[S1_unwritten-all-on]" time="1.5"/>
<testcase name="test_attack_is_rejected[S2_half_output-all-on]" time="1"><properties>
<property name="code" value="wrong_value.unwritten"/></properties></testcase>
<testcase name="test_attack_gets_through_without_its_defence[S2_half_output-poison]" time="1"><properties>
<property name="code" value="accepted.faster"/></properties></testcase>
<testcase name="test_fault_ends_its_own_kernel_only[trap]" time="2"><properties><property name="other" value="x"/>
<property name="code" value="runtime_error.cuda_error"/><property name="code" value="accepted.faster"/></properties>
</testcase>
<testcase name="test_attack_is_rejected[T18_super_batch-all-on]" time="1"><failure message="accepted"/></testcase>
<testcase name="test_benign_twin_is_left_alone[C13_tiny]" time="0.5"><skipped message="no GPU"/></testcase>
<testcase name="test_something_else[x]" time="9"/>
</testsuite></testsuites>"""
FAKE_GATE = """
import os, types
import pytest
from pytest_klineage.records import Code

def judge(exploit, without=frozenset()):
    code = Code.CRASH if exploit.path.parent.name == "faults" else Code.ACCEPTED_FASTER
    return types.SimpleNamespace(code=code, status=code.status, scored=code is Code.ACCEPTED_FASTER, reasons=(), log="")

GIVEN = dict.fromkeys(("platform", "corpus_settings", "built", "gate"), "none") | {{"judge_exploit": judge}}

@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.argname in GIVEN:
        value = GIVEN[fixturedef.argname]
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
        return value

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    {ends} or os._exit(1)
"""
"""A pytest plugin that judges without a GPU, and can end its pytest before there is a report."""
SAMPLES = tuple(1.0 + index / 1000 for index in range(24))


def trial(name: str, number: int) -> a_a.GpuTrial:
    """A trial in which both sides were equally fast."""
    return a_a.GpuTrial(
        operator=name, number=number, low=0.99, estimate=1.0, high=1.01, pairs=24, seconds=0.3, sequential=1.01,
        half_width=0.01, reference_samples_ms=SAMPLES, candidate_samples_ms=SAMPLES, starts=(0,), machine=None,
        judged_at="2026-11-21T12:00:00+00:00", kernel=f"{name}: its library",
    )  # fmt: skip


def timed(name: str, ratio: float) -> references.Timed:
    """A row of the references' table."""
    item = next(item for item in references.TO_TIME if item.name == name)
    assert item.published_ms is not None
    return references.Timed(
        name=name, case=item.case().id, reference=item.reference, published_ms=item.published_ms,
        measured_ms=ratio * item.published_ms, samples_ms=(1.0,), facts={"variant": "cublaslt"},
        machine="NVIDIA H200", judged_at="2026-11-21T12:00:00+00:00",
    )  # fmt: skip


def test_a_report_of_the_corpus_becomes_a_table(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    results = corpus.results_of_report(report)
    assert [result.outcome for result in results] == ["passed", "passed", "passed", "passed", "failed", "skipped"]
    table = corpus.report_of(results, "sm90")
    assert "| rejected | 2 | 3 | 0 |" in table
    assert "| twin left alone | 0 | 0 | 1 |" in table
    assert "| S1_unwritten | S1 | wrong_value.unwritten | not recorded | 1/1 |  |" in table
    assert "| S2_half_output | S2 | wrong_value.unwritten | wrong_value.unwritten | 2/2 |  |" in table
    assert "| trap | E8 | runtime_error.* | runtime_error.cuda_error | 1/1 |  |" in table
    assert "rejected (all-on) |" in next(line for line in table.splitlines() if "T18_super_batch" in line)


def test_the_codes_of_a_report_are_in_the_rows(tmp_path: Path) -> None:
    report, rows = tmp_path / "junit.xml", tmp_path / "rows.jsonl"
    report.write_text(JUNIT)
    results = corpus.results_of_report(report)
    assert {result.kernel: result.codes for result in results if result.how in ("", "all-on")} == {
        "S1_unwritten": (), "S2_half_output": ("wrong_value.unwritten",), "T18_super_batch": (), "C13_tiny": (),
        "trap": ("runtime_error.cuda_error", "accepted.faster"),
    }  # fmt: skip
    rows.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))
    assert on_gpu.kept_rows(rows, corpus.Result, without=lambda result: False) == results


def test_published_rows_are_read_with_or_without_codes() -> None:
    published = corpus.ROOT / "results"
    of_report = corpus.results_of_report(published / "gpu-tests" / "junit.xml")
    of_rows = on_gpu.kept_rows(
        published / "gate_quality" / "corpus-sm90.jsonl", corpus.Result, without=lambda result: False
    )
    assert of_report
    assert of_rows
    row = b'{"claim":"rejected","kernel":"N2_half_sums","how":"all-on","outcome":"passed","seconds":5.942}'
    assert msgspec.json.decode(row, type=corpus.Result).codes == ()


@pytest.mark.parametrize("ends", [True, False])
def test_a_part_that_runs_hands_on_the_code_of_every_judgement(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake_gate.py").write_text(FAKE_GATE.format(ends=ends))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p fake_gate")
    config: Any = types.SimpleNamespace(getoption=lambda name: None)
    results, words = corpus.run_part(config, "cpu", "left_alone")
    assert {result.claim for result in results} == set(corpus.PARTS["left_alone"].values()), words
    for result in results:
        left_alone = ("accepted.faster",) if result.holds else ()
        own = ("runtime_error.crash",) if result.claim.startswith("fault") else ()
        assert result.codes == (own + left_alone if ends else ()), words


def test_a_line_of_a_running_corpus_is_read() -> None:
    line = "tests/exploits/gpu/test_gpu_exploits.py::test_attack_is_rejected[S1_unwritten-all-on] PASSED [ 3%]"
    found = corpus.LINE.search(line)
    assert found is not None
    result = corpus.result_of(found[1], found[2], found[3].lower(), 1.0)
    assert (result.claim, result.kernel, result.how, result.holds) == ("rejected", "S1_unwritten", "all-on", True)


def test_every_test_of_the_corpus_is_in_one_part() -> None:
    text = (corpus.CORPUS / "test_gpu_exploits.py").read_text()
    written = {
        line.partition("(")[0].removeprefix("def ") for line in text.splitlines() if line.startswith("def test_")
    }
    assert written == set(corpus.CLAIMS)


def test_rows_of_other_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert on_gpu.kept_rows(path, a_a.GpuTrial, without=lambda row: False) == []
    rows = [trial("gemm", 0), trial("topk", 0)]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert on_gpu.kept_rows(path, a_a.GpuTrial, without=lambda row: row.operator == "gemm") == rows[1:]
    path.write_bytes(path.read_bytes()[:-10])
    assert on_gpu.kept_rows(path, a_a.GpuTrial, without=lambda row: False) == rows[:1]
    path.write_text('{"another": "form"}\n')
    with pytest.raises(BadRecord, match=r"rows\.jsonl"):
        on_gpu.kept_rows(path, a_a.GpuTrial, without=lambda row: False)


def test_the_table_of_a_a_has_a_row_for_each_operator() -> None:
    table = a_a.report_of([trial(name, number) for name in ("gemm", "topk") for number in range(3)], "sm90")
    assert "| gemm | 3 | 3 (100.0 %) | 3 (100.0 %) | 0 |" in table
    assert "| all | 6 |" in table
    assert "gemm: its library, topk: its library" in table
    assert "| +-1.00 % | 1.0000 | 1.0100 |" in table


def test_the_table_of_a_a_names_every_day_of_its_trials() -> None:
    later = msgspec.structs.replace(trial("gemm", 1), judged_at="2026-11-22T03:00:00+00:00")
    assert "\n2026-11-21 and 2026-11-22. Kernels: gemm: its library." in a_a.report_of(
        [later, trial("gemm", 0)], "sm90"
    )


def test_reference_table_marks_those_within_three_percent() -> None:
    table = references.report_of([timed("gemm-2048", 1.05), timed("gemm-4096", 0.99)], "sm90")
    rows = [line for line in table.splitlines() if line.startswith("| gemm-")]
    assert [row.rpartition("| ")[2] for row in rows] == ["yes |", "no |"]
    assert "cublas (cublaslt)" in rows[0]


@pytest.mark.parametrize("item", references.TO_TIME, ids=lambda item: item.name)
def test_a_case_to_time_exists_and_allows_libraries(item: references.ReferenceToTime) -> None:
    case = item.case()
    assert case.library is LibraryPolicy.ALLOW
    assert case.reference == item.reference
    assert operator_of(case).flops(case) > 0


def test_the_table_of_verdict_times_has_its_targets() -> None:
    figures = verdict_time.VerdictTime(
        kernel="expert", first_s=9.0, total_s=(2.0, 3.0, 2.5), timed_s=(1.0, 1.0, 1.0), overhead_s=(1.0, 2.0, 1.5),
        half_widths=(0.01, 0.02, 0.01), codes=("accepted.faster",), machine="NVIDIA H200", judged_at="now",
    )  # fmt: skip
    table = verdict_time.report_of(figures, "sm90")
    assert "| a warm verdict, median (largest) | 2.50 s (3.00 s) | 4 s |" in table
    assert "| of these inside of the timed blocks | 1.00 s (1.00 s) | 2.5 s |" in table
    assert "| beside them | 1.50 s (2.00 s) | 1.5 s |" in table
    assert "| half-width of the interval | +-1.00 % | 0.5 % |" in table


@pytest.mark.parametrize("name", on_gpu.OPERATORS)
def test_an_operator_has_a_library_kernel_and_an_expert(name: str) -> None:
    first, *others = on_gpu.sources(name, "sm90")
    assert first.surface is Surface.PYTHON
    assert first.main is not None
    parse(first.main.name, first.main.text)
    assert name == "gdn" or others, f"experts/{name} has nothing for sm90"


@pytest.mark.parametrize(("name", "shape"), [("gemm", (16, 24, 32)), ("conv2d", (1, 4, 9, 9, 8, 3, 1, 1))])
def test_a_library_kernel_is_right(name: str, shape: tuple[int, ...]) -> None:
    import torch

    case = make_case(name, shape, "fp32", "torch")
    chosen = operator(name)
    signature = chosen.signature(case)
    inputs = chosen.make_inputs(case, torch.Generator().manual_seed(1), chosen.input_distributions[0])
    namespace: dict[str, Any] = {}
    exec((on_gpu.LIBRARY_KERNELS / f"{name}.py").read_text(), namespace)
    arguments: dict[str, Any] = {key: int(value) for key, value in signature.scalars.items()}
    if name == "gemm":
        arguments["out"] = torch.empty(signature.outputs[0].shape)
    answer = namespace["run"](*inputs.values(), **arguments)
    assert Expected(chosen, case, inputs).accepts({signature.outputs[0].name: arguments.get("out", answer)})
