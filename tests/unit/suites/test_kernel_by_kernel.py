"""The table of runs that wait for verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_by_kernel import cell, main, speedups_of

from pytest_klineage.lab.llm.trajectory import Trajectory
from pytest_klineage.records import Begun, Code, Judged


def write(path: Path, *speeds: float | None) -> None:
    """A root, and a kernel of each speed; None is a wrong one."""
    path.parent.mkdir(exist_ok=True)
    begun = Begun(name=path.stem, backend="exchange", model="a-model", budget_usd=1.0, settings={})
    with Trajectory.create(path, begun) as trajectory:
        for call, speed in enumerate((0.1, *speeds)):
            code = Code.MISMATCH if speed is None else Code.ACCEPTED_FASTER
            trajectory.append(Judged(source_digest=f"{call}", code=code, verdict="", call=call, speedup=speed))


def test_the_root_is_no_kernel_of_a_reply(tmp_path: Path) -> None:
    write(tmp_path / "gemm-1.jsonl", None, 0.5)
    assert speedups_of(tmp_path / "gemm-1.jsonl") == [None, 0.5]


@pytest.mark.parametrize(("speeds", "text"), [([], "waits"), ([None, 0.5], "wrong, 0.50")])
def test_a_run_in_a_cell(speeds: list[float | None], text: str) -> None:
    assert cell(speeds) == text


def test_the_table_has_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, speeds in {"gemm-1": (0.5, 1.0), "gemm-2": (None,), "topk-1": (4.0,)}.items():
        write(tmp_path / "klineage" / f"{name}.jsonl", *speeds)
    main(tmp_path)
    printed = capsys.readouterr().out
    assert "| gemm | 0.50, 1.00 | wrong |" in printed
    assert "2 of 3 reach 0.9; mean of the best 2.00" in printed
