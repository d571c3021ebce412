"""A client of the metering proxy, as tests are one. No test lives here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from pytest_klineage.lab.external.runner import ExternalRun

httpx = pytest.importorskip("httpx", reason="needs the extra external")

MakeRun = Callable[..., ExternalRun]
Events = Callable[..., list[Any]]
QUESTION = {"model": "toy", "max_tokens": 100, "messages": [{"role": "user", "content": "why?"}]}
CHAT = {"model": "toy", "max_completion_tokens": 100, "messages": [{"role": "user", "content": "why?"}]}


def post(run: ExternalRun, path: str, body: Any, **headers: str) -> Any:
    key = headers.pop("key", run.key)
    given = {"x-api-key": key} if "messages" in path else {"authorization": f"Bearer {key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with httpx.Client(timeout=10) as client:
        return client.post(f"{run.url}{path}", content=content, headers={**given, **headers} if key else headers)


def ask(run: ExternalRun, **changes: Any) -> Any:
    return post(run, "/v1/messages", {**QUESTION, **changes})


def chat(run: ExternalRun, **changes: Any) -> Any:
    return post(run, "/v1/chat/completions", {**CHAT, **changes})


def wait_for(what: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)
