"""Speedup tables: width, contents, escaping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import Code, Floor, Interval, Reason, Status, Verdict
from pytest_klineage.report.advice import BY_STATUS, next_step
from pytest_klineage.report.aggregate import uncertain
from pytest_klineage.report.tables import (
    UNKNOWN,
    WIDTH,
    floor_text,
    floors_known,
    markdown_report,
    milliseconds,
    note_lines,
    ratio,
    summary_lines,
    table_lines,
    terminal_report,
)
from pytest_klineage.results.runs import Record, Run, RunInfo

MakeVerdict = Callable[..., Verdict]


def run_of(*verdicts: Verdict) -> Run:
    return Run(
        path=Path("results/runs/x"),
        info=RunInfo(started_at="2026-01-02T03:04:05Z", platform="cpu", name="trial"),
        records=tuple(Record(nodeid=f"test_{index}", verdict=verdict) for index, verdict in enumerate(verdicts)),
    )


def test_a_row_says_everything(make_verdict: MakeVerdict) -> None:
    lines = table_lines([make_verdict(speedup=3.42)])
    assert lines[0].split() == ["case", "kernel", "ref", "ref", "ms", "cand", "ms", "speedup", "status"]
    assert lines[2].split() == (
        ["gemm-64x64x64-fp32", "expert", "torch", "1.500", "0.4386", "3.42x", "[3.39,", "3.45]", "accepted"]
    )


@pytest.mark.parametrize(
    ("floor", "text"),
    [
        (Floor(ms=0.2193, limit="flops", product="NVIDIA H200"), "50%"),
        (Floor(ms=0.02193, limit="bytes", product="NVIDIA H200"), "5.0%"),
        (Floor(ms=0.2193, limit="bytes"), "≥50%"), (None, UNKNOWN),
    ],
)  # fmt: skip
def test_a_time_is_seen_beside_its_floor(floor: Floor | None, text: str, make_verdict: MakeVerdict) -> None:
    verdict = msgspec.structs.replace(make_verdict(speedup=3.42), floor=floor)
    other = msgspec.structs.replace(verdict, floor=Floor(ms=0.1, limit="bytes"))
    lines = table_lines([verdict, other])
    assert lines[0].split().index("floor") == 7
    assert lines[2].split()[5] == text
    assert f"| {text} |" in " ".join(markdown_report(run_of(verdict, other)).split())


def test_the_floor_gives_way_before_names_are_cut(make_verdict: MakeVerdict) -> None:
    shape = dict(zip("NCHWFRSP", (1, 64, 56, 56, 128, 3, 1, 1), strict=True))
    wide = make_verdict(operator="conv2d", shape=shape, speedup=12.34)
    lines = table_lines([msgspec.structs.replace(wide, floor=Floor(ms=0.1, limit="bytes"))])
    assert "floor" not in lines[0]
    assert "conv2d-1x64x56x56x128x3x1x1-fp32" in lines[2]


def test_what_failed_has_no_floor(make_verdict: MakeVerdict) -> None:
    failed = msgspec.structs.replace(make_verdict(Code.REPLAY, 900.0), floor=Floor(ms=0.1, limit="bytes"))
    assert floor_text(failed) == UNKNOWN
    assert not floors_known([failed])


def test_a_kernel_that_failed_has_no_speedup(make_verdict: MakeVerdict) -> None:
    lines = table_lines([make_verdict(Code.REPLAY, 900.0)])
    assert lines[2].split() == ["gemm-64x64x64-fp32", "expert", "torch", "-", "-", "-", "cheat"]


def test_the_widest_table_of_the_main_tier_fits_without_cuts(make_verdict: MakeVerdict) -> None:
    shape = dict(zip("NCHWFRSP", (1, 64, 56, 56, 128, 3, 1, 1), strict=True))
    lines = table_lines([make_verdict(operator="conv2d", shape=shape, speedup=12.34)])
    assert "conv2d-1x64x56x56x128x3x1x1-fp32" in lines[2]
    assert max(map(len, lines)) <= WIDTH


@given(st.text("abcdefgh-", min_size=1, max_size=90), st.text("xyz", max_size=90), st.floats(1e-6, 1e6))
def test_no_line_is_wider_than_the_table_may_be(name: str, label: str, speedup: float) -> None:
    from pytest_klineage.records import Interval, KernelCase, Reason, Timing

    interval = Interval(speedup, speedup / 2, speedup * 2)
    timing = Timing(
        policy="paired", reference_ms=1e3, candidate_ms=1e3 / speedup, speedup=interval,
        reference_samples_ms=(), candidate_samples_ms=(), warmup=0, flush_bytes=0, statistic="",
    )  # fmt: skip
    verdict = Verdict(
        case=KernelCase(operator=name, shape={"M": 1}, dtype="fp32", reference="flashinfer"),
        status=Status.INCONCLUSIVE,
        reasons=(Reason(code=Code.INCONCLUSIVE_INTERVAL, message="word " * 99),),
        label=label,
        timing=timing,
    )
    lines = [*table_lines([verdict]), *note_lines([verdict]), *summary_lines([verdict])]
    assert max(map(len, lines)) <= WIDTH


def test_an_empty_run_has_no_table(make_verdict: MakeVerdict) -> None:
    assert table_lines([]) == summary_lines([]) == note_lines([]) == []
    assert "0 verdicts" in terminal_report(run_of())
    assert "0 verdicts" in markdown_report(run_of())


def test_the_summary_gives_mean_and_coverage(make_verdict: MakeVerdict) -> None:
    verdicts = [make_verdict(speedup=2.0), make_verdict(speedup=4.5), make_verdict(Code.MISMATCH, None)]
    assert summary_lines(verdicts) == ["geomean 3.00x over 2 of 3 scored"]
    assert summary_lines(verdicts[2:]) == ["no geomean: 0 of 1 scored"]
    skipped = make_verdict(Code.SKIPPED_PLATFORM, None)
    assert summary_lines([*verdicts, skipped]) == ["geomean 3.00x over 2 of 3 scored, 1 skipped"]


def test_methods_have_a_mean_each(make_verdict: MakeVerdict) -> None:
    verdicts = [
        make_verdict(operator=name, label=label, speedup=speedup)
        for name in ("gemm", "topk")
        for label, speedup in (("naive", 0.5), ("expert", 2.0))
    ]
    assert summary_lines(verdicts) == [
        "geomean 0.50x over 2 of 2 scored (naive)",
        "geomean 2.00x over 2 of 2 scored (expert)",
    ]


def test_notes_give_code_and_next_step(make_verdict: MakeVerdict) -> None:
    text = "\n".join(note_lines([make_verdict(), make_verdict(Code.UNWRITTEN, None, message="3 elements")]))
    assert "gemm-64x64x64-fp32 expert: wrong_value.unwritten: 3 elements" in text
    assert "next: write every element" in text
    assert "accepted" not in text


def test_notes_say_what_repeats_once_and_how_much_is_left(make_verdict: MakeVerdict) -> None:
    def verdict(*messages: str) -> Verdict:
        reasons = tuple(Reason(code=Code.OUT_OF_BOUNDS, message=message) for message in messages)
        return msgspec.structs.replace(make_verdict(Code.OUT_OF_BOUNDS, None), reasons=reasons)

    def note(*messages: str) -> str:
        return " ".join(" ".join(note_lines([verdict(*messages)])).split()).partition(" next: ")[0]

    head = "gemm-64x64x64-fp32 expert: wrong_value.out_of_bounds: "
    assert note("beside c") == head + "beside c"
    assert note(*["beside c"] * 7) == head + "beside c; and 6 more"
    assert note("one", "two", "three", "four", "five") == head + "one; two; three; and 2 more"
    assert note("word " * 200, "two", "three", "four").endswith(" ...; and 1 more")


def test_a_speedup_that_says_little_is_marked_and_named(make_verdict: MakeVerdict) -> None:
    def wide(factor: float, **fields: object) -> Verdict:
        verdict = make_verdict(**fields)
        timing = msgspec.structs.replace(verdict.timing, speedup=Interval(2.0, 1.0, factor))
        return msgspec.structs.replace(verdict, timing=timing)

    busy = make_verdict(Code.INCONCLUSIVE_BUSY, 2.0, operator="topk")
    verdicts = [make_verdict(), wide(2.0), wide(2.1, operator="fmha"), busy, make_verdict(Code.REPLAY, 9.0)]
    assert [uncertain(verdict) for verdict in verdicts] == [False, False, True, True, False]
    assert [line.split()[5][0] for line in table_lines(verdicts)[2:]] == ["2", "2", "~", "~", "-"]
    mean, *rest = summary_lines(verdicts)
    assert mean == "geomean 2.00x over 4 of 5 scored"
    assert " ".join(" ".join(rest).split()) == (
        "~ 2 of 4 speedups uncertain (busy machine, unstable times, or high/low above 2): "
        "fmha-64x64x64-fp32 expert, topk-64x64x64-fp32 expert"
    )
    assert len([line for line in markdown_report(run_of(*verdicts)).splitlines() if line.startswith("**")]) == 2


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_a_next_step(status: Status) -> None:
    assert BY_STATUS[status]


@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("surface", ["cpp", "python"])
def test_every_code_has_a_next_step(code: Code, surface: str, make_verdict: MakeVerdict) -> None:
    assert next_step(make_verdict(code, None, surface=surface))


@pytest.mark.parametrize(
    ("surface", "said", "unsaid"), [("cpp", 'extern "C"', "top of"), ("python", "top of", "extern")]
)
def test_a_missing_entry_is_put_right_in_its_own_language(
    surface: str, said: str, unsaid: str, make_verdict: MakeVerdict
) -> None:
    step = next_step(make_verdict(Code.ENTRY_MISSING, None, surface=surface))
    assert said in step
    assert unsaid not in step


def test_a_missing_module_is_to_be_installed_or_given_as_a_file(make_verdict: MakeVerdict) -> None:
    verdict = make_verdict(Code.EXCEPTION, None, surface="python", message="ModuleNotFoundError: No module named 'x'")
    assert next_step(verdict).startswith("install it, or give the file")


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1.23456, "1.235"), (12.3456, "12.346"), (1234.56, "1234.6")]
)
def test_times_are_short(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1e-4, "1e-04"), (0.012, "0.012"), (0.5, "0.50"), (3.4219, "3.42"), (234.5, "234")]
)
def test_ratios_are_short(value: float, text: str) -> None:
    assert ratio(value) == text


def test_markdown_escapes_what_would_break_the_table(make_verdict: MakeVerdict) -> None:
    text = markdown_report(run_of(make_verdict(label="a|b"), make_verdict(Code.MISMATCH, None, message="x | y\nz")))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {row.replace("\\|", "").count("|") for row in rows} == {8}
    assert "x \\| y z" in text


def test_markdown_says_what_the_reference_was(make_verdict: MakeVerdict) -> None:
    text = markdown_report(run_of(make_verdict(reference={"label": "torch", "threads": "2"})))
    assert "- reference of gemm-64x64x64-fp32: label torch, threads 2" in text
    assert "- machine: Test CPU @ 3 GHz" in text
    assert "- timing policy: paired" in text


def test_a_reference_is_listed_once(make_verdict: MakeVerdict) -> None:
    facts = {"label": "cudnn", "variant": "nchw"}
    verdicts = [make_verdict(reference=facts | {"variant_ms.nchw": f"0.03{i}"}) for i in range(3)]
    text = markdown_report(run_of(*verdicts))
    assert text.count("- reference of") == 1
    assert "label cudnn, variant nchw\n" in text


def test_a_damaged_run_says_so(make_verdict: MakeVerdict) -> None:
    run = Run(path=Path("x"), info=None, records=run_of(make_verdict()).records, warnings=("the last line was cut",))
    assert "warning: the last line was cut" in terminal_report(run)
    assert "> the last line was cut" in markdown_report(run)


def test_a_version_that_was_not_checked_is_said_once(make_verdict: MakeVerdict) -> None:
    note = "fla 0.6.0 runs; 0.5.0 is the version that was checked, install it with: pip install fla==0.5.0"
    own, one_of_many = {"label": "fla", "version_note": note}, {"label": "vendor", "version_note.fla": note}
    verdicts = [make_verdict(reference=own), make_verdict(reference=one_of_many), make_verdict()]
    assert " ".join(" ".join(note_lines(verdicts)).split()) == f"note: {note}"
    assert note_lines([make_verdict(reference={"version": "1", "label": "torch"}, notes=("a hint",))]) == []


@pytest.mark.parametrize(
    "note",
    [
        "fla took no part in the reference, which may be faster with it: no nvcc",
        "the reference's search did not find its best plan again: 0.02 ms, 0.01 ms when it was compared; judge again",
    ],
)
def test_what_is_amiss_with_a_reference_is_said_once(note: str, make_verdict: MakeVerdict) -> None:
    verdicts = [make_verdict(notes=("a hint", note)), make_verdict(notes=(note,))]
    assert " ".join(" ".join(note_lines(verdicts)).split()) == f"note: {note}"


def test_a_refused_case_has_a_next_step_of_its_own(make_verdict: MakeVerdict) -> None:
    assert "references that the message names" in next_step(make_verdict(Code.SKIPPED_REFERENCE, None))


def test_a_sweep_has_a_line_of_its_own(make_verdict: MakeVerdict) -> None:
    shapes = [{"M": 8, "N": 8}, {"M": 64, "N": 9}]
    sweep = [make_verdict(operator="softmax", speedup=x, shape=y) for x, y in zip((8.0, 2.0), shapes, strict=True)]
    lines = summary_lines([*sweep, make_verdict()])
    assert lines[0] == "softmax fp32 expert: geomean 4.00x over 2 of 2 shapes, worst 2.00x at 64x9"
    assert lines[1].startswith("geomean 3.17x over 3 of 3")
    assert not any("shapes" in line for line in summary_lines([sweep[0], make_verdict()]))
    failed = [make_verdict(Code.MISMATCH, None, operator="softmax", shape=shape) for shape in shapes]
    assert summary_lines(failed)[0] == "softmax fp32 expert: none of 2 shapes scored"
