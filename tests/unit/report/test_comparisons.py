"""Comparisons as text: everything fits, the same is said once, and no text of a kernel becomes markup or a command."""

from __future__ import annotations

import pytest

from pytest_klineage.records import Interval
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.report.comparisons import (
    ANNOTATIONS,
    Annotation,
    annotation_lines,
    annotations_of,
    comparison_lines,
    comparisons_markdown,
    counts,
)


def made(outcome: ComparisonOutcome = ComparisonOutcome.SLOWER, **fields: object) -> Comparison:
    given: dict[str, object] = {
        "nodeid": "test_a.py::test_a", "case": "gemm-64x64x64-fp32", "kernel": "mine", "against": "main",
        "message": "0.900x [0.880, 0.920] of the speed", "advice": "profile it", "margin": 0.03,
        "ratio": Interval(0.9, 0.88, 0.92), "old": Interval(1.1, 1.0, 1.2), "new": Interval(0.99, 0.9, 1.1),
    }  # fmt: skip
    return Comparison(outcome=outcome, **{**given, **fields})  # type: ignore[arg-type]


def test_a_table_with_its_counts_and_notes() -> None:
    lines = comparison_lines([made(), made(ComparisonOutcome.SAME, kernel="other", advice="")])
    assert lines[0].split() == ["case", "kernel", "then", "now", "now/then", "outcome"]
    assert lines[2].split() == [
        "gemm-64x64x64-fp32", "mine", "1.100x", "0.990x", "0.900x", "[0.880,", "0.920]", "slower",
    ]  # fmt: skip
    assert lines[5:] == [
        "1 slower, 1 same",
        "gemm-64x64x64-fp32 mine: slower: 0.900x [0.880, 0.920] of the speed",
        "    next: profile it",
    ]
    assert comparison_lines([]) == []


def test_no_line_is_wider_than_a_terminal() -> None:
    long = made(
        ComparisonOutcome.OTHER_REFERENCE, case="conv2d-" + "8x64x56x56x" * 9, kernel="kernel" * 9, message="word " * 90
    )
    assert max(map(len, comparison_lines([long, made()]))) <= 100


def test_the_same_is_said_once() -> None:
    several = [made(ComparisonOutcome.NO_BASELINE, kernel=name, message="none", advice="pin") for name in ("a", "b")]
    notes = comparison_lines(several)[-2:]
    assert notes == ["gemm-64x64x64-fp32 a, gemm-64x64x64-fp32 b: no_baseline: none", "    next: pin"]


def test_bad_outcomes_are_counted_first() -> None:
    outcomes = (
        ComparisonOutcome.SAME,
        ComparisonOutcome.NEW,
        ComparisonOutcome.OTHER_DEVICE,
        ComparisonOutcome.SAME,
        ComparisonOutcome.BROKEN,
    )
    assert counts(made(outcome) for outcome in outcomes) == "1 broken, 1 other device, 2 same, 1 new"


def test_markdown_for_a_pull_request() -> None:
    text = comparisons_markdown([made(), made(ComparisonOutcome.UNCHANGED, against="base")], failing=True)
    assert text.startswith("## Kernels compared with baseline main, the base\n\n**1 slower, 1 unchanged**. Margin 3 %.")
    assert "- gemm-64x64x64-fp32 mine: slower: 0.900x [0.880, 0.920] of the speed. Next: profile it." in text
    assert text.endswith("1 of 2 fail.\n")
    advisory = comparisons_markdown([made()], failing=False)
    assert "(advisory: nothing fails)" in advisory
    assert "1 of 1 fail" not in advisory
    assert comparisons_markdown([], failing=True) == ""


def test_text_of_kernels_stays_text() -> None:
    text = comparisons_markdown([made(kernel="a|b<img src=x>\n# c`d", message="</td>\n::error::x")], failing=False)
    assert "<img" not in text
    assert "</td>" not in text
    assert "a\\|b&lt;img src=x&gt; # c\\`d" in text
    assert not [line for line in text.splitlines() if line.startswith(("::", "# "))]


@pytest.mark.parametrize(
    ("outcome", "failing", "level"),
    [
        (ComparisonOutcome.SLOWER, True, "error"),
        (ComparisonOutcome.SLOWER, False, "warning"),
        (ComparisonOutcome.OTHER_DEVICE, True, "error"),
        (ComparisonOutcome.FASTER, True, "notice"),
        (ComparisonOutcome.BASE_FAILED, True, "warning"),
        (ComparisonOutcome.SAME, True, ""),
        (ComparisonOutcome.NEW, True, ""),
        (ComparisonOutcome.UNCLEAR, True, ""),
    ],
)
def test_what_is_annotated(outcome: ComparisonOutcome, failing: bool, level: str) -> None:
    assert [item.level for item in annotations_of([made(outcome)], failing=failing)] == ([level] if level else [])


def test_a_workflow_command_and_what_must_not_break_it() -> None:
    (line,) = annotation_lines(
        annotations_of([made(file="k/a,b.cpp", line=7, kernel="x:y", message="50%\nrest")], failing=True)
    )
    assert line == (
        "::error file=k/a%2Cb.cpp,line=7,title=slower%3A gemm-64x64x64-fp32 x%3Ay::50%25%0Arest; next: profile it"
    )
    assert annotation_lines([Annotation("notice", "t", "m")]) == ["::notice title=t::m"]


def test_annotations_are_few_and_the_worst_come_first() -> None:
    many = [Annotation(level, "t", "m") for level in ("notice", "error", "warning") for _ in range(30)]
    lines = annotation_lines(many)
    assert len(lines) == 3 * ANNOTATIONS
    assert [line.split()[0] for line in lines[::ANNOTATIONS]] == ["::error", "::warning", "::notice"]
