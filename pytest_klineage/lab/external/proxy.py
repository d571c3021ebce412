"""The metering proxy: takes requests, has them reserved, sends them on, and hands replies back as they come.

Protocols are the wires' part, money the meter's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pytest_klineage.errors import KlineageError, StoreError
from pytest_klineage.lab.external.anthropic_wire import AnthropicWire
from pytest_klineage.lab.external.metering import CLIENT_TOPIC, Meter
from pytest_klineage.lab.external.openai_wire import OpenAIWire
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.external.wire import (
    Call,
    EventSplitter,
    EventTooLarge,
    ProxySettings,
    StreamReader,
    Wire,
    event_data,
    field_of,
    package,
)
from pytest_klineage.lab.llm.anthropic import failure_of
from pytest_klineage.lab.llm.faults import Failure

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

Answer: TypeAlias = Callable[["Request"], Coroutine[Any, Any, "Response"]]

LARGEST_REQUEST = 32 * 1024 * 1024
PASSED_ON = ("request-id", "x-request-id", "retry-after", "retry-after-ms", "x-should-retry")
"""Headers of a reply that clients act on."""
EVENT_STREAM = "text/event-stream"


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests of one protocol are sent. The key is the proxy's own; clients never see it."""

    base_url: str
    key: str = ""


