"""Anthropic's Messages API as the proxy reads it: requests, replies, streams, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.external.rewrites import OPENAI_ONLY, rewrite
from pytest_klineage.lab.external.wire import (
    Call,
    ProxySettings,
    ReceivedReply,
    StreamReader,
    Wire,
    as_text,
    check_bounded,
    count_of,
    field_of,
    ids_of,
    input_bound,
    messages_of,
    named_model,
    texts_of,
    tokens_of,
)
from pytest_klineage.lab.llm.anthropic import FAILURES_BY_TYPE, STOP_REASONS
from pytest_klineage.lab.llm.faults import Failure
from pytest_klineage.lab.llm.prices import CacheLife
from pytest_klineage.records import StopReason, Usage

VERSION = "2023-06-01"
BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
UNBOUNDED = frozenset({"mcp_servers", "container", "speed", "inference_geo", "service_tier"})
DEARER_BETAS = ("context-1m", "fast-mode")
"""Beta features that change the price of a token."""
TYPES = {
    Refusal.NO_KEY: "authentication_error",
    Refusal.WRONG_KEY: "authentication_error",
    Refusal.NO_UPSTREAM: "permission_error",
    Refusal.TOO_LARGE: "request_too_large",
    Refusal.UNKNOWN_MODEL: "not_found_error",
    Refusal.BUDGET: "billing_error",
    Refusal.NOT_FOUND: "not_found_error",
    Failure.TIMEOUT: "timeout_error",
    Failure.CONNECTION: "api_error",
}
"""The protocol's own word for an error of ours; all others are "invalid_request_error"."""


class AnthropicWire(Wire):
    """POST /v1/messages."""

    name: ClassVar[str] = "anthropic"

    def client_key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "") or headers.get("authorization", "").removeprefix("Bearer ").strip()

    def upstream(self, base_url: str, key: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        sent = {"anthropic-version": headers.get("anthropic-version", VERSION), **({"x-api-key": key} if key else {})}
        betas = [name.strip() for name in headers.get("anthropic-beta", "").split(",")]
        if kept := [name for name in betas if name and not name.startswith(DEARER_BETAS)]:
            sent["anthropic-beta"] = ",".join(kept)
        return f"{base_url.rstrip('/')}/v1/messages", sent

    def read_request(self, body: dict[str, Any], settings: ProxySettings) -> Call:
        messages = messages_of(body)
        check_bounded(body, UNBOUNDED, frozenset({None, "custom"}))
        parts = [("system", "\n\n".join(texts_of(body.get("system"), BLOCKS)))]
        parts += [(str(one.get("role")), "\n\n".join(texts_of(one.get("content"), BLOCKS))) for one in messages]
        limit = count_of(body, "max_tokens")
        if limit is None:
            raise Refused(Refusal.INVALID, "max_tokens: the Messages API requires it")
        changes = [named_model(body, settings), *rewrite(body, settings.rewrites - OPENAI_ONLY)]
        encoded = msgspec.json.encode(body)
        return Call(
            body=encoded, text=as_text(parts), input_tokens=input_bound(encoded, body), max_output_tokens=limit,
            streams=body.get("stream") is True, life=_life(encoded),
            rewritten=tuple(change for change in changes if change),
        )  # fmt: skip

    def read_reply(self, body: bytes) -> ReceivedReply:
        message = msgspec.json.decode(body, type=dict[str, Any])
        content = message.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        reason = message.get("stop_reason")
        return ReceivedReply(
            text="".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text"),
            usage=_usage(str(message.get("model", "")), message.get("usage")),
            stop_reason=STOP_REASONS.get(str(reason), StopReason.OTHER),
            model=str(message.get("model", "")),
            ids=ids_of(message.get("id"), reason),
            complete=reason is not None,
        )

    def reader(self, call: Call) -> StreamReader:
        return AnthropicReader(call)

    def error(self, kind: str, status: int, message: str) -> dict[str, Any]:
        word = {str(name): value for name, value in TYPES.items()}.get(kind, "invalid_request_error")
        return {"type": "error", "error": {"type": word, "message": message, "code": kind}}


class AnthropicReader(StreamReader):
    """message_start ... message_delta ... message_stop."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._used: dict[str, Any] = {}

    def read(self, data: bytes) -> bool:
        event = msgspec.json.decode(data, type=dict[str, Any])
        received, kind = self.received, event.get("type")
        if kind == "message_start":
            message = event.get("message")
            received.model = str(field_of(message, "model") or "")
            received.ids = ids_of(field_of(message, "id"), None)
            self._take_usage(field_of(message, "usage"))
        elif kind == "content_block_delta" and field_of(event, "delta", "type") == "text_delta":
            received.text += str(field_of(event, "delta", "text") or "")
        elif kind == "message_delta":
            reason = field_of(event, "delta", "stop_reason")
            if reason is not None:
                received.stop_reason = STOP_REASONS.get(str(reason), StopReason.OTHER)
                received.ids = {**received.ids, "stop_reason": str(reason)}
            self._take_usage(event.get("usage"))
        elif kind == "message_stop":
            received.complete = received.stop_reason is not None
        elif kind == "error":
            word = str(field_of(event, "error", "type"))
            said = str(field_of(event, "error", "message") or word)
            received.fault = FAILURES_BY_TYPE.get(word, Failure.SERVER), said
        return True

    def _take_usage(self, used: Any) -> None:
        """Figures of a later event replace those of an earlier one: they are sums since the beginning."""
        if isinstance(used, dict):
            self._used |= {name: value for name, value in used.items() if value is not None}
            self.received.usage = _usage(self.received.model, self._used)


def _usage(model: str, used: Any) -> Usage | None:
    if not isinstance(used, dict) or "output_tokens" not in used:
        return None
    hour = tokens_of(used, "cache_creation", "ephemeral_1h_input_tokens")
    return Usage(
        model=model,
        input_tokens=tokens_of(used, "input_tokens"),
        output_tokens=tokens_of(used, "output_tokens"),
        cache_read_tokens=tokens_of(used, "cache_read_input_tokens"),
        cache_write_tokens=max(0, tokens_of(used, "cache_creation_input_tokens") - hour),
        cache_write_1h_tokens=hour,
    )


def _life(body: bytes) -> CacheLife:
    """The longest life of a cache that a request asks for."""
    if b'"cache_control"' not in body:
        return CacheLife.NONE
    return CacheLife.ONE_HOUR if b'"1h"' in body else CacheLife.FIVE_MINUTES
