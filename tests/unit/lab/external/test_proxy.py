"""The metering proxy over HTTP on this machine: clients of both protocols, what is sent on, charged, written down."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from proxy_client import CHAT, QUESTION, Events, MakeRun, ask, chat, httpx, post

from pytest_klineage.lab.external.proxy import Upstream
from pytest_klineage.lab.external.runner import Limits
from pytest_klineage.lab.external.wire import ProxySettings
from pytest_klineage.records import Answered, Asked, Noted, Stopped, StopReason

pytest.importorskip("starlette", reason="needs the extra external")


class TestMessages:
    def test_a_reply_comes_through_and_is_charged(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        usage = {"cache_read_input_tokens": 100, "cache_creation_input_tokens": 30,
                 "cache_creation": {"ephemeral_1h_input_tokens": 20, "ephemeral_5m_input_tokens": 10}}  # fmt: skip
        provider.json(provider.message("because", **usage), headers={"request-id": "req_9"})
        run = make_run()
        reply = ask(run)
        assert reply.status_code == 200
        assert reply.json() == provider.message("because", **usage)
        assert reply.headers["request-id"] == "req_9"
        (answered,) = events(run, Answered)
        used = answered.usage
        assert (used.input_tokens, used.output_tokens, used.cache_read_tokens) == (10, 4, 100)
        assert (used.cache_write_tokens, used.cache_write_1h_tokens) == (10, 20)
        assert used.cost_usd == pytest.approx((10 * 1 + 4 * 5 + 100 * 0.1 + 10 * 1.25 + 20 * 2) / 1e6)
        assert run.budget.spent_usd == pytest.approx(used.cost_usd)
        assert run.budget.reserved_usd == 0
        assert (answered.text, answered.stop_reason, answered.model) == ("because", StopReason.END, "toy")

    def test_the_key_is_replaced_and_the_rest_sent_as_it_is(self, provider: Any, make_run: MakeRun) -> None:
        provider.json(provider.message())
        run = make_run()
        post(run, "/v1/messages", {**QUESTION, "system": "be brief", "temperature": 1.0},
             **{"anthropic-version": "2024-01-01", "anthropic-beta": "context-1m-2025, tools-1"})  # fmt: skip
        assert provider.paths == ["/v1/messages"]
        assert provider.requests == [{**QUESTION, "system": "be brief", "temperature": 1.0}]
        (headers,) = provider.headers
        assert headers["x-api-key"] == "the-real-key"
        assert headers["anthropic-version"] == "2024-01-01"
        assert headers["anthropic-beta"] == "tools-1"
        assert run.key not in json.dumps(headers)

    def test_the_prompt_stands_in_the_trajectory_before_the_call(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.json(provider.message())
        run = make_run()
        ask(run)
        ask(run, system="be brief", messages=[{"role": "user", "content": [{"type": "text", "text": "why?"}]}])
        first, second = events(run, Asked)
        assert (first.call, first.text, first.max_output_tokens, first.history) == (1, "why?", 100, 0)
        assert second.text == "# system\n\nbe brief\n\n# user\n\nwhy?"
        assert first.reserved_usd >= 100 * 5 / 1e6 + len("why?") / 1e6

    def test_a_stream_comes_through_event_by_event(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.events(provider.message_events("because", cache_read_input_tokens=5), delay_s=0.1)
        run = make_run()
        arrived = []
        with (
            httpx.Client(timeout=10) as client,
            client.stream(
                "POST", f"{run.url}/v1/messages", json={**QUESTION, "stream": True}, headers={"x-api-key": run.key}
            ) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")
            text = b""
            for data in reply.iter_bytes():
                arrived.append(time.monotonic())
                text += data
        assert arrived[-1] - arrived[0] > 0.3
        sent = [json.loads(line[5:]) for line in text.decode().splitlines() if line.startswith("data:")]
        assert sent == [data for _, data in provider.message_events("because", cache_read_input_tokens=5)]
        (answered,) = events(run, Answered)
        assert (answered.text, answered.usage.input_tokens, answered.usage.output_tokens) == ("because", 10, 7)
        assert answered.usage.cache_read_tokens == 5

    def test_the_call_is_charged_when_the_client_sees_the_end(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.events(provider.message_events())
        run = make_run()
        with (
            httpx.Client(timeout=10) as client,
            client.stream(
                "POST", f"{run.url}/v1/messages", json={**QUESTION, "stream": True}, headers={"x-api-key": run.key}
            ) as reply,
        ):
            for line in reply.iter_lines():
                if "message_stop" in line:
                    assert events(run, Answered)

    def test_the_providers_own_sdk_works(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        anthropic = pytest.importorskip("anthropic", reason="needs the extra llm")
        provider.json(provider.message("because"))
        provider.events(provider.message_events("streamed"))
        run = make_run()
        with anthropic.Anthropic(api_key=run.key, base_url=run.url, max_retries=0) as client:
            whole = client.messages.create(model="toy", max_tokens=50, messages=[{"role": "user", "content": "why?"}])
            assert whole.content[0].text == "because"
            with client.messages.stream(
                model="toy", max_tokens=50, messages=[{"role": "user", "content": "why?"}]
            ) as stream:
                assert "".join(stream.text_stream) == "streamed"
                assert stream.get_final_message().usage.output_tokens == 7
        assert [answered.usage.output_tokens for answered in events(run, Answered)] == [4, 7]

    def test_the_sdk_stops_at_the_cap_without_a_retry(self, provider: Any, make_run: MakeRun) -> None:
        anthropic = pytest.importorskip("anthropic", reason="needs the extra llm")
        provider.json(provider.message())
        run = make_run(limits=Limits(budget_usd=1e-5))
        with (
            anthropic.Anthropic(api_key=run.key, base_url=run.url, max_retries=3) as client,
            pytest.raises(anthropic.APIStatusError, match="budget") as caught,
        ):
            client.messages.create(model="toy", max_tokens=50, messages=[{"role": "user", "content": "why?"}])
        assert caught.value.status_code == 402
        assert not provider.requests


class TestChatCompletions:
    def test_a_reply_comes_through_and_is_charged(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.completion("because", prompt_tokens_details={"cached_tokens": 6}))
        run = make_run()
        assert chat(run).json()["choices"][0]["message"]["content"] == "because"
        assert provider.paths == ["/v1/chat/completions"]
        assert provider.headers[0]["authorization"] == "Bearer the-real-key"
        (answered,) = events(run, Answered)
        assert (answered.usage.input_tokens, answered.usage.cache_read_tokens) == (4, 6)
        assert answered.usage.cost_usd == pytest.approx((4 * 1 + 6 * 0.1 + 4 * 5) / 1e6)

    def test_thinking_outside_of_the_completion_tokens_is_charged(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.json(provider.completion(total_tokens=90))
        run = make_run()
        chat(run)
        assert events(run, Answered)[0].usage.output_tokens == 80

    @pytest.mark.parametrize("asked_for", [True, False])
    def test_a_stream_is_made_to_tell_its_usage(
        self, provider: Any, make_run: MakeRun, events: Events, asked_for: bool
    ) -> None:
        provider.events(provider.completion_events("because"))
        run = make_run()
        options = {"stream_options": {"include_usage": True}} if asked_for else {}
        lines = [line[6:] for line in chat(run, stream=True, **options).text.splitlines() if line.startswith("data:")]
        assert provider.requests[0]["stream_options"] == {"include_usage": True}
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert "".join(choice["delta"].get("content", "") for one in chunks for choice in one["choices"]) == "because"
        assert any(not one["choices"] for one in chunks) is asked_for
        (answered,) = events(run, Answered)
        assert (answered.text, answered.usage.output_tokens) == ("because", 4)

    def test_a_request_without_a_limit_gets_one(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.completion())
        run = make_run(proxy=ProxySettings(model="toy", default_output_tokens=77))
        body = {name: value for name, value in CHAT.items() if name != "max_completion_tokens"}
        post(run, "/v1/chat/completions", body)
        post(run, "/v1/chat/completions", body)
        assert [sent["max_completion_tokens"] for sent in provider.requests] == [77, 77]
        assert events(run, Asked)[0].max_output_tokens == 77
        notes = [note.text for note in events(run, Noted) if note.topic == "rewritten"]
        assert notes == ["from call 1 on: max_completion_tokens = 77 added"]

    def test_several_choices_are_reserved_for(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.completion())
        run = make_run()
        chat(run, n=3)
        assert events(run, Asked)[0].max_output_tokens == 300

    def test_the_address_of_a_deployment_is_the_same(self, provider: Any, make_run: MakeRun) -> None:
        provider.json(provider.completion("because"))
        run = make_run()
        body = {name: value for name, value in CHAT.items() if name != "model"}
        with httpx.Client() as client:
            reply = client.post(
                f"{run.url}/openai/deployments/toy/chat/completions?api-version=1", json=body,
                headers={"api-key": run.key},
            )  # fmt: skip
        assert reply.json()["choices"][0]["message"]["content"] == "because"
        assert provider.requests[0]["model"] == "toy"

    def test_no_usage_means_an_estimate(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json({**provider.completion("x" * 300), "usage": None})
        run = make_run()
        chat(run)
        (answered,) = events(run, Answered)
        assert answered.usage.estimated
        assert answered.usage.output_tokens == 100


class TestRewrites:
    def test_nothing_is_rewritten_unless_asked_for(self, provider: Any, make_run: MakeRun) -> None:
        provider.json(provider.message())
        thinking = {"type": "enabled", "budget_tokens": 50}
        ask(make_run(), temperature=1.0, thinking=thinking, system="")
        assert provider.requests[0] == {**QUESTION, "temperature": 1.0, "thinking": thinking, "system": ""}

    def test_parameters_of_older_models(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.message())
        names = frozenset({"sampling", "thinking", "empty-system"})
        run = make_run(proxy=ProxySettings(model="toy", rewrites=names))
        for _ in range(2):
            ask(run, temperature=1.0, thinking={"type": "enabled", "budget_tokens": 50}, system="")
        assert provider.requests == [{**QUESTION, "thinking": {"type": "adaptive"}}] * 2
        notes = [note.text for note in events(run, Noted) if note.topic == "rewritten"]
        assert notes == [
            "from call 1 on: temperature=1.0 left out",
            "from call 1 on: thinking enabled(50) -> adaptive",
            "from call 1 on: empty system left out",
        ]

    def test_the_name_of_the_limit(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.completion())
        run = make_run(proxy=ProxySettings(model="toy", rewrites=frozenset({"completion-tokens"})))
        post(run, "/v1/chat/completions", {"model": "toy", "max_tokens": 9, "messages": CHAT["messages"]})
        assert provider.requests[0] == {"model": "toy", "max_completion_tokens": 9, "messages": CHAT["messages"]}
        assert events(run, Asked)[0].max_output_tokens == 9

    def test_an_alias_becomes_the_model(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.message())
        run = make_run(proxy=ProxySettings(model="toy", aliases=frozenset({"kernel-writer"})))
        assert ask(run, model="kernel-writer").status_code == 200
        assert provider.requests[0]["model"] == "toy"
        assert "model kernel-writer -> toy" in events(run, Noted)[0].text


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "status", "word", "kind"),
        [
            ({"model": "other"}, 404, "unknown_model", "not_found_error"),
            ({"model": 7}, 404, "unknown_model", "not_found_error"),
            ({"messages": []}, 400, "invalid", "invalid_request_error"),
            ({"messages": "why?"}, 400, "invalid", "invalid_request_error"),
            ({"max_tokens": None}, 400, "invalid", "invalid_request_error"),
            ({"max_tokens": True}, 400, "invalid", "invalid_request_error"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
             400, "unbounded", "invalid_request_error"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]},
             400, "unbounded", "invalid_request_error"),
            ({"tools": [{"type": "web_search_20250305"}]}, 400, "unbounded", "invalid_request_error"),
            ({"speed": "fast"}, 400, "unbounded", "invalid_request_error"),
        ],
    )  # fmt: skip
    def test_of_messages(
        self, provider: Any, make_run: MakeRun, events: Events, changes: Any, status: int, word: str, kind: str
    ) -> None:
        run = make_run()
        reply = ask(run, **changes)
        assert reply.status_code == status
        assert reply.json()["type"] == "error"
        assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == (kind, word)
        assert not provider.requests
        assert not events(run, Asked)
        assert [note.text.partition(":")[0] for note in events(run, Noted)] == [word]
        assert run.budget.reserved_usd == 0

    def test_of_chat_completions_in_its_own_form(self, provider: Any, make_run: MakeRun) -> None:
        reply = chat(make_run(), model="other")
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"
        assert reply.json()["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize(("key", "word"), [("", "no_key"), ("mine", "wrong_key")])
    def test_no_key_and_another_key(
        self, provider: Any, make_run: MakeRun, events: Events, key: str, word: str
    ) -> None:
        run = make_run()
        for path in ("/v1/messages", "/v1/chat/completions"):
            reply = post(run, path, QUESTION, key=key)
            assert reply.status_code == 401
        assert [note.text.partition(":")[0] for note in events(run, Noted)] == [word, word]
        assert not provider.requests

    def test_a_body_that_is_not_json(self, make_run: MakeRun) -> None:
        run = make_run()
        assert post(run, "/v1/messages", b"{why").json()["error"]["code"] == "not_json"
        assert post(run, "/v1/messages", b"[1]").json()["error"]["code"] == "not_json"

    def test_a_protocol_without_a_provider(self, make_run: MakeRun) -> None:
        run = make_run(upstreams={"openai": Upstream(base_url="http://127.0.0.1:9/v1")})
        reply = ask(run)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "no_upstream")
        assert "ANTHROPIC_API_KEY" in reply.json()["error"]["message"]

    def test_notes_of_one_kind_are_bounded(self, make_run: MakeRun, events: Events) -> None:
        run = make_run()
        for _ in range(30):
            ask(run, model="other")
        assert len(events(run, Noted)) == 20

    def test_an_invalid_address(self, make_run: MakeRun) -> None:
        reply = post(make_run(), "/v1/embeddings", {})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


class TestBudget:
    def test_at_the_cap_nothing_is_sent(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.message(output_tokens=100))
        run = make_run(limits=Limits(budget_usd=0.0022))
        statuses = [ask(run).status_code for _ in range(8)]
        served = statuses.count(200)
        assert statuses == [200] * served + [402] * (8 - served)
        assert 0 < served < 8
        assert len(provider.requests) == served
        assert run.budget.spent_usd <= 0.0022
        (stopped,) = events(run, Stopped)
        assert stopped.reason == "budget_exhausted"

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
    def test_the_error_is_in_the_protocols_form(self, make_run: MakeRun, path: str) -> None:
        run = make_run(limits=Limits(budget_usd=0.0))
        reply = post(run, path, QUESTION)
        assert reply.status_code == 402
        error = reply.json()["error"]
        assert "used up" in error["message"]
        assert (error.get("type"), error.get("code")) in [
            ("billing_error", "budget_exhausted"), ("invalid_request_error", "insufficient_quota"),
        ]  # fmt: skip

    def test_a_call_waits_for_one_that_holds_the_money(self, provider: Any, make_run: MakeRun) -> None:
        from concurrent.futures import ThreadPoolExecutor

        provider.json(provider.message(), delay_s=0.2)
        # Room for one reservation at a time, and for many calls at what they cost.
        run = make_run(limits=Limits(budget_usd=0.0012))
        with ThreadPoolExecutor(3) as pool:
            statuses = [reply.status_code for reply in pool.map(lambda _: ask(run), range(3))]
        assert statuses == [200, 200, 200]
        assert run.budget.spent_usd <= 0.0012


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_provider_without_a_key_gets_no_header(provider: Any, make_run: MakeRun, path: str) -> None:
    provider.json(provider.message() if "messages" in path else provider.completion())
    upstreams = {"anthropic": Upstream(base_url=provider.url), "openai": Upstream(base_url=f"{provider.url}/v1")}
    assert post(make_run(upstreams=upstreams), path, {**QUESTION}).status_code == 200
    assert not {"x-api-key", "authorization"} & provider.headers[0].keys()
