"""One run of an outside optimizer: proxy, evaluation server and process together, until it ends or must."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.errors import HarnessError, KlineageError, StoreError, UsageError
from pytest_klineage.lab.external.evaluating import EvaluationTarget, Evaluator, SubmissionStep
from pytest_klineage.lab.external.metering import Meter
from pytest_klineage.lab.external.processes import Optimizer
from pytest_klineage.lab.external.proxy import Proxy, Upstream
from pytest_klineage.lab.external.server import EvaluationRoutes, LoopbackServer, application
from pytest_klineage.lab.external.wire import ProxySettings, package
from pytest_klineage.lab.llm.prices import Budget, Prices
from pytest_klineage.lab.llm.trajectory import Trajectory
from pytest_klineage.lab.optimizers.session import Judge
from pytest_klineage.records import Begun, KernelSource, Noted, Status, Stopped, Verdict

STAND_IN = Path(__file__).with_name("stand_in")
"""Folder of a package named flashinfer_bench that asks the evaluation server."""
PROCESSES_TOPIC = "processes"
SECRETS = ("_API_KEY", "_AUTH_TOKEN", "_SECRET", "_ACCESS_KEY", "_ACCESS_TOKEN")
"""Ends of names of variables that an optimizer does not get: it has no use for the proxy's keys."""
POLL_S = 0.05


class ExternalEndReason(StrEnum):
    """Why a run ended; the words that our own methods have too mean the same. Its processes are then ended."""

    FINISHED = "finished"
    """The optimizer ended by itself, with status 0."""
    STEP_LIMIT = "step_limit"
    """`--max-steps`; `--grace` seconds after the first refusal."""
    BUDGET = "budget_exhausted"
    """`--budget`; `--grace` seconds after the first refusal."""
    NOT_JUDGED = "not_judged"
    """The gate cannot judge the case here."""
    DEADLINE = "deadline"
    """`--deadline`."""
    SILENT = "silent"
    """It asked no model and submitted nothing for `--silence` seconds."""
    NOTHING_SUBMITTED = "nothing_submitted"
    """It ended with status 0 before it submitted a kernel."""
    OPTIMIZER_FAILED = "optimizer_failed"
    """It ended with another status, or by a signal."""
    INTERRUPTED = "interrupted"
    HARNESS = "harness_failed"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a run is ended."""

    budget_usd: float
    deadline_s: float = 6 * 3600.0
    silence_s: float = 1800.0
    """Without a call, a reply or a submission, while nothing is under way."""
    grace_s: float = 30.0
    """From the first refusal for want of money or steps until the optimizer is ended."""
    max_steps: int = 1000


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made of."""

    name: str
    method: str
    """What tables call the optimizer."""
    target: EvaluationTarget
    proxy: ProxySettings
    upstreams: dict[str, Upstream]
    limits: Limits
    port: int = 0
    stand_in: bool = False
    ordinary_wrappers: bool = False
    settings: dict[str, str] = {}
    """For the trajectory's first line, beside those that every run has."""


class ExternalResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    best: KernelSource | None
    best_verdict: Verdict | None
    steps: tuple[SubmissionStep, ...]
    stopped: str
    """A word of `ExternalEndReason`."""
    message: str
    spent_usd: float

    @property
    def best_speedup(self) -> float | None:
        """Of the best kernel; None when none was scored."""
        timing = self.best_verdict.timing if self.best_verdict is not None else None
        return timing.speedup.estimate if timing is not None else None


