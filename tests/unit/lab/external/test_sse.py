"""Events come out whole however the bytes arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.lab.external import wire
from pytest_klineage.lab.external.wire import EventSplitter, EventTooLarge, event_data

EVENTS = [b"event: a\ndata: {}\n\n", b": comment\r\n\r\n", b"data: one\ndata: two\n\n", b"data: [DONE]\n\n"]


@given(cuts=st.lists(st.integers(0, sum(map(len, EVENTS))), max_size=10))
def test_any_pieces_give_the_same_events(cuts: list[int]) -> None:
    stream = b"".join(EVENTS)
    positions = [0, *sorted(cuts), len(stream)]
    splitter = EventSplitter()
    found = [e for start, end in pairwise(positions) for e in splitter.feed(stream[start:end])]
    assert b"".join(found) == stream
    assert [event_data(event) for event in found if event_data(event)] == [b"{}", b"one\ntwo", b"[DONE]"]
    assert splitter.rest == b""


def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGEST_EVENT", 10)
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: abc")) == []
    assert splitter.rest == b"data: abc"
    with pytest.raises(EventTooLarge):
        list(splitter.feed(b"defg"))
