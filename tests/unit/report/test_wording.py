"""A finding in words: what an exception says comes first, our own frames never, and nothing twice."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import Code, Reason
from pytest_klineage.report.wording import distinct, format_message, in_one_line

TRACEBACK = """\
Traceback (most recent call last):
  File "/somewhere/pytest_klineage/worker/calls.py", line 71, in run
    result = invoke()
             ^^^^^^^^
  File "/somewhere/pytest_klineage/surfaces/python.py", line 91, in call
    return function(*inputs, **named)
  File "/cache/pytest-klineage/python/abc/kernel.py", line 2, in run
    return halve(a)
  File "/cache/pytest-klineage/python/abc/kernel.py", line 6, in halve
    raise ValueError("not today")
ValueError: not today
"""


def test_a_traceback_begins_with_its_last_line() -> None:
    say = format_message(TRACEBACK)
    assert say.line == "ValueError: not today"
    assert say.details == (
        "at kernel.py, line 2, in run: return halve(a)",
        'at kernel.py, line 6, in halve: raise ValueError("not today")',
    )
    assert say.where == "kernel.py, line 6, in halve"


def test_further_lines_of_an_exception_follow_the_frames() -> None:
    say = format_message(TRACEBACK.rstrip() + "\nbut tomorrow")
    assert (say.line, say.details[-1]) == ("ValueError: not today", "but tomorrow")


def test_a_traceback_of_ours_alone_has_no_frames() -> None:
    say = format_message(
        TRACEBACK.partition('  File "/cache')[0] + "TypeError: run() takes 1 positional argument but 2 were given"
    )
    assert say == ("TypeError: run() takes 1 positional argument but 2 were given", (), "")


def test_real_tracebacks_are_understood() -> None:
    def deep(number: int) -> int:
        return deep(number + 1)

    for error, line in ((RecursionError, "RecursionError: "), (SyntaxError, "SyntaxError: ")):
        with pytest.raises(error) as caught:
            deep(0) if error is RecursionError else compile("x = = 2", "kernel.py", "exec")
        text = "".join(traceback.format_exception(caught.value))
        assert format_message(text).line.startswith(line)
        assert format_message(text).where


@pytest.mark.parametrize("text", ["", "fp32 only", "two\nlines", "Traceback (most recent call last):"])
def test_a_message_that_is_no_traceback_stays(text: str) -> None:
    say = format_message(text)
    assert "\n".join([say.line, *say.details]) == text
    assert not say.where


@given(st.text(), st.lists(st.text(max_size=5)))
def test_any_text_can_be_formatted(message: str, others: list[str]) -> None:
    assert "\n" not in format_message(message).line
    reasons = [Reason(code=Code.MISMATCH, message=text) for text in (message, *others)]
    chosen, left = distinct(reasons)
    assert 1 <= len(chosen) <= 3
    assert len(chosen) + left == len(reasons)
    assert len({reason.message for reason in chosen}) == len(chosen)


def test_codes_are_said_where_they_change() -> None:
    reasons = [
        Reason(code=Code.OUT_OF_BOUNDS, message="beside c"),
        Reason(code=Code.MISMATCH, message="off (ties)"),
        Reason(code=Code.MISMATCH, message="off (spikes)"),
        Reason(code=Code.OUT_OF_BOUNDS, message="beside c"),
    ]
    assert in_one_line(reasons) == (
        "wrong_value.out_of_bounds: beside c; wrong_value.mismatch: off (ties); off (spikes); and 1 more"
    )
