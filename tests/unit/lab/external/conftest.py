"""A provider on this machine that speaks both protocols, a judge that is quick, and runs put together from them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.proxy import Upstream
from pytest_klineage.lab.external.runner import ExternalRun, Limits, Setup
from pytest_klineage.lab.external.wire import ProxySettings
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.operators import make_case
from pytest_klineage.records import (
    Code,
    Event,
    Interval,
    KernelCase,
    KernelSource,
    LibraryPolicy,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Verdict,
)

MODEL = "toy"
PRICES = """
[models.toy]
input = 1.0
cache_write_5m = 1.25
cache_write_1h = 2.0
cache_read = 0.1
output = 5.0
"""
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    path = tmp_path / "my-prices.toml"
    path.write_text(PRICES)
    return Prices.load(path)


# --- a provider -------------------------------------------------------------------------------------------------------


@dataclass
class Provider:
    """Answers requests in order; the last answer is repeated."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None, delay_s: float = 0.0) -> None:
        def answer(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
            time.sleep(delay_s)
            send(handler, json.dumps(body).encode(), status, "application/json", headers or {})

        self.answers.append(answer)

    def events(self, events: list[tuple[str, Any]], delay_s: float = 0.0) -> None:
        """Answer with events, each with a name (empty for none) and its data."""

        def answer(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
            handler.send_response(200)
            handler.send_header("content-type", "text/event-stream")
            handler.send_header("connection", "close")
            handler.end_headers()
            for name, data in events:
                text = data if isinstance(data, str) else json.dumps(data)
                head = f"event: {name}\n" if name else ""
                handler.wfile.write(f"{head}data: {text}\n\n".encode())
                handler.wfile.flush()
                time.sleep(delay_s)

        self.answers.append(answer)

    def hang_up(self) -> None:
        """Close without a word."""

        def answer(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
            handler.close_connection = True
            handler.connection.shutdown(2)

        self.answers.append(answer)

    def message(self, text: str = "hello", **usage: Any) -> dict[str, Any]:
        """A whole reply of the Messages API."""
        return message(text, **usage)

    def message_events(self, text: str = "hello", **usage: Any) -> list[tuple[str, Any]]:
        """A whole stream of the Messages API."""
        return message_events(text, **usage)

    def completion(self, text: str = "hello", **usage: Any) -> dict[str, Any]:
        """A whole reply of the chat completions API."""
        return completion(text, **usage)

    def completion_events(self, text: str = "hello") -> list[tuple[str, Any]]:
        """A whole stream of the chat completions API, as it is with include_usage."""
        return completion_events(text)


def send(handler: BaseHTTPRequestHandler, data: bytes, status: int, kind: str, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {"content-type": kind, "content-length": str(len(data)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    script = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with script.lock:
                script.requests.append(body)
                script.headers.append({name.lower(): value for name, value in self.headers.items()})
                script.paths.append(self.path)
                answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            answer(self, body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that leaves is what some tests are about

    httpd = Server(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield script
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def message(text: str = "hello", **usage: Any) -> dict[str, Any]:
    """A whole reply of the Messages API."""
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": text}],
        "usage": {"input_tokens": 10, "output_tokens": 4, **usage},
    }  # fmt: skip


def message_events(text: str = "hello", **usage: Any) -> list[tuple[str, Any]]:
    """A whole stream of the Messages API."""
    begun = {
        **message(),
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 10, "output_tokens": 1, **usage},
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in (text[:3], text[3:])
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]  # fmt: skip
    return [(event["type"], event) for event in events]


def completion(text: str = "hello", **usage: Any) -> dict[str, Any]:
    """A whole reply of the chat completions API."""
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, **usage},
    }  # fmt: skip


def completion_events(text: str = "hello") -> list[tuple[str, Any]]:
    """A whole stream of the chat completions API, as it is with include_usage."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "model": MODEL,
            "choices": choices,
            "usage": None,
        }

    last = {**chunk({}), "choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}}
    chunks = [chunk({"role": "assistant", "content": ""}), chunk({"content": text[:3]}), chunk({"content": text[3:]}),
              chunk({}, "stop"), last, "[DONE]"]  # fmt: skip
    return [("", one) for one in chunks]


# --- a judge ----------------------------------------------------------------------------------------------------------


def verdict(case: KernelCase, source: KernelSource, code: Code, speedup: float | None = None) -> Verdict:
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired", reference_ms=2.0, candidate_ms=2.0 / speedup, warmup=1, flush_bytes=0, statistic="median",
            speedup=Interval(speedup, speedup * 0.9, speedup * 1.1), reference_samples_ms=(2.0,),
            candidate_samples_ms=(2.0 / speedup,),
        )  # fmt: skip
    return Verdict(
        case=case, status=code.status, reasons=(Reason(code=code, message=f"that is {code}"),), timing=timing,
        surface=source.surface.value, source_digest=source.digest, judged_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


@dataclass
class QuickJudge:
    """Reads the verdict out of the source: "speed 1.5", a code, or whatever was put into `faults`."""

    delay_s: float = 0.0
    judged: list[KernelSource] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def __call__(self, case: KernelCase, source: KernelSource) -> Verdict:
        self.judged.append(source)
        self.threads.add(threading.get_ident())
        time.sleep(self.delay_s)
        if self.faults:
            raise self.faults.pop(0)
        text = source.files[-1].text
        for code in Code:
            if code.value in text:
                allowed = case.library is LibraryPolicy.ALLOW and code.value.startswith("wrapper")
                return verdict(case, source, Code.ACCEPTED_FASTER, 3.0) if allowed else verdict(case, source, code)
        if "speed" not in text:
            return verdict(case, source, Code.COMPILE)
        speed = float(text.split("speed")[1].split()[0])
        code = Code.ACCEPTED_FASTER if speed >= 1 else Code.SLOWER_THAN_REQUIRED
        return verdict(case, source, code, speed)


@pytest.fixture
def judge() -> QuickJudge:
    return QuickJudge()


def kernel(text: str, surface: Surface = Surface.CPP) -> KernelSource:
    return KernelSource(surface=surface, files=(SourceFile("kernel.cpp", text),), entry="run")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> EvaluationTarget:
    case = make_case("gemm", (4, 8, 16), "fp32", "torch")
    return EvaluationTarget(case=case, platform="cpu", surface=Surface.CPP, instructions="multiply two matrices")


@pytest.fixture
def setup(provider: Provider, target: EvaluationTarget) -> Setup:
    return Setup(
        name="toy-gemm", method="toy-method", target=target, proxy=ProxySettings(model=MODEL, deadline_s=20),
        upstreams={
            "anthropic": Upstream(base_url=provider.url, key="the-real-key"),
            "openai": Upstream(base_url=f"{provider.url}/v1", key="the-real-key"),
        },
        limits=Limits(budget_usd=1.0, deadline_s=20, silence_s=20, grace_s=0.3),
    )  # fmt: skip


MakeRun = Callable[..., ExternalRun]


@pytest.fixture
def make_run(setup: Setup, judge: QuickJudge, prices: Prices, tmp_path: Path) -> Iterator[MakeRun]:
    """Makes and enters a run; `changes` are fields of Setup."""
    made: list[ExternalRun] = []

    def make(**changes: Any) -> ExternalRun:
        path = tmp_path / "trajectories" / f"run-{len(made)}.jsonl"
        run = ExternalRun(msgspec.structs.replace(setup, **changes), judge, prices, path)
        made.append(run)
        return run.__enter__()

    yield make
    for run in made:
        run.__exit__()


@pytest.fixture
def events() -> Callable[..., list[Any]]:
    """Events of a run's file, of some kinds."""

    def read(run: ExternalRun, *kinds: type) -> list[Any]:
        lines, _ = read_trajectory(run.path)
        found: list[Event] = [line.event for line in lines]
        return [event for event in found if isinstance(event, kinds)] if kinds else list(found)

    return read
