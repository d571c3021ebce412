"""The table of the compile stage: registers, spills and instructions where others have times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import INSTRUCTIONS, Build, Code, KernelResources, Verdict
from pytest_klineage.report.tables import (
    BUILDS,
    WIDTH,
    markdown_report,
    only_built,
    summary_lines,
    table_lines,
    terminal_report,
)
from pytest_klineage.results.runs import Run, RunInfo

MakeVerdict = Callable[..., Verdict]
KERNELS = (
    KernelResources(name="gemm", registers=168, instructions=("tma_load", "wgmma")),
    KernelResources(name="epilogue", registers=40, spill_store_bytes=8, instructions=("stmatrix",)),
)
BUILD = Build(digest="d", platform="sm90", kernels=KERNELS)


def built(make_verdict: MakeVerdict, code: Code = Code.ACCEPTED_BUILT, build: Build | None = BUILD) -> Verdict:
    return make_verdict(code, None, build=build)


def test_a_row_has_resources_instead_of_times(make_verdict: MakeVerdict) -> None:
    lines = table_lines([built(make_verdict)])
    assert [word for column in BUILDS for word in column.header.split()] == lines[0].split()
    assert lines[2].split() == [
        "gemm-64x64x64-fp32", "expert", "2", "168", "8", "stmatrix", "tma_load", "wgmma", "accepted",
    ]  # fmt: skip


def test_what_is_not_known_is_not_shown_as_nothing(make_verdict: MakeVerdict) -> None:
    unknown = msgspec.structs.replace(
        BUILD, kernels=tuple(msgspec.structs.replace(kernel, instructions=None) for kernel in KERNELS)
    )
    none = msgspec.structs.replace(BUILD, kernels=())
    rows = table_lines([built(make_verdict, build=unknown), built(make_verdict, build=none)])[2:]
    assert "not looked for" in rows[0]
    assert rows[1].split()[2:] == ["-", "-", "-", "-", "accepted"]


def test_the_summary_counts_what_was_built(make_verdict: MakeVerdict) -> None:
    verdicts = [built(make_verdict), built(make_verdict, Code.SPILLS), make_verdict(Code.COMPILE, None)]
    assert summary_lines(verdicts) == ["built 1 of 3"]
    assert summary_lines([*verdicts, make_verdict(Code.SKIPPED_PLATFORM, None)]) == ["built 1 of 3, 1 skipped"]


def test_a_run_with_times_keeps_its_table(make_verdict: MakeVerdict) -> None:
    assert not only_built([built(make_verdict, Code.SPILLS), make_verdict()])
    assert not only_built([make_verdict(Code.COMPILE, None)])
    assert "ref ms" in table_lines([built(make_verdict, Code.SPILLS), make_verdict()])[0]


@given(st.lists(st.sampled_from(INSTRUCTIONS), unique=True), st.text("abc-", min_size=1, max_size=99))
def test_no_line_is_wider_than_the_table_may_be(words: list[str], label: str) -> None:
    from pytest_klineage.records import KernelCase, Reason

    kernels = (KernelResources(name="k", registers=255, spill_store_bytes=4096, instructions=tuple(words)),)
    verdict = Verdict(
        case=KernelCase(operator="conv2d" * 9, shape={"N": 1}, dtype="fp16", reference="cudnn"), label=label,
        status=Code.MISSING_INSTRUCTION.status, build=Build(digest="d", platform="sm120", kernels=kernels),
        reasons=(Reason(code=Code.MISSING_INSTRUCTION, message="no"),),
    )  # fmt: skip
    assert max(map(len, table_lines([verdict]))) <= WIDTH


@pytest.mark.parametrize("render", [terminal_report, markdown_report])
def test_a_report_has_the_same_table(render: Callable[[Run], str], make_verdict: MakeVerdict) -> None:
    from pytest_klineage.results.runs import Record

    info = RunInfo(started_at="2026-01-02T03:04:05Z", platform="sm90", name="")
    run = Run(path=Path("x"), info=info, records=(Record(nodeid="t", verdict=built(make_verdict)),))
    assert "spill B" in render(run)
    assert "built 1 of 1" in render(run)
