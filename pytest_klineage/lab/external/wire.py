"""What the proxy needs to know of any protocol, and events cut out of bytes. The protocols have a file each."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.llm.conversation import FRAME_TOKENS
from pytest_klineage.lab.llm.faults import Failure
from pytest_klineage.lab.llm.prices import CacheLife
from pytest_klineage.records import StopReason, Usage

TOOLS_TOKENS = 1024
"""What providers add to a prompt that offers tools, at most."""
DEFAULT_OUTPUT_TOKENS = 16384
"""For requests that bound their output nowhere, which no budget can hold."""
END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
END_OF_LINE = re.compile(rb"\r\n|\n|\r")
LARGEST_EVENT = 16 * 1024 * 1024


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are changed before they are sent on."""

    model: str
    """The one model of the run: the provider's name, and the price table's."""
    aliases: frozenset[str] = frozenset()
    """Other names that clients may call it by."""
    rewrites: frozenset[str] = frozenset()
    """Names of REWRITES."""
    default_output_tokens: int = DEFAULT_OUTPUT_TOKENS
    deadline_s: float = 1800.0
    """Longest time of one call."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it will be sent on."""

    body: bytes
    text: str
    """All that the model is shown, as a person reads it."""
    input_tokens: int
    """At most: one token per byte of the request, and frames."""
    max_output_tokens: int
    """Of all replies together."""
    streams: bool
    life: CacheLife
    hides_usage: bool = False
    """Whether the stream's last event, which has the usage, was not requested by the client."""
    rewritten: tuple[str, ...] = ()
    """What was changed, for the trajectory."""


class ReceivedReply(msgspec.Struct, kw_only=True):
    """A reply, as far as it has come."""

    text: str = ""
    usage: Usage | None = None
    """Without cost; None while the provider has not reported it."""
    stop_reason: StopReason | None = None
    """None while the reply has not ended."""
    model: str = ""
    ids: dict[str, str] = {}
    complete: bool = False
    """Whether the provider has said that this is the end."""
    fault: tuple[Failure, str] | None = None
    """An error in the middle of a stream."""


class StreamReader(ABC):
    """Reads one stream, event by event."""

    def __init__(self, call: Call) -> None:
        self.call, self.received = call, ReceivedReply()

    @abstractmethod
    def read(self, data: bytes) -> bool:
        """Take in what an event says. Returns whether the client gets the event. Raises msgspec.DecodeError."""


class Wire(ABC):
    """One provider's protocol."""

    name: ClassVar[str]

    @abstractmethod
    def client_key(self, headers: Mapping[str, str]) -> str:
        """The key that a client has sent; empty for none."""

    @abstractmethod
    def upstream(self, base_url: str, key: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Address and headers with which a request is sent on."""

    @abstractmethod
    def read_request(self, body: dict[str, Any], settings: ProxySettings) -> Call:
        """The request to send on. Raises Refused."""

    @abstractmethod
    def read_reply(self, body: bytes) -> ReceivedReply:
        """A reply that came whole. Raises msgspec.DecodeError."""

    @abstractmethod
    def reader(self, call: Call) -> StreamReader:
        """A reader for a stream."""

    @abstractmethod
    def error(self, kind: str, status: int, message: str) -> dict[str, Any]:
        """The body of an error as this protocol has it; `kind` is a word of Refusal or Failure."""


def input_bound(body: bytes, body_fields: Mapping[str, Any]) -> int:
    """Input tokens that a request cannot exceed."""
    messages = body_fields.get("messages")
    frames = (len(messages) if isinstance(messages, list) else 0) + 4
    return len(body) + FRAME_TOKENS * frames + (TOOLS_TOKENS if body_fields.get("tools") else 0)


def named_model(body: dict[str, Any], settings: ProxySettings) -> str | None:
    """Set the run's model; what was changed, or None. Raises Refused for a name that is not the run's."""
    asked = body.get("model")
    if asked == settings.model:
        return None
    if not isinstance(asked, str) or asked not in settings.aliases:
        known = ", ".join([settings.model, *sorted(settings.aliases)])
        raise Refused(
            Refusal.UNKNOWN_MODEL,
            f"this run has one model: {known}. {str(asked)!r:.80} is another; name it in the optimizer's settings, or "
            "begin the run with --alias for a name that means the same",
        )
    body["model"] = settings.model
    return f"model {asked} -> {settings.model}"


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request. Raises Refused when they are not there."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise Refused(Refusal.INVALID, "messages must be a list of objects, one at least")
    return messages


def count_of(body: dict[str, Any], name: str) -> int | None:
    """A positive integer of a request; None where it is absent. Raises Refused for anything else."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise Refused(Refusal.INVALID, f"{name} must be a positive integer, got {value!r:.40}")
    return value


def check_bounded(body: dict[str, Any], keys: frozenset[str], tool_types: frozenset[str | None]) -> None:
    """Raise Refused for fields and tools whose price is not in the table."""
    for key in sorted(keys & body.keys()):
        if body[key] not in (None, [], {}, "standard", "default", "auto", "standard_only"):
            raise Refused(
                Refusal.UNBOUNDED, f"{key} changes what a call can cost, and no budget can hold it: leave it out"
            )
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else "?"
        if kind not in tool_types:
            raise Refused(
                Refusal.UNBOUNDED, f"the tool type {kind!r:.40} is run and billed by the provider: leave it out"
            )


def texts_of(content: Any, kinds: frozenset[str]) -> Iterator[str]:
    """The texts of a message's content. Raises Refused for images and whatever else is not in `kinds`."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refused(Refusal.INVALID, "content must be a text or a list of blocks")
    for block in content:
        kind = block.get("type")
        if kind not in kinds:
            raise Refused(Refusal.UNBOUNDED, f"content of the type {kind!r:.40} has no bound in tokens here: send text")
        if kind == "tool_result":
            yield from texts_of(block.get("content"), kinds)
        elif kind in ("text", "refusal", "thinking"):
            yield str(block.get(kind, ""))
        else:
            yield msgspec.json.encode(block).decode()


def as_text(parts: list[tuple[str, str]]) -> str:
    """A request as one text: the prompt itself where there is nothing else, else every part under its role."""
    said = [(role, text) for role, text in parts if text.strip()]
    if len(said) == 1 and said[0][0] == "user":
        return said[0][1]
    return "\n\n".join(f"# {role}\n\n{text}" for role, text in said) or "(an empty request)"


def field_of(value: Any, *path: str) -> Any:
    """A nested field; None where any part of the way is missing."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def ids_of(message: Any, reason: Any) -> dict[str, str]:
    """The provider's name of a reply, and its word for why it stopped, as far as they are there."""
    found = {"message": message, "stop_reason": reason}
    return {name: str(value) for name, value in found.items() if value}


def tokens_of(value: Any, *path: str) -> int:
    """A nested count of tokens; 0 where it is missing or not a count."""
    found = field_of(value, *path)
    return found if type(found) is int and found > 0 else 0


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
        """What stands after the last complete event."""
        return self._rest


def event_data(event: bytes) -> bytes:
    """What an event says: its data lines, joined; empty for comments and pings without data."""
    lines = (line for line in END_OF_LINE.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def package(name: str) -> Any:
    """A module of Starlette, uvicorn or httpx, such as "starlette.routing". Raises MissingDependency."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"the package {name.partition('.')[0]}"
        raise MissingDependency(what, "pip install 'pytest-klineage[external]'") from error
