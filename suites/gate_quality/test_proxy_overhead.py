"""What the metering proxy adds to a call: the same calls with and without it, in turns, on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.lab.external.proxy import Upstream
from pytest_klineage.lab.external.runner import ExternalRun, Limits, Setup, run_optimizer
from pytest_klineage.lab.external.wire import ProxySettings
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.operators import make_case
from pytest_klineage.records import Surface

CALLS, WARM_UP, LIMIT_MS = 200, 20, 10.0
ALL_CALLS = CALLS + WARM_UP
PROMPT_BYTES, REPLY_BYTES, PIECES = 40_000, 12_000, 300
MODEL = "unbilled"
KINDS = {
    "Messages": ("/v1/messages", False), "Messages, streamed": ("/v1/messages", True),
    "chat completions": ("/v1/chat/completions", False), "chat completions, streamed": ("/v1/chat/completions", True),
}  # fmt: skip


class ProxyOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: milliseconds from the request to the reply's end, call by call."""

    kind: str
    direct_ms: tuple[float, ...]
    proxied_ms: tuple[float, ...]

    @property
    def added_ms(self) -> list[float]:
        """Pairwise differences, sorted."""
        return sorted(b - a for a, b in zip(self.direct_ms, self.proxied_ms, strict=True))


class Provider(BaseHTTPRequestHandler):
    """Answers at once, in both protocols."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = self.path.endswith("/messages")
        if body.get("stream"):
            data, kind = b"".join(events(messages)), "text/event-stream"
        else:
            data, kind = json.dumps(whole(messages)).encode(), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a log would be timed as well."""


def whole(messages: bool) -> dict[str, Any]:
    text = "x" * REPLY_BYTES
    if messages:
        return {"type": "message", "model": MODEL, "stop_reason": "end_turn",
                "content": [{"type": "text", "text": text}],
                "usage": {"input_tokens": 9000, "output_tokens": 3000}}  # fmt: skip
    return {"model": MODEL, "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": text}}],
            "usage": {"prompt_tokens": 9000, "completion_tokens": 3000}}  # fmt: skip


def events(messages: bool) -> Iterator[bytes]:
    piece = "x" * (REPLY_BYTES // PIECES)
    if messages:
        said: list[Any] = [{"type": "message_start", "message": {"model": MODEL, "usage": {"output_tokens": 1}}}]
        said += [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}}] * PIECES
        said += [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3000}},
                 {"type": "message_stop"}]  # fmt: skip
    else:
        said = [{"model": MODEL, "choices": [{"index": 0, "delta": {"content": piece}}]}] * PIECES
        said += [{"model": MODEL, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                 {"choices": [], "usage": {"prompt_tokens": 9000, "completion_tokens": 3000}}, "[DONE]"]  # fmt: skip
    for one in said:
        yield f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n".encode()


@contextlib.contextmanager
def provider() -> Iterator[str]:
    """The address of a provider in a process of its own."""
    with subprocess.Popen([sys.executable, __file__, "provider"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}" if process.stdout else ""
        finally:
            process.terminate()


def serve() -> None:
    """The provider's process: says its port, and answers until it is ended."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as httpd:
        sys.stdout.write(f"{httpd.server_address[1]}\n")
        sys.stdout.flush()
        httpd.serve_forever()


def measure(direct: str, output: Path) -> None:
    """The client's process, in an optimizer's place: calls of every kind in turns, with the proxy and without it."""
    import httpx

    proxy, key = os.environ["KLINEAGE_URL"], os.environ["ANTHROPIC_API_KEY"]
    found = []
    with httpx.Client(timeout=30) as client:
        for kind in KINDS:
            pairs = [(called(client, direct, key, kind), called(client, proxy, key, kind)) for _ in range(ALL_CALLS)]
            without, through = zip(*pairs[WARM_UP:], strict=True)
            found.append(ProxyOverhead(kind=kind, direct_ms=without, proxied_ms=through))
    output.write_bytes(msgspec.json.encode(found))


def proxied(url: str, folder: Path) -> ExternalRun:
    """A run whose only use is its proxy."""
    setup = Setup(
        name="overhead",
        method="overhead",
        proxy=ProxySettings(model=MODEL),
        limits=Limits(budget_usd=1.0),
        target=EvaluationTarget(
            case=make_case("gemm", (4, 4, 4), "fp32", "torch"), platform="cpu", surface=Surface.CPP
        ),
        upstreams={"anthropic": Upstream(base_url=url), "openai": Upstream(base_url=f"{url}/v1")},
    )

    def judge(case: Any, source: Any) -> Any:
        raise NotImplementedError("nothing is judged here")

    return ExternalRun(setup, judge, Prices.load(), folder / "overhead.jsonl")


def called(client: Any, url: str, key: str, kind: str) -> float:
    """Milliseconds of one call."""
    path, streams = KINDS[kind]
    body = {"model": MODEL, "max_tokens": 4000, "stream": streams, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "x" * PROMPT_BYTES}]}  # fmt: skip
    if path == "/v1/messages":
        del body["stream_options"]
    started = time.perf_counter()
    reply = client.post(f"{url}{path}", json=body, headers={"x-api-key": key, "authorization": f"Bearer {key}"})
    taken = 1e3 * (time.perf_counter() - started)
    assert reply.status_code == 200, reply.text
    return taken


def test_proxy_overhead(
    tmp_path: Path, publish: Callable[[str, str, list[ProxyOverhead]], None], measured_here: str
) -> None:
    """The proxy adds at most 10 ms to a call."""
    pytest.importorskip("httpx", reason="needs the extra external")
    output = tmp_path / "measured.json"
    with provider() as url, proxied(url, tmp_path) as run:
        client = [sys.executable, __file__, "client", url, str(output)]
        run_optimizer(run, client, folder=tmp_path, log=tmp_path / "client.log")
    assert output.exists(), (tmp_path / "client.log").read_text()
    found = msgspec.json.decode(output.read_bytes(), type=list[ProxyOverhead])
    lines = [
        "# What the metering proxy adds to a call\n",
        f"{measured_here}. {CALLS} pairs of calls of each kind, one after the other; client, proxy and provider are "
        f"processes of one machine, and the provider answers at once. A prompt of {PROMPT_BYTES} bytes, a reply of "
        f"{REPLY_BYTES}, streamed in {PIECES} pieces; two synced lines of the trajectory are in it. At most "
        f"{LIMIT_MS:.0f} ms are allowed.\n",
        "| call | direct, median | through the proxy, median | added, median | added, 95 % of calls |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.kind} | {statistics.median(one.direct_ms):.2f} ms | {statistics.median(one.proxied_ms):.2f} ms "
        f"| {statistics.median(one.added_ms):.2f} ms | {one.added_ms[int(0.95 * CALLS)]:.2f} ms |"
        for one in found
    ]
    publish("proxy_overhead", "\n".join(lines) + "\n\nRaw figures: `proxy_overhead.jsonl`.", found)
    assert all(one.added_ms[int(0.95 * CALLS)] <= LIMIT_MS for one in found)


if __name__ == "__main__":
    if sys.argv[1] == "provider":
        serve()
    else:
        measure(sys.argv[2], Path(sys.argv[3]))
