"""A local server that speaks the Messages API, a backend that answers from a list, and prices that are easy to add."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.records import StopReason, Usage

MODEL = "toy"
PRICES = """
[models.toy]
input = 1.0
cache_write_5m = 1.25
cache_write_1h = 2.0
cache_read = 0.1
output = 5.0
"""


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    path = tmp_path / "my-prices.toml"
    path.write_text(PRICES)
    return Prices.load(path)


@dataclass
class ScriptedBackend:
    """A provider that answers what it is given to say, and remembers what it has billed."""

    script: list[Reply | BaseException]
    worst_usd: float = 0.1
    counted_usd: float | None = None
    name: str = "scripted"
    model: str = MODEL
    resumable: bool = False
    billed_usd: float = 0.0
    begun: int = 0
    asked: list[Conversation] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    before: Callable[[], None] | None = None

    def begin(self) -> None:
        self.begun += 1

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.worst_usd

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.worst_usd if self.counted_usd is None else self.counted_usd

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        self.asked.append(conversation)
        self.calls.append(call)
        if self.before is not None:
            self.before()
        answer = self.script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self.billed_usd += answer.usage.cost_usd
        return answer


@pytest.fixture
def scripted() -> type[ScriptedBackend]:
    return ScriptedBackend


def make_reply(text: str, cost_usd: float = 0.01, stop_reason: StopReason = StopReason.END) -> Reply:
    usage = Usage(model=MODEL, input_tokens=10, output_tokens=2, cost_usd=cost_usd)
    return Reply(text=text, usage=usage, stop_reason=stop_reason, model=MODEL)


@pytest.fixture
def said() -> Callable[..., Reply]:
    """Makes a reply from a text, a cost and a reason to stop."""
    return make_reply


# --- a server for the provider's SDK ----------------------------------------------------------------------------------

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class MessagesServer:
    """Answers requests in order; the last answer is repeated."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(self, text: str = "hello", *, stop: str = "end_turn", usage: dict[str, Any] | None = None) -> None:
        """Answer with a complete stream."""
        self.answers.append(lambda handler: send_stream(handler, message_events(text, stop, usage or {})))

    def events(self, events: list[dict[str, Any]]) -> None:
        """Answer with these events and no other."""
        self.answers.append(lambda handler: send_stream(handler, events))

    def raw(self, data: bytes) -> None:
        """Answer with these bytes as a stream, and close."""
        self.answers.append(lambda handler: send_bytes(handler, data))

    def error(self, status: int, kind: str, headers: dict[str, str] | None = None) -> None:
        """Answer with an error."""
        body = {"type": "error", "error": {"type": kind, "message": f"that is {kind}"}}
        self.answers.append(lambda handler: send_json(handler, status, body, headers or {}))

    def json(self, body: dict[str, Any]) -> None:
        """Answer with a plain JSON object."""
        self.answers.append(lambda handler: send_json(handler, 200, body, {}))


def message_events(text: str, stop: str, usage: dict[str, Any]) -> list[dict[str, Any]]:
    begun = {
        "id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": MODEL,
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 1, **usage},
    }  # fmt: skip
    half = len(text) // 2
    return [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text[:half]}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text[half:]}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]


def send_stream(handler: BaseHTTPRequestHandler, events: list[dict[str, Any]]) -> None:
    send_bytes(handler, b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events))


def send_bytes(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("request-id", "req_1")
    handler.send_header("connection", "close")
    handler.end_headers()
    handler.wfile.write(data)


def send_json(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MessagesServer]:
    import time

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    script = MessagesServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with script.lock:
                script.requests.append(json.loads(body))
                script.paths.append(self.path)
                script.times.append(time.monotonic())
                answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield script
    httpd.shutdown()
    thread.join()
    httpd.server_close()
