"""The reference of language models lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_klineage.lab.llm.anthropic import AnthropicBackend
from pytest_klineage.lab.llm.choose import BACKENDS
from pytest_klineage.lab.llm.faults import ADVICE, Failure, Malformation
from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    Failed,
    Judged,
    Noted,
    Opened,
    Stopped,
    StopReason,
    Usage,
)

PAGE = (Path(__file__).parents[4] / "docs/reference/llm-backends.md").read_text()


def row(first: str) -> str:
    """The row of a table whose first cell is this."""
    return next(line for line in PAGE.splitlines() if line.startswith(f"| `{first}`"))


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("event", [Begun, Opened, Asked, Answered, Failed, Judged, Noted, Stopped])
def test_events_have_all_their_fields(event: type[Begun]) -> None:
    assert names(row(event.__name__))[1:] == list(event.__struct_fields__)


def test_reasons_are_all_there() -> None:
    assert names(row("BackendFailed"))[1:] == [failure.value for failure in Failure]
    assert names(row("MalformedReply"))[1:] == [kind.value for kind in Malformation]
    assert set(ADVICE) == set(Failure)
    listed = re.search(r"`stop_reason` is ([^.]+)\.", PAGE)
    assert listed is not None
    assert names(listed.group(1)) == [reason.value for reason in StopReason]


def test_backends_and_usage_are_all_there() -> None:
    for kind, what in BACKENDS.items():
        assert row(f"{kind}:{what}")
    documented = {name for line in PAGE.splitlines() if line.startswith("| `") for name in names(line.split("|")[1])}
    assert set(Usage.__struct_fields__) - {"model"} <= documented
    options = AnthropicBackend.__init__.__kwdefaults__ or {}
    assert set(options) <= documented
