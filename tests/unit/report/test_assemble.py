"""Sections, tables and figures: coverage beside means, failures without numbers, the paper's values only if asked."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import msgspec
import pytest
from report_sample import case_of, verdict_of, write_run, write_trajectory

from pytest_klineage.records import Code, Verdict
from pytest_klineage.report.assemble import COMMANDS, assemble
from pytest_klineage.report.collect import collect
from pytest_klineage.report.document import Figure, Mark, Report, Table, Tone
from pytest_klineage.report.outcomes import attempts
from pytest_klineage.report.steps import optimization_of


@pytest.fixture(scope="module")
def report(everything: Path) -> Report:
    return assemble(collect([everything]))


def table(report: Report, title: str) -> Table:
    return next(one for part in report.sections for one in part.tables if one.title.startswith(title))


def figure(report: Report, key: str) -> Figure:
    return next(one for part in report.sections for one in part.figures if one.key.startswith(key))


def texts(found: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in found.rows]


def test_every_section_is_there_and_nothing_is_missing(report: Report) -> None:
    keys = [section.key for section in report.sections]
    assert keys == ["speedups", "latencies", "cost", "steps", "lineages", "cards", "recovery", "generated-only",
                    "held-out", "verdicts", "setup"]  # fmt: skip
    assert report.absent == ()
    assert report.problems == ()


def test_keys_are_unique_and_every_detail_is_there(report: Report) -> None:
    figures = [one.key for part in report.sections for one in part.figures]
    assert len(set(figures)) == len(figures)
    there = {detail.key for detail in report.details}
    points = [point for part in report.sections for one in part.figures for line in one.series for point in line.points]
    cells = [cell for part in report.sections for one in part.tables for row in one.rows for cell in row]
    used = {one.detail for one in (*points, *cells)} - {""}
    assert used
    assert used <= there


def test_means_stand_beside_their_coverage(report: Report) -> None:
    rows = {(row[0], row[1]): row[2:] for row in texts(table(report, "Means"))}
    assert rows["klineage", "cpp"] == [f"{math.sqrt(11.2 * 1.08):.2f}x", "2/2", "2/2"]
    assert rows["adaexplore", "cpp"] == ["0.61x", "1/2", "0/2"]
    assert rows["naive", "cpp"] == ["0.31x", "1/2", "0/2"]


def test_a_failure_has_no_number_anywhere(report: Report) -> None:
    rows = texts(table(report, "Speedups"))
    (failed,) = [row for row in rows if row[0].startswith("conv2d") and row[1] == "adaexplore"]
    assert failed[3:7] == ["-", "-", "-", "-"]
    assert failed[-2:] == ["0/1", "wrapper.framework"]
    cells = next(row for row in table(report, "Latency by method").rows if row[0].text.startswith("conv2d"))
    assert (cells[2].text, cells[2].order, cells[2].tone) == ("FAIL", None, Tone.BAD)
    bars = figure(report, "speedups")
    points = {point.text: point for series in bars.series for point in series.points}
    assert all(point.y is None for point in points.values() if point.mark is not Mark.SCORED)
    assert sum(point.y is None for point in points.values()) == 2


def test_the_best_of_several_runs_counts_with_their_number(tmp_path: Path) -> None:
    for number, speeds in enumerate([(0.5, 2.0), (0.5, 3.0), (None, None)]):
        write_trajectory(tmp_path / f"{number}.jsonl", "klineage", "topk", speeds)
    rows = texts(table(assemble(collect([tmp_path])), "Speedups"))
    assert len(rows) == 1
    assert rows[0][4:7] == ["3.00x", "2.88 to 3.15", "0.4627"]
    assert rows[0][-2:] == ["2/3", "accepted.faster"]


def test_a_root_is_no_methods_result(tmp_path: Path) -> None:
    path = write_trajectory(tmp_path / "1.jsonl", "klineage", "topk", (0.5,))
    path.write_bytes(b"".join(line for line in path.read_bytes().splitlines(True) if b"malformed" not in line))
    one = optimization_of(collect([path]).trajectories[0])
    (attempt,) = attempts((), [one])
    assert (attempt.speedup, attempt.code, attempt.interval, attempt.step) == (None, None, None, None)
    assert attempt.device == "Test CPU @ 3 GHz"


def test_skips_are_no_attempts(tmp_path: Path) -> None:
    write_run(tmp_path, [verdict_of("gemm", 2.0), verdict_of("topk", None, code=Code.SKIPPED_PLATFORM)])
    assert texts(table(assemble(collect([tmp_path])), "Means"))[0][-2:] == ["1/1", "1/1"]


def test_languages_have_a_table_when_there_are_two(report: Report, tmp_path: Path) -> None:
    found = table(report, "Latency by language")
    assert [column.name for column in found.columns] == ["case", "cpp ms", "triton ms", "reference ms"]
    assert ["gemm-1024x1024x1024-fp32", "10.423", "10.990", "11.100"] in texts(found)
    write_run(tmp_path, [verdict_of("gemm", 2.0)])
    alone = assemble(collect([tmp_path]))
    assert not [one for part in alone.sections for one in part.tables if one.title.startswith("Latency by language")]


def test_running_best_is_against_dollars_until_the_money_ended(report: Report) -> None:
    curves = figure(report, "cost-cpu-topk")
    klineage = next(series for series in curves.series if series.name == "klineage")
    assert [(round(point.x, 2), point.y) for point in klineage.points] == [
        (0.0, 0.31), (1.19, 2.4), (2.9, 8.7), (3.95, 11.2), (3.95, 11.2),
    ]  # fmt: skip
    failed = figure(report, "cost-cpu-conv2d")
    assert next(series for series in failed.series if series.name == "adaexplore").points == ()


def test_failed_steps_and_wrappers_are_marked(report: Report) -> None:
    steps = figure(report, "steps-cpu-conv2d-1x64x56x56x128x3x1x1-fp32-klineage").series[0]
    marks = [point.mark for point in steps.points]
    assert marks == [Mark.SCORED, Mark.SCORED, Mark.WRAPPER, Mark.SCORED, Mark.SCORED, Mark.FAILED]
    assert [point.y is None for point in steps.points] == [mark is not Mark.SCORED for mark in marks]


def test_a_lineage_is_walked_from_expert_to_naive(report: Report) -> None:
    trace = figure(report, "lineage-gemm-cpu-cpp")
    assert trace.categories == ("expert", "without simd", "without pack", "without register_tile")
    states, refused = trace.series
    assert [point.x for point in states.points] == [0, 1, 2, 3]
    assert [round(point.y or 0, 3) for point in states.points] == [2.056, 12.065, 35.806, 222.0]
    assert [(1 < point.x < 2, point.y is None, point.mark) for point in refused.points] == [
        (True, True, Mark.REJECTED), (True, False, Mark.REJECTED),
    ]  # fmt: skip


def test_the_states_of_a_lineage_are_a_table(report: Report) -> None:
    rows = texts(table(report, "States of the lineages"))
    assert [row[1] for row in rows] == ["naive", "register-tile", "pack-b", "simd"]
    assert rows[2][2:7] == ["pack", "12.065", "18.40x", "3.00x", "2"]


def test_cards_show_the_trial_that_admitted_them(report: Report) -> None:
    (row,) = texts(table(report, "Skill cards"))
    assert row == ["cpp-pack-b", "gemm/cpu-cpp", "pack", "admitted", "2.00x [1.90, 2.10]",
                   "1.80x [1.70, 1.90] on conv2d, cpu, cpp", "1/2"]  # fmt: skip


def test_recovery_counts_trials_at_nine_tenths(report: Report) -> None:
    found = table(report, "Recovered trials")
    assert texts(found) == [["Top-K", "2/3"]]
    assert [cell.text for cell in found.foot[0]] == ["Total", "2/3"]
    assert "recovery" not in {row[1] for row in texts(table(report, "Means"))}


def test_slowdown_without_cards(report: Report) -> None:
    assert table(report, "Without cards").title == "Without cards, device Test CPU @ 3 GHz, method generated-only"
    rows = {row[0]: row[1:] for row in texts(table(report, "Without cards"))}
    assert rows["topk-64x4096x512-fp32"] == ["1.068", "0.1239", f"{11.2 / 1.3:.2f}x"]
    assert "gemm-1024x1024x1024-fp32" not in rows


def test_held_out_instances_by_family(report: Report) -> None:
    found = table(report, "By family")
    assert texts(found) == [
        ["GEMM (1)", "1.10x", "1/1", "1/1", "1.20x", "1/1", "1/1"],
        ["Other (1)", "0.96x", "1/1", "0/1", "0.97x", "1/1", "0/1"],
    ]
    assert found.foot[0][0].text == "Overall (2)"
    assert len(texts(table(report, "One by one"))) == 2


def test_effects_of_arms_have_intervals(tmp_path: Path) -> None:
    def judged(label: str, speed: float) -> list[Verdict]:
        return [verdict_of(name, speed, label=label, case=case_of(name, "flaggems")) for name in ("gemm", "topk")]

    write_run(tmp_path, [*judged("idiom", 1.0), *judged("blind", 1.1), *judged("card", 1.21)])
    report = assemble(collect([tmp_path]))
    first, _second = texts(table(report, "Effects"))
    assert first[0] == case_of("gemm", "flaggems").id
    assert first[1].startswith("1.100x [")
    assert first[2].startswith("1.100x [")
    assert [figure.key for part in report.sections for figure in part.figures] == ["held-out-speedups"]
    alone = tmp_path / "alone"
    write_run(alone, judged("idiom", 1.0))
    titles = " ".join(one.title for part in assemble(collect([alone])).sections for one in part.tables)
    assert "One by one" in titles
    assert "Effects" not in titles


def test_paper_values_are_opt_in_and_name_their_device(report: Report, everything: Path) -> None:
    assert not [one for part in report.sections for one in part.tables if one.paper or "paper" in one.title]
    asked = assemble(collect([everything]), beside_paper=True)
    printed = [one for part in asked.sections for one in part.tables if one.paper]
    assert len(printed) == 9
    for one in printed:
        assert one.title.startswith("The paper's ")
        assert "H100 PCIe (SM90)" in one.paper or "RTX PRO 6000 Blackwell (SM120)" in one.paper or "GDN" in one.paper
    assert table(asked, "The paper's Figure 3").rows[0][2].text == "0.99x"


def test_absent_paper_tables_have_their_command(tmp_path: Path) -> None:
    write_run(tmp_path, [verdict_of("gemm", 2.0)], nodeid="suites/main_tier/test_main_tier.py::test_main_tier[{}]")
    report = assemble(collect([tmp_path]))
    assert {one.what for one in report.absent} == {what for key, (what, _) in COMMANDS.items() if key != "speedups"}
    assert all(one.command.startswith("pytest") for one in report.absent)


def test_a_users_run_is_not_held_to_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path, [verdict_of("gemm", 2.0)], nodeid="tests/test_mine.py::test_{}")
    assert assemble(collect([tmp_path])).absent == ()


def test_every_record_of_a_run_has_a_row(tmp_path: Path) -> None:
    codes = (Code.MISMATCH, Code.SKIPPED_PLATFORM, Code.COMPILE)
    rejected = [verdict_of("gemm", None, code=code, label=f"kernel {code.value}") for code in codes]
    write_run(tmp_path, [verdict_of("gemm", 2.0, label="mine"), *rejected])
    rows = texts(table(assemble(collect([tmp_path])), "Verdicts of sample"))
    assert [row[1] for row in rows] == ["mine", *(f"kernel {code.value}" for code in codes)]
    assert [row[2] for row in rows[1:]] == [code.status.value for code in codes]
    assert [row[3] for row in rows[1:]] == [code.value for code in codes]
    assert rows[0][4:6] == ["2.00x", "1.92 to 2.10"]
    assert all(row[4:8] == ["-"] * 4 for row in rows[1:])


def test_kernels_of_one_case_are_counted_one_by_one(tmp_path: Path) -> None:
    broken = verdict_of("gemm", None, code=Code.MISMATCH, label="broken")
    write_run(tmp_path, [verdict_of("gemm", 2.0, label="mine"), broken])
    report = assemble(collect([tmp_path]))
    assert texts(table(report, "Means"))[0][-3:] == ["-", "1/2", "1/2"]
    assert [(row[1], row[-1]) for row in texts(table(report, "Speedups"))] == [
        ("mine", "accepted.faster"), ("broken", Code.MISMATCH.value),
    ]  # fmt: skip
    assert {one.kernel for one in attempts(collect([tmp_path]).runs, ())} == {"mine", "broken"}
    assert figure(report, "speedups").categories == (
        "gemm-1024x1024x1024-fp32 mine", "gemm-1024x1024x1024-fp32 broken",
    )  # fmt: skip


def test_columns_that_say_nothing_are_in_the_title(report: Report) -> None:
    found = table(report, "Speedups")
    assert found.title == "Speedups, device Test CPU @ 3 GHz, reference torch"
    assert "device" not in {column.name for column in found.columns}
    assert all(len(row) == len(found.columns) for row in (*found.rows, *found.foot))


def trial(root: Path, study: str, method: str, number: int, speeds: tuple[float | None, ...]) -> Path:
    return write_trajectory(
        root / "trajectories" / f"{study}-cpu" / method / f"topk-{number}.jsonl", method, "topk", speeds
    )


def test_trials_beside_the_expert_are_in_their_own_tables(tmp_path: Path) -> None:
    for number, speeds in enumerate([(0.1, 0.95), (0.1, 0.5), (0.1, None)], start=1):
        trial(tmp_path, "roundtrip_recovery", "klineage", number, speeds)
    trial(tmp_path, "generated_only", "generated-only", 1, (0.1, 0.19))
    trial(tmp_path, "generated_only", "labels-only", 1, (None, None))
    write_run(tmp_path / "ablations", [verdict_of("topk", 0.99)], nodeid="test_roundtrip_recovery.py::test[{}]")
    report = assemble(collect([tmp_path]))
    assert "speedups" not in {section.key for section in report.sections}
    assert texts(table(report, "Recovered trials")) == [["Top-K", "1/3"]]
    rows = texts(table(report, "Without cards"))
    assert [row[1:] for row in rows] == [
        ["generated-only", "7.305", "1.461", "5.00x"], ["labels-only", "FAIL", "1.461", "-"],
    ]  # fmt: skip
    titles = {one.title for section in report.sections for one in section.figures}
    assert "topk-64x4096x512-fp32, cpu (roundtrip_recovery: over the expert's kernel)" in titles


def test_one_judgement_in_a_trajectory_and_in_a_run_counts_once(tmp_path: Path) -> None:
    write_trajectory(tmp_path / "one.jsonl", "klineage", "topk", (0.5, 2.0))
    write_run(tmp_path / "run", [verdict_of("topk", speed, digest=f"klineage-topk-{step}", label="")
                                 for step, speed in enumerate((0.5, 2.0))])  # fmt: skip
    rows = texts(table(assemble(collect([tmp_path])), "Means"))
    assert [(row[1], row[-2]) for row in rows] == [("klineage", "1/1")]


def test_a_timing_against_a_kernel_is_no_reference_speedup(tmp_path: Path) -> None:
    beside = msgspec.structs.replace(verdict_of("gemm", 7.0), reference={"label": "base", "digest": "0" * 64})
    write_run(tmp_path, [verdict_of("gemm", 2.0), beside])
    assert [row[3] for row in texts(table(assemble(collect([tmp_path])), "Means"))] == ["2.00x"]


def test_mere_builds_are_no_attempts(tmp_path: Path) -> None:
    write_run(tmp_path, [verdict_of("gemm", None, code=Code.ACCEPTED_BUILT)])
    assert [section.key for section in assemble(collect([tmp_path])).sections] == ["verdicts"]


def test_how_a_lineage_or_a_card_came_about_is_no_optimization(everything: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(everything / "experts", tmp_path / "experts"))
    write_trajectory(next(copy.rglob("lineage.json")).parent / "trajectory.jsonl", "klineage", "topk", (0.5, 2.0))
    walk = write_trajectory(tmp_path / "walk.jsonl", "", "topk", (0.5, 2.0))
    assert [section.key for section in assemble(collect([copy, walk])).sections] == ["lineages", "setup"]


def test_kernels_are_named_by_their_tests(tmp_path: Path) -> None:
    named = [verdict_of("gemm", 2.0, label="wgmma, multicast"), verdict_of("topk", 3.0, label="one digit")]
    write_run(tmp_path / "a", named, nodeid="test_main_tier.py::test_main_tier[{}-expert]")
    write_run(tmp_path / "b", named, nodeid="test_mine.py::test_{}")
    rows = texts(table(assemble(collect([tmp_path])), "Means"))
    assert [row[0] for row in rows] == ["expert", "kernel"]
