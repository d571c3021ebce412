"""The metering proxy when providers and clients fail: what comes through, what it costs, what is written down."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from proxy_client import QUESTION, Events, MakeRun, ask, httpx, wait_for

from pytest_klineage.lab.external.proxy import Upstream
from pytest_klineage.lab.external.runner import ExternalRun
from pytest_klineage.lab.external.wire import ProxySettings
from pytest_klineage.records import Answered, Asked, Failed, Noted, charged_usd

pytest.importorskip("starlette", reason="needs the extra external")


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "kind", "word"),
        [
            (429, "rate_limit_error", "rate_limited"), (529, "overloaded_error", "overloaded"),
            (500, "api_error", "server"), (401, "authentication_error", "authentication"),
            (400, "invalid_request_error", "rejected"), (503, "odd", "server"),
        ],
    )  # fmt: skip
    def test_the_providers_errors_come_through_and_cost_nothing(
        self, provider: Any, make_run: MakeRun, events: Events, status: int, kind: str, word: str
    ) -> None:
        body = {"type": "error", "error": {"type": kind, "message": "so sorry"}}
        provider.json(body, status, {"retry-after": "3"})
        run = make_run()
        reply = ask(run)
        assert (reply.status_code, reply.json(), reply.headers["retry-after"]) == (status, body, "3")
        (failed,) = events(run, Failed)
        assert (failed.reason, failed.cost_usd) == (word, 0.0)
        assert "so sorry" in failed.message
        assert run.budget.reserved_usd == 0

    def test_a_client_that_tries_again_pays_for_each_reply(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        anthropic = pytest.importorskip("anthropic", reason="needs the extra llm")
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
        provider.json(error, 529, {"retry-after-ms": "1"})
        provider.json(provider.message("at last"))
        run = make_run()
        with anthropic.Anthropic(api_key=run.key, base_url=run.url, max_retries=2) as client:
            client.messages.create(model="toy", max_tokens=50, messages=[{"role": "user", "content": "why?"}])
        assert [event.call for event in events(run, Asked)] == [1, 2]
        assert [event.reason for event in events(run, Failed)] == ["overloaded"]
        assert len(events(run, Answered)) == 1

    def test_an_unreachable_provider_costs_nothing(self, make_run: MakeRun, events: Events) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = make_run(upstreams={"anthropic": Upstream(base_url=f"http://127.0.0.1:{port}")})
        assert ask(run).status_code == 502
        (failed,) = events(run, Failed)
        assert (failed.reason, failed.cost_usd) == ("connection", 0.0)

    def test_a_provider_that_hangs_up_is_charged_in_full(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.hang_up()
        run = make_run()
        assert ask(run).status_code == 502
        (failed,) = events(run, Failed)
        assert failed.reason == "connection"
        assert failed.cost_usd == pytest.approx(events(run, Asked)[0].reserved_usd)
        assert charged_usd(events(run)) == pytest.approx(run.budget.spent_usd)

    def test_an_invalid_reply_is_charged_in_full(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json({"hello": "world"})
        run = make_run()
        assert ask(run).status_code == 502
        assert events(run, Failed)[0].reason == "broken_stream"
        assert run.budget.spent_usd > 0

    def test_a_provider_that_hangs_is_given_up(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        provider.json(provider.message(), delay_s=1.0)
        run = make_run(proxy=ProxySettings(model="toy", deadline_s=0.2))
        assert ask(run).status_code == 504
        assert events(run, Failed)[0].reason == "timeout"

    @pytest.mark.parametrize("what", ["cut", "error", "not json"])
    def test_a_broken_stream_is_charged_in_full(
        self, provider: Any, make_run: MakeRun, events: Events, what: str
    ) -> None:
        half = provider.message_events()[:4]
        fault = ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
        provider.events({"cut": half, "error": [*half, fault], "not json": [*half, ("ping", "{")]}[what])
        run = make_run()
        ask(run, stream=True)
        wait_for(lambda: bool(events(run, Failed)))
        (failed,) = events(run, Failed)
        assert failed.reason == ("overloaded" if what == "error" else "broken_stream")
        assert failed.cost_usd == pytest.approx(events(run, Asked)[0].reserved_usd)

    def test_a_client_that_leaves_a_stream_is_charged_what_it_cost(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.events(provider.message_events("because"), delay_s=0.05)
        run = make_run()
        with (
            httpx.Client(timeout=10) as client,
            client.stream(
                "POST", f"{run.url}/v1/messages", json={**QUESTION, "stream": True}, headers={"x-api-key": run.key}
            ) as reply,
        ):
            next(reply.iter_bytes())
        wait_for(lambda: bool(events(run, Answered)))
        assert events(run, Answered)[0].usage.output_tokens == 7
        wait_for(lambda: any(note.topic == "client" for note in events(run, Noted)))

    def test_a_client_leaving_before_the_reply_pays_its_cost(
        self, provider: Any, make_run: MakeRun, events: Events
    ) -> None:
        provider.json(provider.message(), delay_s=0.4)
        run = make_run()
        with httpx.Client(timeout=httpx.Timeout(10, read=0.1)) as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{run.url}/v1/messages", json=QUESTION, headers={"x-api-key": run.key})
        wait_for(lambda: bool(events(run, Answered)))
        assert run.budget.reserved_usd == 0
        wait_for(lambda: any("before the reply" in note.text for note in events(run, Noted)))

    def test_calls_under_way_at_the_end_are_written_off(self, provider: Any, make_run: MakeRun, events: Events) -> None:
        import threading

        provider.json(provider.message(), delay_s=2.0)
        run = make_run()
        asking = threading.Thread(target=_ask_quietly, args=(run,))
        asking.start()
        wait_for(lambda: bool(events(run, Asked)))
        run.stop("over")
        asking.join()
        (failed,) = events(run, Failed)
        assert failed.reason == "lost"
        assert failed.cost_usd == pytest.approx(events(run, Asked)[0].reserved_usd)


def _ask_quietly(run: ExternalRun) -> None:
    try:
        ask(run)
    except httpx.HTTPError:
        return
