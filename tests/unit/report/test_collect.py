"""What a report reads: every kind of record, and a named outcome for what cannot be read, beside all the rest."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from report_sample import verdict_of, write_card, write_lines, write_run, write_trajectory

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.report.assemble import assemble
from pytest_klineage.report.collect import CUT_SHORT, collect
from pytest_klineage.results.packed import packed


def test_every_kind_is_found_below_a_folder(everything: Path) -> None:
    found = collect([everything])
    assert [len(part) for part in (found.runs, found.trajectories, found.lineages, found.cards)] == [3, 8, 1, 1]
    assert found.problems == []
    assert sorted(len(run.records) for run in found.runs) == [3, 4, 6]
    assert all(run.info is not None for run in found.runs)


def test_files_can_be_named_alone(everything: Path, tmp_path: Path) -> None:
    lines = next((everything / "head_to_head").iterdir())
    assert len(collect([lines]).trajectories) == 1
    assert len(collect([everything / "skills" / "cpp-pack-b" / "card.json"]).cards) == 1
    bare = write_lines(tmp_path / "verdicts.jsonl", [verdict_of("gemm", 2.0)])
    assert [record.nodeid for record in collect([bare]).runs[0].records] == ["verdicts:1"]


def test_a_compressed_run_is_read_by_either_name(everything: Path) -> None:
    lines = next(everything.rglob("records.jsonl"))
    count = len(collect([lines]).runs)
    packed(lines).write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    assert len(collect([lines]).runs) == len(collect([packed(lines)]).runs) == count == 1


def test_local_runs_are_read_only_when_named(tmp_path: Path) -> None:
    write_run(tmp_path / "published", [verdict_of("gemm", 2.0)])
    write_run(tmp_path / "runs" / "one", [verdict_of("gemm", 3.0)])
    assert len(collect([tmp_path]).runs) == 1
    assert len(collect([tmp_path / "runs" / "one"]).runs) == 1


def test_a_half_written_record_costs_its_own_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [verdict_of("gemm", 2.0), verdict_of("topk", 3.0)])
    with (folder / "records.jsonl").open("ab") as file:
        file.write(b'{"nodeid":"test_9","verd')
    found = collect([folder])
    assert len(found.runs[0].records) == 2
    assert [problem.what for problem in found.problems] == [CUT_SHORT]
    assert found.problems[0].next_step


def test_other_schemas_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [verdict_of("gemm", 2.0)])
    lines = (folder / "records.jsonl").read_text().splitlines()
    other = lines[0].replace('"schema_version":1', '"schema_version":2')
    (folder / "records.jsonl").write_text("\n".join([other, lines[0], other, "{}"]) + "\n")
    found = collect([folder])
    assert len(found.runs[0].records) == 1
    versions, rubbish = found.problems
    assert versions.where.endswith("records.jsonl, lines 1, 3")
    assert "schema version 2; this pytest-klineage reads 1" in versions.what
    assert rubbish.where.endswith("line 4")


@pytest.mark.parametrize("name", ["lineage.json", "card.json", "run.json"])
def test_a_damaged_file_is_named_and_the_rest_is_read(everything: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(everything, tmp_path / "copy"))
    broken = next(copy.rglob(name))
    broken.write_text(broken.read_text()[:-20])
    found = collect([copy])
    assert [problem.where for problem in found.problems] == [str(broken)]
    assert not found.empty
    assert assemble(found).sections


def test_a_trajectory_with_a_damaged_line_keeps_its_others(tmp_path: Path) -> None:
    path = write_trajectory(tmp_path / "one.jsonl", "klineage", "topk", (0.5, 2.0))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"event":{"type":"Later"},"at":""}\n', *lines[1:], lines[-1][:9]]))
    found = collect([path])
    assert len(found.trajectories[0].events) == len(lines)
    assert [problem.where for problem in found.problems] == [f"{path}, line 2", str(path)]


def test_foreign_lines_are_skipped_or_named_on_request(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [verdict_of("gemm", 2.0)])
    other = tmp_path / "other.jsonl"
    other.write_text('{"claim": 1}\n')
    assert collect([tmp_path]).problems == []
    assert collect([tmp_path, other]).problems[0].where == str(other)


def test_nothing_to_read_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there; give a run's directory"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match=r"no records.jsonl, trajectory, lineage.json or card.json is there"):
        collect([tmp_path])
    (tmp_path / "records.jsonl").write_text('{"schema_version": 7}\n')
    with pytest.raises(BadRecord, match="schema version 7; this pytest-klineage reads 1"):
        collect([tmp_path])


def test_a_lineage_that_a_card_rests_on_is_missed_by_name(tmp_path: Path) -> None:
    write_card(tmp_path / "a", "card-a", "topk/cpu-cpp")
    write_card(tmp_path / "b", "card-b", "topk/cpu-cpp")
    (problem,) = assemble(collect([tmp_path])).problems
    assert problem.where == "lineage topk/cpu-cpp"
    assert "2 cards rest (card-a, card-b) on it" in problem.what
    assert "experts/topk/cpu-cpp/lineage" in problem.next_step


def test_a_missing_lineage_kernel_is_reported_in_place(everything: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(everything / "experts", tmp_path / "experts"))
    next(copy.rglob("naive.cpp")).unlink()
    details = {detail.title: detail for detail in assemble(collect([copy])).details}
    texts = [block.text for block in details["gemm/cpu-cpp: naive"].blocks]
    assert any("naive.cpp cannot be read" in text for text in texts)
