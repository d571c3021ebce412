"""OpenAI's chat completions as the proxy reads them: requests, replies, streams, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from pytest_klineage.lab.external.refusals import Refusal
from pytest_klineage.lab.external.rewrites import rewrite
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
from pytest_klineage.lab.llm.faults import Failure
from pytest_klineage.lab.llm.prices import CacheLife
from pytest_klineage.records import StopReason, Usage

BLOCKS = frozenset({"text", "refusal"})
UNBOUNDED = frozenset({"audio", "web_search_options", "service_tier", "speed", "inference_geo"})
STOP_REASONS = {
    "stop": StopReason.END,
    "length": StopReason.MAX_TOKENS,
    "content_filter": StopReason.REFUSAL,
}
DONE = b"[DONE]"
CODES = {Refusal.UNKNOWN_MODEL: "model_not_found", Refusal.BUDGET: "insufficient_quota"}
"""The protocol's own code for an error of ours; all others keep our word."""
SERVERS = frozenset({Failure.TIMEOUT, Failure.CONNECTION, Failure.BROKEN_STREAM, Failure.SERVER})


class OpenAIWire(Wire):
    """POST /v1/chat/completions."""

    name: ClassVar[str] = "openai"

    def client_key(self, headers: Mapping[str, str]) -> str:
        return headers.get("api-key", "") or headers.get("authorization", "").removeprefix("Bearer ").strip()

    def upstream(self, base_url: str, key: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        sent = {"authorization": f"Bearer {key}"} if key else {}
        return f"{base_url.rstrip('/')}/chat/completions", sent

    def read_request(self, body: dict[str, Any], settings: ProxySettings) -> Call:
        messages = messages_of(body)
        check_bounded(body, UNBOUNDED, frozenset({"function"}))
        parts = [(str(one.get("role")), "\n\n".join(texts_of(one.get("content"), BLOCKS))) for one in messages]
        changes = [named_model(body, settings), *rewrite(body, settings.rewrites)]
        limit = count_of(body, "max_completion_tokens") or count_of(body, "max_tokens")
        if limit is None:
            limit = body["max_completion_tokens"] = settings.default_output_tokens
            changes.append(f"max_completion_tokens = {limit} added")
        streams = body.get("stream") is True
        hides = streams and field_of(body, "stream_options", "include_usage") is not True
        if hides:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
            changes.append("stream_options.include_usage added")
        encoded = msgspec.json.encode(body)
        return Call(
            body=encoded, text=as_text(parts), input_tokens=input_bound(encoded, body),
            max_output_tokens=limit * (count_of(body, "n") or 1), streams=streams, life=CacheLife.NONE,
            hides_usage=hides, rewritten=tuple(change for change in changes if change),
        )  # fmt: skip

    def read_reply(self, body: bytes) -> ReceivedReply:
        reply = msgspec.json.decode(body, type=dict[str, Any])
        choices = _choices(reply)
        first = choices[0] if choices else {}
        reason = field_of(first, "finish_reason")
        return ReceivedReply(
            text=str(field_of(first, "message", "content") or ""),
            usage=_usage(reply),
            stop_reason=STOP_REASONS.get(str(reason), StopReason.OTHER),
            model=str(reply.get("model", "")),
            ids=ids_of(reply.get("id"), reason),
            complete=bool(choices),
        )

    def reader(self, call: Call) -> StreamReader:
        return OpenAIReader(call)

    def error(self, kind: str, status: int, message: str) -> dict[str, Any]:
        word = "server_error" if kind in set(map(str, SERVERS)) else "invalid_request_error"
        code = {str(name): value for name, value in CODES.items()}.get(kind, kind)
        return {"error": {"message": message, "type": word, "param": None, "code": code, "reason": kind}}


class OpenAIReader(StreamReader):
    """Chunks, then one with the usage and without choices, then [DONE]."""

    def read(self, data: bytes) -> bool:
        received = self.received
        if data.strip() == DONE:
            received.complete = received.stop_reason is not None
            return True
        chunk = msgspec.json.decode(data, type=dict[str, Any])
        if "error" in chunk:
            received.fault = Failure.SERVER, str(field_of(chunk, "error", "message") or "an error in the stream")
            return True
        received.model = str(chunk.get("model") or received.model)
        received.ids = {**received.ids, **ids_of(chunk.get("id"), None)}
        choices = _choices(chunk)
        for choice in choices:
            if choice.get("index", 0) == 0:
                received.text += str(field_of(choice, "delta", "content") or "")
                if (reason := choice.get("finish_reason")) is not None:
                    received.stop_reason = STOP_REASONS.get(str(reason), StopReason.OTHER)
                    received.ids["stop_reason"] = str(reason)
        usage = _usage(chunk)
        if usage is not None:
            received.usage = usage
        return not (self.call.hides_usage and usage is not None and not choices)


def _choices(reply: dict[str, Any]) -> list[dict[str, Any]]:
    found = reply.get("choices")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _usage(reply: dict[str, Any]) -> Usage | None:
    used = reply.get("usage")
    if not isinstance(used, dict) or "prompt_tokens" not in used:
        return None
    asked = tokens_of(used, "prompt_tokens")
    cached = min(asked, tokens_of(used, "prompt_tokens_details", "cached_tokens"))
    # Some providers leave thinking out of the one figure and have it in the sum.
    written = max(tokens_of(used, "completion_tokens"), tokens_of(used, "total_tokens") - asked)
    return Usage(
        model=str(reply.get("model", "")), input_tokens=asked - cached, cache_read_tokens=cached,
        output_tokens=written,
    )  # fmt: skip
