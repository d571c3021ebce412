"""The provider's own SDK against a server on this machine: what is sent, what is made of answers and of failures."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.llm.anthropic import AnthropicBackend
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn
from pytest_klineage.lab.llm.faults import BackendFailed, Failure, NoKey, NoPrice
from pytest_klineage.lab.llm.prices import CacheLife, Prices
from pytest_klineage.records import StopReason

pytest.importorskip("anthropic", reason="needs the extra llm")

QUESTION = Conversation(prefix=Prefix(), turns=(Turn(Role.USER, "why?"),))
LONG = Conversation(
    prefix=Prefix(system="be brief", context=("the ABI", "the cards")),
    turns=(Turn(Role.USER, "first"), Turn(Role.ASSISTANT, "reply"), Turn(Role.USER, "second")),
)
HALF = [
    {"type": "message_start", "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "toy",
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}},
]  # fmt: skip
"""Events of a stream that has only begun."""
MAKE = Callable[..., AnthropicBackend]


@pytest.fixture
def make(server: Any, prices: Prices) -> MAKE:
    """Makes a backend that talks to the server."""

    def make_backend(**options: Any) -> AnthropicBackend:
        given = {"api_key": "test", "base_url": server.url, "max_retries": 0, **options}
        return AnthropicBackend("toy", prices, **given)

    return make_backend


def failure(backend: AnthropicBackend) -> BackendFailed:
    with pytest.raises(BackendFailed) as caught:
        backend.reply(QUESTION, max_output_tokens=100, call=1)
    return caught.value


def marks(request: dict[str, Any]) -> list[str]:
    """Texts that are marked for the cache."""
    blocks = [*request.get("system", []), *(block for turn in request["messages"] for block in turn["content"])]
    return [block["text"] for block in blocks if "cache_control" in block]


class TestWhatIsSent:
    def test_a_request_streams_the_conversation(self, server: Any, make: MAKE) -> None:
        server.stream()
        make(parameters={"temperature": 0.5, "thinking": {"type": "adaptive"}}).reply(LONG, max_output_tokens=9, call=1)
        (sent,) = server.requests
        assert server.paths == ["/v1/messages"]
        assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("toy", 9, True)
        assert [block["text"] for block in sent["system"]] == ["be brief", "the ABI", "the cards"]
        assert [(turn["role"], turn["content"][0]["text"]) for turn in sent["messages"]] == [
            ("user", "first"), ("assistant", "reply"), ("user", "second"),
        ]  # fmt: skip
        assert (sent["temperature"], sent["thinking"]) == (0.5, {"type": "adaptive"})

    def test_the_prefix_and_the_newest_turn_are_marked_for_the_cache(self, server: Any, make: MAKE) -> None:
        server.stream()
        make().reply(LONG, max_output_tokens=9, call=1)
        assert marks(server.requests[0]) == ["be brief", "the cards", "second"]
        assert server.requests[0]["system"][2]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}

    def test_what_is_cached_and_for_how_long_can_be_chosen(self, server: Any, make: MAKE) -> None:
        server.stream()
        make(cache_turns=False, cache_life=CacheLife.ONE_HOUR).reply(LONG, max_output_tokens=9, call=1)
        make(cache_life=CacheLife.NONE).reply(LONG, max_output_tokens=9, call=2)
        assert marks(server.requests[0]) == ["be brief", "the cards"]
        assert server.requests[0]["system"][0]["cache_control"]["ttl"] == "1h"
        assert marks(server.requests[1]) == []

    def test_an_empty_prefix_is_left_out(self, server: Any, make: MAKE) -> None:
        server.stream()
        make().reply(QUESTION, max_output_tokens=9, call=1)
        assert "system" not in server.requests[0]

    def test_never_more_marks_than_the_provider_takes(self, server: Any, make: MAKE) -> None:
        server.stream()
        many = Conversation(prefix=Prefix(system="s", context=tuple("abcdef")), turns=(Turn(Role.USER, "q"),))
        make().reply(many, max_output_tokens=9, call=1)
        assert len(marks(server.requests[0])) <= 4


class TestReplies:
    def test_text_usage_cost_and_names(self, server: Any, make: MAKE) -> None:
        server.stream(
            "hello\nworld",
            usage={
                "cache_read_input_tokens": 1000,
                "cache_creation_input_tokens": 300,
                "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
            },
        )
        reply = make().reply(QUESTION, max_output_tokens=100, call=1)
        assert reply.text == "hello\nworld"
        assert reply.stop_reason is StopReason.END
        assert reply.ids == {"message": "msg_1", "request": "req_1", "stop_reason": "end_turn"}
        used = reply.usage
        assert (used.input_tokens, used.output_tokens, used.cache_read_tokens) == (10, 7, 1000)
        assert (used.cache_write_tokens, used.cache_write_1h_tokens, used.estimated) == (100, 200, False)
        assert used.cost_usd == pytest.approx((10 * 1 + 7 * 5 + 1000 * 0.1 + 100 * 1.25 + 200 * 2) / 1e6)

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("max_tokens", StopReason.MAX_TOKENS), ("model_context_window_exceeded", StopReason.MAX_TOKENS),
            ("refusal", StopReason.REFUSAL), ("pause_turn", StopReason.OTHER), ("something_new", StopReason.OTHER),
        ],
    )  # fmt: skip
    def test_why_it_stopped(self, server: Any, make: MAKE, word: str, reason: StopReason) -> None:
        server.stream("half of", stop=word)
        reply = make().reply(QUESTION, max_output_tokens=100, call=1)
        assert (reply.stop_reason, reply.ids["stop_reason"], reply.text) == (reason, word, "half of")

    def test_thinking_is_not_part_of_the_text(self, server: Any, make: MAKE) -> None:
        events = [
            {"type": "message_start", "message": {
                "id": "m", "type": "message", "role": "assistant", "content": [], "model": "toy", "stop_reason": None,
                "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0,
             "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "secret"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "shown"}},
            {"type": "content_block_stop", "index": 1},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
             "usage": {"output_tokens": 9}},
            {"type": "message_stop"},
        ]  # fmt: skip
        server.events(events)
        reply = make().reply(QUESTION, max_output_tokens=100, call=1)
        assert (reply.text, reply.usage.output_tokens) == ("shown", 9)

    def test_another_model_is_priced_as_requested_and_labelled(self, server: Any, make: MAKE) -> None:
        backend = make()
        server.stream()
        backend.prices.models["other"] = backend.prices.models.pop("toy")
        backend.model = "other"
        reply = backend.reply(QUESTION, max_output_tokens=100, call=1)
        assert (reply.model, reply.usage.estimated) == ("toy", True)
        assert reply.usage.cost_usd == pytest.approx((10 + 35) / 1e6)


class TestRetries:
    def test_a_rate_limit_is_waited_out_as_the_server_asks(self, server: Any, make: MAKE) -> None:
        server.error(429, "rate_limit_error", {"retry-after": "1"})
        server.stream("at last")
        assert make(max_retries=1).reply(QUESTION, max_output_tokens=100, call=1).text == "at last"
        assert server.times[1] - server.times[0] >= 1

    def test_an_overload_is_retried(self, server: Any, make: MAKE) -> None:
        server.error(529, "overloaded_error", {"retry-after-ms": "10"})
        server.stream("at last")
        assert make(max_retries=1).reply(QUESTION, max_output_tokens=100, call=1).text == "at last"
        assert len(server.requests) == 2

    @pytest.mark.parametrize(
        ("status", "kind", "named"),
        [
            (429, "rate_limit_error", Failure.RATE_LIMITED), (529, "overloaded_error", Failure.OVERLOADED),
            (500, "api_error", Failure.SERVER), (401, "authentication_error", Failure.AUTHENTICATION),
            (403, "permission_error", Failure.AUTHENTICATION), (404, "not_found_error", Failure.REJECTED),
            (413, "request_too_large", Failure.REJECTED), (400, "invalid_request_error", Failure.REJECTED),
            (529, "new_kind", Failure.OVERLOADED), (503, "new_kind", Failure.SERVER), (418, "tea", Failure.REJECTED),
        ],
    )  # fmt: skip
    def test_a_refused_request_has_a_name_and_costs_nothing(
        self, server: Any, make: MAKE, status: int, kind: str, named: Failure
    ) -> None:
        server.error(status, kind)
        found = failure(make())
        assert (found.failure, found.billed) == (named, False)
        assert "Next: " in str(found)

    def test_the_servers_message_is_reported(self, server: Any, make: MAKE) -> None:
        server.error(400, "invalid_request_error")
        assert "that is invalid_request_error" in str(failure(make()))


class TestBrokenStreams:
    """Once a stream has begun, the provider may bill it."""

    def test_an_error_in_the_middle(self, server: Any, make: MAKE) -> None:
        server.events([*HALF, {"type": "error", "error": {"type": "overloaded_error", "message": "sorry"}}])
        found = failure(make(max_retries=3))
        assert (found.failure, found.billed) == (Failure.OVERLOADED, True)

    def test_an_end_in_the_middle(self, server: Any, make: MAKE) -> None:
        server.events(HALF)
        found = failure(make())
        assert (found.failure, found.billed) == (Failure.BROKEN_STREAM, True)

    @pytest.mark.parametrize(
        "data",
        [
            b"event: message_start\ndata: {not json\n\n",
            b"event: message_start\ndata: []\n\n",
            b'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 5, "delta": {}}\n\n',
            b'event: message_start\ndata: {"type": "message_start"}\n\n',
            b"<html>a gateway's page</html>",
            b"\xff\xfe\n\n",
            b"",
        ],
        ids=["no json", "a list", "an unknown block", "no message", "a page", "no text", "nothing"],
    )
    def test_an_invalid_stream(self, server: Any, make: MAKE, data: bytes) -> None:
        server.raw(data)
        found = failure(make())
        assert (found.failure, found.billed) == (Failure.BROKEN_STREAM, True)

    def test_a_connection_that_breaks(self, server: Any, make: MAKE) -> None:
        def cut(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("content-type", "text/event-stream")
            handler.send_header("content-length", "100000")
            handler.end_headers()
            handler.wfile.write(b"event: ping\ndata: {}\n\n")

        server.answers.append(cut)
        found = failure(make())
        assert (found.failure, found.billed) == (Failure.BROKEN_STREAM, True)

    def test_a_silent_server(self, server: Any, make: MAKE) -> None:
        server.answers.append(lambda handler: time.sleep(1.0))
        found = failure(make(silence_s=0.2))
        assert (found.failure, found.billed) == (Failure.TIMEOUT, True)

    def test_a_reply_that_takes_too_long_altogether(self, server: Any, make: MAKE) -> None:
        server.stream()
        found = failure(make(deadline_s=0.0))
        assert (found.failure, found.billed) == (Failure.TIMEOUT, True)

    def test_an_unreachable_server(self, prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            backend = AnthropicBackend("toy", prices, api_key="test", base_url=url, max_retries=0)
            found = failure(backend)
        assert (found.failure, found.billed) == (Failure.CONNECTION, False)


class TestCosts:
    def test_the_worst_case_is_a_token_for_every_byte(self, make: MAKE) -> None:
        backend = make(cache_life=CacheLife.NONE)
        assert backend.worst_case_usd(QUESTION, 100) == pytest.approx((4 + 2 * 64 + 100 * 5) / 1e6)
        assert make().worst_case_usd(QUESTION, 100) == pytest.approx((1.25 * (4 + 2 * 64) + 100 * 5) / 1e6)
        hour = make(cache_life=CacheLife.ONE_HOUR)
        assert hour.worst_case_usd(QUESTION, 100) == pytest.approx((2 * (4 + 2 * 64) + 100 * 5) / 1e6)

    def test_counting_makes_it_tighter(self, server: Any, make: MAKE) -> None:
        server.json({"input_tokens": 20})
        backend = make(cache_life=CacheLife.NONE)
        assert backend.counted_worst_case_usd(QUESTION, 100) == pytest.approx((22 + 100 * 5) / 1e6)
        assert server.paths == ["/v1/messages/count_tokens"]
        assert "max_tokens" not in server.requests[0]

    def test_without_a_count_the_bound_stays(self, server: Any, make: MAKE) -> None:
        server.error(404, "not_found_error")
        backend = make()
        assert backend.counted_worst_case_usd(QUESTION, 100) == backend.worst_case_usd(QUESTION, 100)


class TestSetup:
    def test_no_key_names_the_variable(self, prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(NoKey, match="ANTHROPIC_API_KEY is not set"):
            AnthropicBackend("toy", prices)

    def test_no_price_is_known_before_anything_is_sent(self, prices: Prices) -> None:
        with pytest.raises(NoPrice):
            AnthropicBackend("unknown", prices, api_key="test")

    def test_no_sdk_names_the_extra(self, prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "anthropic", None)
        with pytest.raises(MissingDependency, match=r"pytest-klineage\[llm\]"):
            AnthropicBackend("toy", prices, api_key="test")
