"""The run store: what is written is read back, whatever happens to the disk in between."""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.records import Check, Code, KernelCase, Reason, Status, Verdict
from pytest_klineage.results.packed import packed
from pytest_klineage.results.runs import Record, RunInfo, RunStore, list_runs, now, read_run

INFO = RunInfo(started_at="2026-01-02T03:04:05Z", platform="cpu", name="my run", settings={"mode": "gate"})


def record(nodeid: str = "test_a", message: str = "fine", error: float = 0.5) -> Record:
    verdict = Verdict(
        case=KernelCase(operator="gemm", shape={"M": 8, "N": 8, "K": 8}, dtype="fp32", reference="torch"),
        status=Status.ACCEPTED,
        reasons=(Reason(code=Code.ACCEPTED_FASTER, message=message),),
        checks=(Check(input_distribution="spikes", output="c", error=error, bound=8.0, passed=True),),
    )
    return Record(nodeid=nodeid, verdict=verdict, recorded_at=now())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 4 kB, so that a write stops in the middle as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [record("test_a"), record("test_b", "with\nnewline and \u00fc")]
    with closing(RunStore.create(tmp_path, INFO)) as store:
        for item in records:
            store.append(item)
    run = read_run(store.path)
    assert run.info == INFO
    assert list(run.records) == records
    assert run.warnings == ()
    assert read_run(store.path / "records.jsonl").records == run.records


def test_a_compressed_run_is_read_by_the_same_name(tmp_path: Path) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record("test_a"))
    lines = store.path / "records.jsonl"
    packed(lines).write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    assert read_run(store.path).records == (record("test_a"),)
    assert list_runs(tmp_path) == [store.path]


def test_a_run_is_named_after_time_platform_and_name(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with closing(RunStore.create(tmp_path, INFO)) as store:
            names.append(store.path.name)
    base = "20260102T030405Z-cpu-my-run"
    assert names == [base, f"{base}-2", f"{base}-3"]
    assert [path.name for path in list_runs(tmp_path)] == names


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    info = msgspec.structs.replace(INFO, name="../../etc/x")
    with closing(RunStore.create(tmp_path, info)) as store:
        assert store.path.parent == tmp_path / "runs"


def test_runs_are_not_for_version_control(tmp_path: Path) -> None:
    RunStore.create(tmp_path, INFO).close()
    assert (tmp_path / "runs" / ".gitignore").read_text().splitlines()[-1] == "*"


def test_a_folder_that_was_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    RunStore.create(tmp_path, INFO).close()
    assert not (tmp_path / "runs" / ".gitignore").exists()


def test_a_cut_last_line_is_reported_and_the_rest_is_kept(tmp_path: Path) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record("test_a"))
        store.append(record("test_b"))
    lines = store.path / "records.jsonl"
    lines.write_bytes(lines.read_bytes()[:-30])
    run = read_run(store.path)
    assert [item.nodeid for item in run.records] == ["test_a"]
    assert len(run.warnings) == 1
    assert "last line" in run.warnings[0]


def test_a_damaged_inner_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record())
    lines = store.path / "records.jsonl"
    lines.write_bytes(b'{"nodeid": 3}\n' + lines.read_bytes())
    with pytest.raises(BadRecord, match=r"records\.jsonl, line 1: not a valid Record"):
        read_run(store.path)


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record())
    lines = store.path / "records.jsonl"
    data = json.loads(lines.read_text())
    data["schema_version"] = 99
    lines.write_text(json.dumps(data) + "\n")
    with pytest.raises(BadRecord, match="schema version 99; this pytest-klineage reads 1"):
        read_run(store.path)


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_infinite_figures_become_the_largest_double(tmp_path: Path, value: float) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record(error=value))
    (read,) = read_run(store.path).records
    assert abs(read.verdict.checks[0].error) == sys.float_info.max


def test_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"run store .*file cannot be written: "):
        RunStore.create(tmp_path / "file", INFO)


def test_a_full_disk_costs_one_record(tmp_path: Path, small_files: None) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record("test_a"))
        with pytest.raises(StoreError, match="part of a record"):
            store.append(record("test_b", "x" * 5000))
        with pytest.raises(StoreError, match="cannot be written"):
            store.append(record("test_c"))
    run = read_run(store.path)
    assert [item.nodeid for item in run.records] == ["test_a"]
    assert len(run.warnings) == 1


def test_records_after_a_full_disk_are_readable(tmp_path: Path, small_files: None) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:
        store.append(record("test_a"))
        with pytest.raises(StoreError):
            store.append(record("test_b", "x" * 5000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        store.append(record("test_c"))
    run = read_run(store.path)
    assert [item.nodeid for item in run.records] == ["test_a", "test_c"]
    assert len(run.warnings) == 1


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    with closing(RunStore.create(tmp_path, INFO)) as store:

        def write(name: str) -> None:
            for index in range(20):
                store.append(record(f"{name}{index}", name * 2000))

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_run(store.path).records) == 80


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_not_a_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{name} is not a run"):
        read_run(tmp_path / name)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, INFO)
    store.close()
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(store._descriptor)
