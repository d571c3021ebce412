"""The evaluation server's routes, and serving an application on loopback from a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import msgspec

from pytest_klineage.errors import HarnessError, KlineageError, UsageError
from pytest_klineage.lab.external import adaexplore, contracts
from pytest_klineage.lab.external.evaluating import Evaluator, SubmissionStep
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.external.wire import package
from pytest_klineage.lab.llm.prices import Budget
from pytest_klineage.records import KernelSource

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

LOOPBACK = "127.0.0.1"
START_S, STOP_S = 20.0, 10.0


class EvaluationRoutes:
    """POST /v1/judge, GET /v1/task, POST /evaluate (AdaExplore's) and GET /health."""

    def __init__(self, evaluator: Evaluator, budget: Budget) -> None:
        self._evaluator, self._budget = evaluator, budget

    def routes(self) -> list[Route]:
        """For an application."""
        Route = package("starlette.routing").Route
        return [
            Route("/v1/judge", self.judge, methods=["POST"]),
            Route("/v1/task", self.task, methods=["GET"]),
            Route("/evaluate", self.evaluate, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]

    async def judge(self, request: Request) -> Response:
        """The plain contract."""
        try:
            self._evaluator.check_open()
            try:
                given = contracts.submission(await request.body())
                source = contracts.source_of(given, self._evaluator.target)
            except Refused as refused:
                self._evaluator.reject(refused)
                raise
            step = await self._judged(source, f"{given.note[:80]} (through /v1/judge)".lstrip())
        except Refused as refused:
            return _json(contracts.refusal_reply(refused), refused.status)
        except KlineageError as error:
            return _json({"error": {"code": "harness_failed", "message": str(error)}}, 500)
        return _json(contracts.step_reply(step, self._evaluator, self._budget))

    async def task(self, request: Request) -> Response:
        """What is to be optimized, and how far the run is."""
        return _json(contracts.task_reply(self._evaluator.target, self._evaluator, self._budget))

    async def evaluate(self, request: Request) -> Response:
        """AdaExplore's contract: 200 whatever the kernel is, and an error only where the run is over."""
        try:
            self._evaluator.check_open()
            try:
                source = adaexplore.source_of(adaexplore.asked(await request.body()), self._evaluator.target)
            except Refused as refused:
                self._evaluator.reject(refused)
                return _json(adaexplore.failed(refused))
            step = await self._judged(source, "through /evaluate")
        except Refused as refused:
            return _json(contracts.refusal_reply(refused), refused.status)
        except KlineageError as error:
            return _json({"error": {"code": "harness_failed", "message": str(error)}}, 500)
        return _json(adaexplore.reply(step))

    async def health(self, request: Request) -> Response:
        """Whether submissions are taken."""
        try:
            self._evaluator.check_open()
        except Refused as refused:
            return _json(contracts.refusal_reply(refused))
        return _json({"status": "ok"})

    async def _judged(self, source: KernelSource, how: str) -> SubmissionStep:
        """Judge in the evaluator's thread; the loop goes on meanwhile. Raises KlineageError."""
        return await asyncio.to_thread(self._evaluator.submit, source, how)


async def not_found(request: Request, error: Exception) -> Response:
    """The answer to any other address."""
    message = (
        f"{request.method} {request.url.path} is nothing here; there are POST /v1/messages, /v1/chat/completions, "
        "/v1/judge and /evaluate, GET /v1/task and /health"
    )
    return _json({"error": {"code": Refusal.NOT_FOUND.value, "message": message}}, getattr(error, "status_code", 404))


def application(routes: list[Route]) -> Any:
    """An ASGI application with these routes."""
    make = package("starlette.applications").Starlette
    return make(routes=routes, exception_handlers={404: not_found, 405: not_found})


class LoopbackServer:
    """Serves an application on 127.0.0.1 from a thread with an event loop of its own, until `close`.

    `make` is called in that thread and returns an asynchronous context manager around the application.
    """

    def __init__(self, make: Callable[[], Any], port: int = 0) -> None:
        self._make = make
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        self._server: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="klineage-server", daemon=True)

    @property
    def url(self) -> str:
        """Where it is served."""
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> Self:
        """Begin to serve. Raises HarnessError when it does not come up."""
        self._thread.start()
        limit = time.monotonic() + START_S
        while not (self._server is not None and self._server.started):
            if self._error is not None or not self._thread.is_alive() or time.monotonic() > limit:
                raise HarnessError(f"the server on {self.url} did not start: {self._error or 'no answer'}")
            time.sleep(0.005)
        return self

    def close(self) -> None:
        """Stop serving. Requests under way are cut off after a moment."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._socket.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        # A thread's end: `start` raises the error.
        except BaseException as error:
            self._error = error

    async def _main(self) -> None:
        uvicorn = package("uvicorn")
        async with self._make() as app:
            config = uvicorn.Config(
                app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none", http="h11",
                timeout_graceful_shutdown=1, timeout_keep_alive=60,
            )  # fmt: skip
            self._server = uvicorn.Server(config)
            await self._server.serve(sockets=[self._socket])


def _bound(port: int) -> socket.socket:
    # With its protocol named, asyncio sends small packets at once; else replies wait 40 ms for an acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise UsageError(f"port {port} cannot be used: {error.strerror or error}; choose another, or none") from error
    return listening


def _json(body: Any, status: int = 200) -> Response:
    make = package("starlette.responses").Response
    response: Response = make(msgspec.json.encode(body), status_code=status, media_type="application/json")
    return response