class Proxy:
    """Serves one run. `client` is an httpx.AsyncClient; its maker closes it."""

    def __init__(
        self, meter: Meter, settings: ProxySettings, upstreams: dict[str, Upstream], client_key: str,
        client: httpx.AsyncClient,
    ) -> None:  # fmt: skip
        self.meter, self.settings, self.upstreams = meter, settings, upstreams
        self._client_key, self._client = client_key, client
        self._pumps: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Everything that clients of both protocols ask for."""
        Route = package("starlette.routing").Route
        messages, chat = self._answer(AnthropicWire()), self._answer(OpenAIWire())
        return [
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/openai/deployments/{model:path}/chat/completions", chat, methods=["POST"]),
        ]

    async def close(self) -> None:
        """End replies that have not ended, and write their calls off."""
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self.meter.close()

    def _answer(self, wire: Wire) -> Answer:
        async def _served(request: Request) -> Response:
            try:
                call = self._read(wire, request, await request.body())
                number = await self.meter.begin(call)
            except Refused as refused:
                self.meter.refuse(refused)
                return _error(wire, refused.refusal.value, refused.status, str(refused))
            except StoreError as error:
                return _error(wire, Failure.SERVER.value, 500, str(error))
            response = await _Exchange(self, wire, call, number, request).respond()
            if await request.is_disconnected():
                self.meter.note(CLIENT_TOPIC, f"call {number}: the client left before the reply")
            return response

        return _served

    def _read(self, wire: Wire, request: Request, data: bytes) -> Call:
        """The request to send on. Raises Refused."""
        key = wire.client_key(request.headers)
        if key != self._client_key:
            how = "another key than this run's" if key else "no key"
            raise Refused(
                Refusal.WRONG_KEY if key else Refusal.NO_KEY,
                f"the request has {how}: take it from ANTHROPIC_API_KEY or OPENAI_API_KEY of its environment",
            )
        if wire.name not in self.upstreams:
            raise Refused(
                Refusal.NO_UPSTREAM,
                f"no provider for the protocol {wire.name}: set {wire.name.upper()}_API_KEY where the proxy is "
                f"started, or name one with --{wire.name}-upstream",
            )
        if len(data) > LARGEST_REQUEST:
            raise Refused(Refusal.TOO_LARGE, f"a request has {LARGEST_REQUEST} bytes at most: shorten the prompt")
        try:
            body = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise Refused(Refusal.NOT_JSON, f"the body is not a JSON object: {error}") from error
        if "model" not in body and "model" in request.path_params:
            body["model"] = request.path_params["model"]
        return wire.read_request(body, self.settings)

    def keep(self, pump: asyncio.Task[None]) -> None:
        """Hold on to a reply until it has ended, with or without a listener."""
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    @property
    def client(self) -> httpx.AsyncClient:
        """What requests are sent on with."""
        return self._client


class _Exchange:
    """One call that is reserved: sent on, read, charged and handed back."""

    def __init__(self, proxy: Proxy, wire: Wire, call: Call, number: int, request: Request) -> None:
        self.proxy, self.wire, self.call, self.number, self.request = proxy, wire, call, number, request
        self.reader: StreamReader = wire.reader(call)
        self.settled = False
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._head: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    async def respond(self) -> Response:
        """The answer for the client. The provider's reply is read to its end even when the client has gone."""
        self.proxy.keep(asyncio.create_task(self._pump()))
        return await asyncio.shield(self._head)

    async def _pump(self) -> None:
        """Send the call on and read the reply. However it ends, the call is settled and the client has an answer."""
        httpx = package("httpx")
        try:
            async with asyncio.timeout(self.proxy.settings.deadline_s):
                await self._exchange()
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.LocalProtocolError, httpx.InvalidURL) as error:
            self._failed(Failure.CONNECTION, _said(error), 502, billed=False)
        except (TimeoutError, httpx.TimeoutException) as error:
            self._failed(Failure.TIMEOUT, _said(error) or "no whole reply in time", 504, billed=True)
        except (httpx.HTTPError, httpx.StreamError) as error:
            self._failed(Failure.CONNECTION, _said(error), 502, billed=True)
        except (msgspec.DecodeError, EventTooLarge, ValueError) as error:
            self._failed(
                Failure.BROKEN_STREAM, f"the provider's reply cannot be read: {_said(error)}", 502, billed=True
            )
        except KlineageError as error:
            # The trajectory cannot be written: no further call can be recorded, and this one is charged already.
            self._answered_with(Failure.SERVER.value, 500, str(error))
        finally:
            with contextlib.suppress(StoreError):
                if not (self.settled and self._head.done()):
                    self._failed(Failure.LOST, "the run ended during the call", 503, billed=True)
            self._chunks.put_nowait(None)
            await self.proxy.meter.release_waiting()

    async def _exchange(self) -> None:
        upstream = self.proxy.upstreams[self.wire.name]
        url, headers = self.wire.upstream(upstream.base_url, upstream.key, self.request.headers)
        headers |= {"content-type": "application/json", "accept-encoding": "identity"}
        async with self.proxy.client.stream("POST", url, content=self.call.body, headers=headers) as reply:
            streams = reply.headers.get("content-type", "").startswith(EVENT_STREAM)
            if reply.status_code == 200 and streams:
                await self._stream(reply)
            else:
                await self._whole(reply)

    async def _whole(self, reply: httpx.Response) -> None:
        """A reply, or an error, that comes as one."""
        body = await reply.aread()
        if reply.status_code == 200:
            received = self.wire.read_reply(body)
            if not received.complete:
                self._failed(Failure.BROKEN_STREAM, "the reply is not one of this protocol", 502, billed=True)
                return
            self.settled = True
            self.proxy.meter.answer(self.number, received)
        else:
            self.settled = True
            self.proxy.meter.fail(self.number, *_upstream_failure(reply.status_code, body), billed=False)
        Response = package("starlette.responses").Response
        self._head.set_result(Response(body, status_code=reply.status_code, headers=_headers(reply)))

    async def _stream(self, reply: httpx.Response) -> None:
        """A reply in events. The last event is handed on when the call is charged."""
        StreamingResponse = package("starlette.responses").StreamingResponse
        self._head.set_result(StreamingResponse(self._handed_on(), headers=_headers(reply)))
        splitter = EventSplitter()
        async for data in reply.aiter_bytes():
            wanted = b"".join(event for event in splitter.feed(data) if self._take(event))
            if wanted:
                self._chunks.put_nowait(wanted)
        if splitter.rest:
            self._chunks.put_nowait(splitter.rest)
        if not self.settled:
            failure, message = self.reader.received.fault or (
                Failure.BROKEN_STREAM,
                "the stream ended before the reply",
            )
            self._failed(failure, message, 502, billed=True)

    def _take(self, event: bytes) -> bool:
        """Read one event; whether the client gets it."""
        said = event_data(event)
        wanted = self.reader.read(said) if said else True
        if self.reader.received.complete and not self.settled:
            self.settled = True
            self.proxy.meter.answer(self.number, self.reader.received)
        return wanted

    async def _handed_on(self) -> AsyncIterator[bytes]:
        """Events for the client, until the reply ends or the client has gone."""
        ended = False
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            ended = True
        finally:
            if not ended:
                self.proxy.meter.note(CLIENT_TOPIC, f"call {self.number}: the client left before the reply's end")

    def _failed(self, failure: Failure, message: str, status: int, *, billed: bool) -> None:
        """Settle a call that brought no whole reply, and inform the client where that is still possible."""
        if not self.settled:
            self.settled = True
            self.proxy.meter.fail(self.number, failure, message, billed=billed)
        self._answered_with(failure.value, status, message)

    def _answered_with(self, kind: str, status: int, message: str) -> None:
        self.settled = True
        if not self._head.done():
            self._head.set_result(_error(self.wire, kind, status, message))


def _upstream_failure(status: int, body: bytes) -> tuple[Failure, str]:
    """Name and text of a provider's error."""
    try:
        error = field_of(msgspec.json.decode(body), "error")
    except msgspec.DecodeError:
        error = None
    kind, said = field_of(error, "type"), field_of(error, "message")
    return failure_of(kind, status), f"{status}: {said or body[:200].decode(errors='replace')}"


def _headers(reply: httpx.Response) -> dict[str, str]:
    kept = {name: reply.headers[name] for name in PASSED_ON if name in reply.headers}
    return {"content-type": reply.headers.get("content-type", "application/json"), **kept}


def _error(wire: Wire, kind: str, status: int, message: str) -> Response:
    JSONResponse = package("starlette.responses").JSONResponse
    response: Response = JSONResponse(wire.error(kind, status, message), status_code=status)
    return response


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
