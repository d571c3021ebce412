"""The reference of language models lists what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from pytest_klineage.lab.llm.anthropic import AnthropicBackend
from pytest_klineage.lab.llm.choose import BACKENDS
from pytest_klineage.lab.llm.faults import ADVICE, Failure, Malformation
from pytest_klineage.records import StopReason, TrajectoryLine, Usage

PAGE = (Path(__file__).parents[4] / "docs/reference/llm-backends.md").read_text()


def row(first: str) -> str:
    """The row of a table whose first cell is this."""
    return next(line for line in PAGE.splitlines() if line.startswith(f"| `{first}`"))


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("record", [*get_args(get_type_hints(TrajectoryLine)["event"]), StopReason, Usage])
def test_a_record_is_rendered(record: type) -> None:
    assert f"\n::: pytest_klineage.records.{record.__name__}\n" in PAGE


def test_reasons_are_all_there() -> None:
    assert names(row("BackendFailed"))[1:] == [failure.value for failure in Failure]
    assert names(row("MalformedReply"))[1:] == [kind.value for kind in Malformation]
    assert set(ADVICE) == set(Failure)


def test_backends_and_usage_are_all_there() -> None:
    for kind, what in BACKENDS.items():
        assert row(f"{kind}:{what}")
    assert "\n::: pytest_klineage.lab.llm.anthropic.AnthropicBackend\n" in PAGE
    arguments = (inspect.getdoc(AnthropicBackend) or "").partition("Args:\n")[2]
    assert re.findall(r"^    (\w+): ", arguments, re.M) == list(inspect.signature(AnthropicBackend).parameters)
