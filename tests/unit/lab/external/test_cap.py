"""The cap holds whatever clients do at once, and whatever comes back: a property, over callers in one event loop."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.lab.external.metering import Meter
from pytest_klineage.lab.external.proxy import Proxy, Upstream
from pytest_klineage.lab.external.server import application
from pytest_klineage.lab.external.wire import ProxySettings
from pytest_klineage.lab.llm.prices import Budget, Price, Prices
from pytest_klineage.lab.llm.trajectory import Trajectory, read_trajectory
from pytest_klineage.records import Asked, Begun, Stopped, charged_usd

httpx = pytest.importorskip("httpx", reason="needs the extra external")
pytest.importorskip("starlette", reason="needs the extra external")

PRICES = Prices({"toy": Price(input=1.0, cache_write_5m=1.25, cache_write_1h=2.0, cache_read=0.1, output=5.0)})
SLACK = 1e-9


class Caller(msgspec.Struct, frozen=True):
    """One call: what it asks for, what the provider makes of it, and when."""

    max_tokens: int
    share: float
    """Part of the limit that the provider writes; above 1 it bills more than it was allowed to."""
    steps: int
    """Turns of the event loop that the provider takes."""
    outcome: str
    tries: int


def callers(most: float) -> st.SearchStrategy[list[Caller]]:
    one = st.builds(
        Caller, max_tokens=st.integers(1, 400), share=st.floats(0, most), steps=st.integers(0, 8),
        outcome=st.sampled_from(["reply", "reply", "reply", "error", "hang up"]), tries=st.integers(1, 3),
    )  # fmt: skip
    return st.lists(one, min_size=1, max_size=12)


class Provider:
    """Bills what the callers say, and checks at every moment that the cap is kept."""

    def __init__(self, plan: list[Caller], limit_usd: float, honest: bool) -> None:
        self.plan, self.limit_usd, self.honest = plan, limit_usd, honest
        self.billed_usd = 0.0
        self.refused = False
        self.after_the_cap = 0

    async def __call__(self, request: Any) -> Any:
        caller = self.plan[int(request.headers["anthropic-version"])]
        if self.billed_usd > self.limit_usd + SLACK:
            self.after_the_cap += 1
        for _ in range(caller.steps):
            await asyncio.sleep(0)
        if caller.outcome == "error":
            return httpx.Response(529, json={"error": {"type": "overloaded_error", "message": "busy"}})
        used = {"input_tokens": 5, "output_tokens": int(caller.max_tokens * caller.share)}
        self.billed_usd += (used["input_tokens"] + 5 * used["output_tokens"]) / 1e6
        if self.honest:
            assert self.billed_usd <= self.limit_usd + SLACK
        if caller.outcome == "hang up":
            raise httpx.ReadError("gone")
        return httpx.Response(200, json={
            "type": "message", "model": "toy", "stop_reason": "end_turn", "usage": used,
            "content": [{"type": "text", "text": "x"}]})  # fmt: skip


async def played(
    plan: list[Caller], limit_usd: float, path: Path, *, honest: bool
) -> tuple[Provider, Budget, list[int]]:
    provider = Provider(plan, limit_usd, honest)
    budget = Budget(limit_usd)
    with Trajectory.create(path, Begun(name="cap", backend="proxy", model="toy", budget_usd=limit_usd)) as trajectory:
        async with httpx.AsyncClient(transport=httpx.MockTransport(provider)) as upstream:
            meter = Meter(trajectory, budget, PRICES, "toy")
            proxy = Proxy(
                meter, ProxySettings(model="toy"), {"anthropic": Upstream(base_url="http://up")}, "k", upstream
            )
            transport = httpx.ASGITransport(application(proxy.routes()))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

                async def call(position: int) -> list[int]:
                    body = {"model": "toy", "max_tokens": plan[position].max_tokens,
                            "messages": [{"role": "user", "content": "w"}]}  # fmt: skip
                    headers = {"x-api-key": "k", "anthropic-version": str(position)}
                    found = []
                    for _ in range(plan[position].tries):
                        found.append((await client.post("/v1/messages", json=body, headers=headers)).status_code)
                    return found

                statuses = await asyncio.gather(*(call(position) for position in range(len(plan))))
            await proxy.close()
    return provider, budget, [status for found in statuses for status in found]


def play(plan: list[Caller], limit_usd: float, *, honest: bool) -> tuple[Provider, Budget, list[int], list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cap.jsonl")
        provider, budget, statuses = asyncio.run(played(plan, limit_usd, path, honest=honest))
        lines, warnings = read_trajectory(path)
    assert not warnings
    return provider, budget, statuses, [line.event for line in lines]


@settings(max_examples=60, deadline=None)
@given(plan=callers(most=1.0), limit_usd=st.floats(0, 0.02))
def test_the_cap_is_never_passed(plan: list[Caller], limit_usd: float) -> None:
    provider, budget, statuses, events = play(plan, limit_usd, honest=True)
    assert provider.billed_usd <= limit_usd + SLACK
    assert budget.spent_usd <= limit_usd + SLACK
    assert budget.spent_usd + SLACK >= provider.billed_usd
    assert budget.reserved_usd == 0
    assert charged_usd(events) == pytest.approx(budget.spent_usd)
    assert set(statuses) <= {200, 402, 502, 529}
    assert sum(isinstance(event, Asked) for event in events) == len(statuses) - statuses.count(402)
    stops = [event for event in events if isinstance(event, Stopped)]
    assert [stop.reason for stop in stops] == ["budget_exhausted"] * (402 in statuses)


@settings(max_examples=40, deadline=None)
@given(plan=callers(most=20.0), limit_usd=st.floats(0, 0.02))
def test_a_provider_that_bills_more_is_asked_no_more(plan: list[Caller], limit_usd: float) -> None:
    """Only calls that were under way when it happened can still be sent; no call is begun after the cap is passed."""
    _, budget, _, events = play(plan, limit_usd, honest=False)
    spent = 0.0
    for event in events:
        if isinstance(event, Asked):
            assert spent + event.reserved_usd <= limit_usd + SLACK
        spent += charged_usd([event])
    assert spent == pytest.approx(budget.spent_usd)
    assert budget.reserved_usd == 0
