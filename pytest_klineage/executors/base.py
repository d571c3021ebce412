"""The interface of all executors, and a gate that judges through one. How requests travel is each executor's own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pytest_klineage.errors import HarnessError, UsageError, WaitsForVerdict
from pytest_klineage.executors.carried import carried_files
from pytest_klineage.gate.settings import DEFENCES, GateSettings, as_recorded
from pytest_klineage.records import KernelCase, KernelSource, Machine, Verdict
from pytest_klineage.records.judging import JudgeReply, JudgeRequest

LOCAL_FIELDS = ("cache_dir", "artifacts", "defences")
"""Settings of a gate that do not travel: folders are the judge's own, and every judge has all defences."""


class Executor(Protocol):
    """Somewhere kernels are judged."""

    def submit(self, request: JudgeRequest) -> None:
        """Ask for a judgement. Asking again for one that is asked for, or answered, changes nothing."""
        ...

    def lookup(self, request: JudgeRequest) -> JudgeReply | None:
        """The answer, checked against the request; None while there is none. Raises BadRecord for a foreign one."""
        ...

    def machine(self, platform: str) -> Machine:
        """The machine that judges for a platform. Raises WaitsForVerdict while that is not known."""
        ...


def plain_settings(settings: GateSettings) -> dict[str, object]:
    """The settings that travel with a request. Raises UsageError when defences are switched off."""
    if settings.defences != DEFENCES:
        raise UsageError("a judge elsewhere has all defences; they can be switched off in this process only")
    plain = msgspec.structs.asdict(settings)
    travels = {name: value for name, value in plain.items() if name not in LOCAL_FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in travels.items()}


def gate_settings(request: JudgeRequest, local: GateSettings) -> GateSettings:
    """The settings of a request with the folders of `local`, as this version takes them: see `as_recorded`.

    Raises UsageError for what the gate refuses.
    """
    known = set(GateSettings.__struct_fields__) - set(LOCAL_FIELDS)
    if unknown := sorted(set(request.settings) - known):
        raise UsageError(f"the request has settings that no judge takes: {', '.join(unknown)}")
    folders = {"cache_dir": local.cache_dir, "artifacts": local.artifacts}
    try:
        return msgspec.convert({**as_recorded(request.settings), **folders}, GateSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request's settings are not valid: {error}") from error


class ExecutorGate(AbstractContextManager["ExecutorGate"]):
    """Stands where a `Gate` stands, and has an executor judge. A verdict that is not there yet raises WaitsForVerdict.

    With `again(n)` it asks for the n-th repetition of a judgement, which has a request and a reply of its own.
    """

    def __init__(
        self, executor: Executor, platform: str, settings: GateSettings, *, repeat: int = 0, priority: int = 0,
        product: str = "",
    ) -> None:  # fmt: skip
        self.platform, self.settings = platform, settings
        self._executor, self._repeat = executor, repeat
        self._priority, self._product = priority, product
        self._plain = plain_settings(settings)

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing runs here; the executor belongs to the session."""

    def again(self, repeat: int) -> ExecutorGate:
        """The same gate for the n-th repetition of its judgements."""
        return ExecutorGate(
            self._executor, self.platform, self.settings, repeat=repeat, priority=self._priority, product=self._product
        )

    def machine(self) -> Machine:
        """The machine that judges. Raises WaitsForVerdict while no judge has said."""
        return self._executor.machine(self.platform)

    def judge(
        self,
        case: KernelCase,
        source: KernelSource,
        *,
        reference_source: KernelSource | None = None,
        platforms: tuple[str, ...] = (),
        precision: float | None = None,
        screen_against: float | None = None,
    ) -> Verdict:
        """The verdict of the executor's judge. Raises WaitsForVerdict, HarnessError after faults, UsageError."""
        narrow = precision is not None and precision < self.settings.precision
        settings = {**self._plain, "precision": precision} if narrow else self._plain
        request = JudgeRequest(
            case=case, source=source, platform=self.platform, settings=settings, reference_source=reference_source,
            platforms=platforms, repeat=self._repeat, screen_against=screen_against, priority=self._priority,
            product=self._product, files=carried_files(case),
        )  # fmt: skip
        return verdict_of(self._executor, request)


def verdict_of(executor: Executor, request: JudgeRequest) -> Verdict:
    """Ask, and take the verdict that is there. Raises WaitsForVerdict, HarnessError or UsageError."""
    executor.submit(request)
    reply = executor.lookup(request)
    if reply is None:
        where = getattr(executor, "where", "")
        message = f"{request.case.id} {request.source.label} waits for a verdict: {request.digest}"
        raise WaitsForVerdict(where, message, request.digest)
    if reply.verdict is not None:
        # Two chains may have asked for one kernel under two names.
        return msgspec.structs.replace(reply.verdict, label=request.source.label)
    fault = reply.fault
    if fault is None:
        raise HarnessError(f"the reply to {request.digest} is empty")
    message = f"{request.case.id} could not be judged ({fault.code.value}, attempt {reply.attempt}): {fault.message}"
    raise UsageError(message) if fault.is_final else HarnessError(message)
