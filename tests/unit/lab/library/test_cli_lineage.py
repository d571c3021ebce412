"""`pytest-klineage lineage`: what it prints, how wide, and how it ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.lineage import add_lineage
from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.lineages import save_lineage
from pytest_klineage.records import KernelSource, Lineage
from pytest_klineage.report.text import WIDTH
from pytest_klineage.results.packed import append_line

MakeLineage = Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]
Run = Callable[..., tuple[int, str]]
FOLDER = Path("experts") / "gemm" / "cpu-cpp" / "lineage"


@pytest.fixture
def run(
    tmp_path: Path, make_lineage: MakeLineage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs one command in a folder with one lineage."""
    monkeypatch.chdir(tmp_path)
    save_lineage(FOLDER, *make_lineage())
    parser = argparse.ArgumentParser()
    add_lineage(parser.add_subparsers(required=True))

    def call(*arguments: str) -> tuple[int, str]:
        parsed = parser.parse_args(["lineage", *arguments])
        status = parsed.command(parsed)
        return status, capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", ["gemm/cpu-cpp", "experts/gemm/cpu-cpp", str(FOLDER)])
def test_a_lineage_is_shown_state_by_state(run: Run, name: str) -> None:
    status, output = run("show", name)
    lines = output.splitlines()
    assert status == 0
    assert lines[0] == "gemm/cpu-cpp: gemm-64x64x64-fp32, 3 states"
    assert lines[2].split() == ["adds", "lines", "ms", "speedup", "status", "step", "refused"]
    assert lines[4].split() == ["00", "naive", "-", "2", "0.5x", "slower", "-", "-"]
    assert lines[5].split() == ["01", "tile_stage", "+1", "-0", "2", "0.5x", "slower", "1.5x", "[1.4,", "1.6]", "1"]
    assert "ended: naive_reached: nothing is left" in lines
    assert max(map(len, lines)) <= WIDTH


def test_what_was_refused_is_shown_when_asked_for(run: Run) -> None:
    says = "at step 1: simplification refused, tile_stage in run: the result differs (wrong_value.mismatch)"
    assert says in run("show", "gemm/cpu-cpp", "--rejected")[1].splitlines()
    assert says not in run("show", "gemm/cpu-cpp")[1]


def test_long_ends_are_wrapped(run: Run, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    save_lineage(FOLDER, msgspec.structs.replace(lineage, termination_reason="word " * 60), sources)
    assert max(map(len, run("show", "gemm/cpu-cpp")[1].splitlines())) <= WIDTH


def test_a_whole_lineage_is_verified(run: Run) -> None:
    assert run("verify") == (0, f"{FOLDER}: holds together: 3 states\n")
    assert run("verify", "gemm/cpu-cpp")[0] == 0


def test_a_changed_file_is_named(run: Run) -> None:
    path = FOLDER / "00-naive.cpp"
    path.write_text(f"{path.read_text()}// more\n")
    status, output = run("verify")
    assert status == 1
    assert "problems" in output.splitlines()[0]
    assert "  01-tile-stage.cpp: its digest is" in output
    assert max(map(len, output.splitlines())) <= WIDTH


def test_missing_files_and_damaged_records_name_their_lineage(run: Run, make_lineage: MakeLineage) -> None:
    other = Path("experts") / "gemm" / "sm90-cuda" / "lineage"
    save_lineage(other, *make_lineage())
    (FOLDER / "00-naive.cpp").unlink()
    status, output = run("verify")
    assert status == 1
    assert "00-naive.cpp cannot be read" in " ".join(output.split())
    assert f"{other}: holds together" in output
    (other / "lineage.json").write_text("{}")
    assert "not a valid Lineage" in " ".join(run("verify")[1].split())


def test_a_lineage_that_is_not_there_names_those_that_are(run: Run) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'gemm/cpu-cpp'"):
        run("show", "gemm/cpu-cp")


def test_where_no_lineages_are_it_says_so(run: Run) -> None:
    with pytest.raises(UsageError, match="there is no lineage in nowhere; say where they are with --experts"):
        run("verify", "--experts", "nowhere")


def test_an_outline_is_written_shown_and_verified(run: Run, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    steps = tuple(msgspec.structs.replace(step, effect=None) for step in lineage.transitions)
    save_lineage(FOLDER, msgspec.structs.replace(lineage, transitions=steps), sources)
    for step in steps:
        assert step.forward_verdict is not None
        append_line(FOLDER / "verdicts.jsonl", step.forward_verdict)
    said = "outline: 2 steps, 2 brought back, no text of a kernel\n"
    assert run("outline", "gemm/cpu-cpp", "--output", "outline") == (0, said)
    assert run("verify", "outline") == (0, "outline: holds together: 3 states\n")
    assert run("show", "outline")[1].splitlines()[5].split()[:3] == ["01", "tile_stage", "-"]
    record = Path("outline") / "lineage.json"
    record.write_text(
        record.read_text().replace('"blocks":[]', '"blocks":[{"file":"a","search":"b","replace":"c"}]', 1)
    )
    status, output = run("verify", "outline")
    assert status == 1
    assert "it has more of the kernels than an outline has" in " ".join(output.split())


def test_the_lineage_that_shares_its_name_goes_by_its_folder(run: Run, make_lineage: MakeLineage) -> None:
    other = FOLDER.parent / "stages"
    save_lineage(other, *make_lineage())
    assert [line.split(": ")[0] for line in run("list")[1].splitlines()] == ["gemm/cpu-cpp", str(other)]
    assert f"pytest-klineage lineage show {other} 1" in run("walk", str(other))[1]
    assert "pytest-klineage lineage show gemm/cpu-cpp 1" in run("walk", "gemm/cpu-cpp")[1]
