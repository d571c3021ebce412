"""`pytest-klineage lineage list` and `walk`: a newcomer's way through a lineage."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.lineage import add_lineage
from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.lineages import save_lineage
from pytest_klineage.records import KernelSource, Lineage, Termination
from pytest_klineage.report.text import WIDTH

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


def test_the_list_says_how_each_ended(run: Run) -> None:
    assert run("list") == (0, "gemm/cpu-cpp: gemm-64x64x64-fp32, 2 steps, naive_reached\n")
    with pytest.raises(UsageError, match="there is no lineage in nowhere"):
        run("list", "--experts", "nowhere")


def test_a_walk_goes_from_naive_to_expert(run: Run) -> None:
    status, output = run("walk", "gemm/cpu-cpp")
    lines = [line for line in output.splitlines() if line]
    assert status == 0
    assert lines[0] == "gemm/cpu-cpp: gemm-64x64x64-fp32, 2 steps from naive to the expert"
    assert lines[1] == "00 naive, 2 ms: pytest-klineage lineage show gemm/cpu-cpp 0"
    assert lines[2] == "step 1 of 2 adds tile_stage: 1.5x [1.4, 1.6], 1 refused"
    assert lines[3:5] == ["  where: run", "  what: adds tile_stage"]
    assert lines[5] == "01 tile stage, 2 ms: pytest-klineage lineage show gemm/cpu-cpp 1"
    assert "ended: naive_reached: nothing is left" in lines
    assert lines[-1].startswith("next: pytest-klineage lineage walk gemm/cpu-cpp 1")
    assert max(map(len, lines)) <= WIDTH


def test_the_files_of_a_state_are_printed_or_written(run: Run, make_lineage: MakeLineage, tmp_path: Path) -> None:
    _, sources = make_lineage()
    (file,) = sources[1].files
    assert run("show", "gemm/cpu-cpp", "1") == (0, file.text)
    assert run("show", "gemm/cpu-cpp", "1", "--output", "made") == (0, f"made/{file.name}\n")
    assert (tmp_path / "made" / file.name).read_text() == file.text
    with pytest.raises(UsageError, match="has the states 0 to 2, not 3"):
        run("show", "gemm/cpu-cpp", "3")
    with pytest.raises(UsageError, match="name the state as well"):
        run("show", "gemm/cpu-cpp", "--output", "made")


def test_a_hand_made_lineage_says_what_was_not_judged(run: Run, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    states = tuple(msgspec.structs.replace(state, verdict=None) for state in lineage.states)
    steps = tuple(
        msgspec.structs.replace(step, backward=None, forward_verdict=None, rederived=None, effect=None)
        for step in lineage.transitions
    )
    made = msgspec.structs.replace(
        lineage, states=states, transitions=steps, termination=Termination.HAND_MADE, termination_reason="by hand"
    )
    folder = FOLDER.with_name("stages")
    save_lineage(folder, made, sources)
    assert f"{folder}: gemm-64x64x64-fp32, 2 steps, hand_made" in run("list")[1].splitlines()
    assert run("verify", str(folder))[0] == 0
    assert "not judged" in run("show", str(folder))[1]
    with pytest.raises(UsageError, match="hand-made and has no simplifications"):
        run("walk", str(folder), "1", "--backward")


def test_one_step_is_shown_with_its_edit_and_what_was_refused(run: Run) -> None:
    _, output = run("walk", "gemm/cpu-cpp", "1")
    assert "+    int tile[4];" in output.splitlines()
    assert "  simplification refused, tile_stage in run: the result differs (wrong_value.mismatch)" in output
    assert "-    int tile[4];" in run("walk", "gemm/cpu-cpp", "1", "--backward")[1].splitlines()
    # Nothing else was re-derived: the stored forward edit is the re-derived one.
    assert run("walk", "gemm/cpu-cpp", "1", "--rederived")[1] == output


def test_steps_that_are_not_there_are_named(run: Run) -> None:
    with pytest.raises(UsageError, match="has the steps 1 to 2, not 3"):
        run("walk", "gemm/cpu-cpp", "3")
    with pytest.raises(UsageError, match="name the step as well"):
        run("walk", "gemm/cpu-cpp", "--backward")


def test_a_speedup_over_a_state_is_labelled_as_such(run: Run, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    verdict = msgspec.structs.replace(lineage.states[0].verdict, reference={"label": "x", "digest": "y"})
    states = (msgspec.structs.replace(lineage.states[0], verdict=verdict), *lineage.states[1:])
    save_lineage(FOLDER, msgspec.structs.replace(lineage, states=states), sources)
    rows = [line.split() for line in run("show", "gemm/cpu-cpp")[1].splitlines()]
    assert rows[4][:5] == ["00", "naive", "-", "2", "-"]
    assert rows[5][:5] == ["01", "tile_stage", "+1", "-0", "2"]
    assert rows[5][5] == "0.5x"