class ExternalRun:
    """Proxy and evaluation server of one run, with its trajectory. A context manager; `url` is valid inside."""

    def __init__(
        self, setup: Setup, judge: Judge, prices: Prices, path: Path, *,
        on_step: Callable[[SubmissionStep], None] | None = None, finish: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Raises NoPrice, and UsageError when the trajectory exists or the port is taken."""
        prices.of(setup.proxy.model)
        self.setup, self.path = setup, path
        self.key = f"klineage-{secrets.token_hex(16)}"
        self.budget = Budget(setup.limits.budget_usd)
        self._server = LoopbackServer(self._application, setup.port)
        try:
            self.trajectory = Trajectory.create(path, _begun(setup))
        except BaseException:
            self._server.close()
            raise
        self.evaluator = Evaluator(
            setup.target, judge, self.trajectory, max_steps=setup.limits.max_steps,
            ordinary_wrappers=setup.ordinary_wrappers, on_step=on_step, finish=finish,
        )  # fmt: skip
        self._prices = prices
        self.meter: Meter | None = None

    @property
    def url(self) -> str:
        """Where everything is served."""
        return self._server.url

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables for the optimizer: ours instead of any provider's address and key."""
        kept = {name: value for name, value in inherited.items() if not name.endswith(SECRETS)}
        own = {
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key,
            "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": self.key,
            "AZURE_OPENAI_ENDPOINT": self.url, "AZURE_OPENAI_API_KEY": self.key, "AZURE_API_KEY": self.key,
            "KLINEAGE_URL": self.url, "KLINEAGE_MODEL": self.setup.proxy.model,
        }  # fmt: skip
        for name in ("NO_PROXY", "no_proxy"):
            own[name] = ",".join(part for part in (kept.get(name, ""), "127.0.0.1") if part)
        if self.setup.stand_in:
            own["PYTHONPATH"] = os.pathsep.join(part for part in (str(STAND_IN), kept.get("PYTHONPATH", "")) if part)
        return {**kept, **own}

    def __enter__(self) -> ExternalRun:
        try:
            self._server.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("the optimizer has ended")
        self.trajectory.close()

    def stop(self, why: str) -> None:
        """Take no more requests. A kernel that is being judged still counts; calls under way are written off."""
        self.evaluator.close(why)
        self._server.close()

    @contextlib.asynccontextmanager
    async def _application(self) -> AsyncIterator[Any]:
        httpx = package("httpx")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(self.setup.proxy.deadline_s, connect=30.0)
        async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
            self.meter = Meter(self.trajectory, self.budget, self._prices, self.setup.proxy.model)
            proxy = Proxy(self.meter, self.setup.proxy, self.setup.upstreams, self.key, client)
            routes = [*proxy.routes(), *EvaluationRoutes(self.evaluator, self.budget).routes()]
            try:
                yield application(routes)
            finally:
                await proxy.close()


def run_optimizer(run: ExternalRun, command: Sequence[str], *, folder: Path, log: Path) -> ExternalResult:
    """Start the optimizer and see it to its end. `run` has been entered.

    Raises UsageError when the command cannot be started, HarnessError when our own machinery failed; whatever happens,
    none of its processes is left, and what was recorded stays readable.
    """
    stop, message = ExternalEndReason.HARNESS, "ended by an error"
    try:
        stop, message = _root(run) or _watched(run, command, folder, log)
    except KeyboardInterrupt:
        stop, message = ExternalEndReason.INTERRUPTED, "from the keyboard"
        raise
    except KlineageError as error:
        message = str(error).partition("\n")[0]
        raise
    finally:
        run.stop(message)
        # The meter has written that one down itself, when the first call was refused.
        if stop is not ExternalEndReason.BUDGET:
            with contextlib.suppress(StoreError):
                run.trajectory.append(Stopped(reason=stop.value, message=message))
    evaluator = run.evaluator
    return ExternalResult(
        best=evaluator.best, best_verdict=evaluator.best_verdict, steps=tuple(evaluator.steps), stopped=stop.value,
        message=message, spent_usd=run.budget.spent_usd,
    )  # fmt: skip


def _root(run: ExternalRun) -> tuple[ExternalEndReason, str] | None:
    """Judge the root; why nothing more can be judged, or None."""
    root = run.evaluator.submit_root()
    if root is not None and root.verdict.status is Status.SKIPPED:
        return ExternalEndReason.NOT_JUDGED, root.verdict.reasons[0].message
    return None


def _watched(run: ExternalRun, command: Sequence[str], folder: Path, log: Path) -> tuple[ExternalEndReason, str]:
    """Run the optimizer until it ends or must end. Returns why."""
    optimizer = Optimizer(command, run.environment(os.environ), secrets.token_hex(8), log, folder)
    watch = _Watch(run, optimizer)
    try:
        while (ended := watch.ended()) is None:
            time.sleep(POLL_S)
    finally:
        left = optimizer.end()
        if left:
            text = f"{left} of the optimizer's processes ran on besides the command, and were ended"
            run.trajectory.append(Noted(topic=PROCESSES_TOPIC, text=text))
    failure = run.evaluator.failure
    if isinstance(failure, HarnessError | UsageError):
        raise failure
    return ended


class _Watch:
    """Looks at one optimizer and its limits."""

    def __init__(self, run: ExternalRun, optimizer: Optimizer) -> None:
        self._run, self._optimizer = run, optimizer
        self._started = time.monotonic()
        self._full_at: float | None = None

    def ended(self) -> tuple[ExternalEndReason, str] | None:
        """Why the run is over; None while it goes on."""
        status = self._optimizer.poll()
        now, limits = time.monotonic(), self._run.setup.limits
        return (
            self._broken()
            or self._spent(now, limits, ended=status is not None)
            or (None if status is None else self._by_itself(status))
            or self._late(now, limits)
        )

    def _broken(self) -> tuple[ExternalEndReason, str] | None:
        evaluator = self._run.evaluator
        if evaluator.failure is not None:
            return ExternalEndReason.HARNESS, str(evaluator.failure).partition("\n")[0]
        last = evaluator.steps[-1] if evaluator.steps else None
        if last is not None and last.verdict.status is Status.SKIPPED:
            return ExternalEndReason.NOT_JUDGED, last.verdict.reasons[0].message
        return None

    def _spent(self, now: float, limits: Limits, *, ended: bool) -> tuple[ExternalEndReason, str] | None:
        """Out of money or steps: it may put its things in order for a while, and what is under way is waited for."""
        meter, evaluator = self._run.meter, self._run.evaluator
        if not evaluator.steps_left and self._full_at is None:
            self._full_at = now
        exhausted = meter.exhausted_at if meter is not None else None
        for at, stop, text in (
            (exhausted, ExternalEndReason.BUDGET, f"${limits.budget_usd:g}"),
            (self._full_at, ExternalEndReason.STEP_LIMIT, f"{limits.max_steps} steps"),
        ):
            if at is not None and (ended or now - at > limits.grace_s):
                return stop, text
        return None

    def _by_itself(self, status: int) -> tuple[ExternalEndReason, str]:
        evaluator = self._run.evaluator
        if status:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            return ExternalEndReason.OPTIMIZER_FAILED, f"it ended {how}; its log has the rest"
        if not any(step.number for step in evaluator.steps) and not evaluator.malformed:
            return (
                ExternalEndReason.NOTHING_SUBMITTED,
                "it ended with status 0 and submitted no kernel; look into its log",
            )
        return ExternalEndReason.FINISHED, "it ended by itself"

    def _late(self, now: float, limits: Limits) -> tuple[ExternalEndReason, str] | None:
        if now - self._started > limits.deadline_s:
            return ExternalEndReason.DEADLINE, f"it ran for {limits.deadline_s:g} s"
        meter, evaluator = self._run.meter, self._run.evaluator
        seen = max(self._started, evaluator.last_seen, meter.last_seen if meter is not None else 0.0)
        busy = evaluator.busy or (meter is not None and meter.calls_under_way)
        if not busy and now - seen > limits.silence_s:
            return ExternalEndReason.SILENT, f"it asked and submitted nothing for {limits.silence_s:g} s"
        return None


def _begun(setup: Setup) -> Begun:
    """The first line, as our own methods write it."""
    target, limits = setup.target, setup.limits
    settings = {
        "method": setup.method, "case": target.case.id, "platform": target.platform,
        "surface": target.surface.value, "reference": target.case.reference, "max_steps": str(limits.max_steps),
        "rewrites": ", ".join(sorted(setup.proxy.rewrites)), "ordinary_wrappers": str(setup.ordinary_wrappers),
        "deadline_s": f"{limits.deadline_s:g}", **setup.settings,
    }  # fmt: skip
    return Begun(
        name=setup.name,
        backend="proxy",
        model=setup.proxy.model,
        budget_usd=limits.budget_usd,
        settings={name: value for name, value in settings.items() if value},
    )
