"""Server-sent events out of bytes that arrive in any pieces. What the events say is the wires' part."""

from __future__ import annotations

import re
from collections.abc import Iterator

END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
END_OF_LINE = re.compile(rb"\r\n|\n|\r")
LARGEST_EVENT = 16 * 1024 * 1024


class EventTooLarge(ValueError):
    """An event without an end."""


class EventSplitter:
    """Cuts a stream into events; the bytes of all events together are the bytes of the stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every event that is complete now, with the blank line that ends it. Raises EventTooLarge."""
        self._rest += data
        start = 0
        for found in END_OF_EVENT.finditer(self._rest):
            yield self._rest[start : found.end()]
            start = found.end()
        self._rest = self._rest[start:]
        if len(self._rest) > LARGEST_EVENT:
            raise EventTooLarge(f"an event of a stream exceeds {LARGEST_EVENT} bytes")

    @property
    def rest(self) -> bytes:
        """What stands behind the last complete event."""
        return self._rest


def event_data(event: bytes) -> bytes:
    """What an event says: its data lines, joined; empty for comments and pings without data."""
    lines = (line for line in END_OF_LINE.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
