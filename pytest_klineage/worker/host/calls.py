"""The call loop of a worker: map arenas, run the kernel on a slot, time it, materialise what it returned."""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from pytest_klineage.channel import Channel, ChannelClosed
from pytest_klineage.records import Code, Slot
from pytest_klineage.records.messages import (
    Again,
    KernelFailed,
    Map,
    Mapped,
    OutputsReady,
    Returned,
    ReturnedTensor,
    StopWorker,
    ToWorker,
)
from pytest_klineage.surfaces.base import Invoke, LoadedKernel, MappedMemory, Memory, SurfaceFailure
from pytest_klineage.worker.failures import describe
from pytest_klineage.worker.host.callers_settings import CallersSettings
from pytest_klineage.worker.host.digest import output_digest
from pytest_klineage.worker.host.read_only import forbid_reading, keep_for_reading

REFUSED_SHOWN = 8
"""Refused operators that an answer names."""


REFUSAL = "pytest_klineage.worker.sandbox.refusal"


class Mapping:
    """One mapped arena with a bound call per slot."""

    def __init__(self, message: Map, fds: list[int], kernel: LoadedKernel) -> None:
        self.memory = Memory(mmap.mmap(fds[0], message.arena.num_bytes))
        if message.read_only:
            keep_for_reading(self.memory.address, fds[1], message.read_only, message.unreadable)
        else:
            forbid_reading(self.memory.address, message.unreadable)
        for fd in fds:
            os.close(fd)
        self.slots = message.arena.slots
        self._view = memoryview(self.memory.buffer)
        self.calls: list[Invoke] = [kernel.bind(self.memory, slot, message.arena.scalars) for slot in self.slots]

    def output_digest(self, slot: Slot, nonce: int) -> str:
        """What an answer says about the outputs as they are now."""
        return output_digest(self._view, slot, nonce)


class CallLoop:
    """Serves Map and Run requests of the oracle."""

    def __init__(
        self, channel: Channel, kernel: LoadedKernel, after_first: Callable[[], None] | None = None,
        settings: CallersSettings | None = None,
    ) -> None:  # fmt: skip
        self.channel, self.kernel, self._after_first = channel, kernel, after_first
        self.arenas: list[Any] = []
        """Mappings; a GPU's loop has its own kind."""
        self.results: deque[Any] = deque()
        """What earlier calls returned, the oldest first, kept alive so that a buffer that is used again is seen."""
        self._materialise = materialise_if_needed()
        self._settings = settings or CallersSettings()

    def serve(self) -> None:
        """Answer until asked to stop or until the oracle is gone."""
        while True:
            try:
                request: ToWorker = self.channel.receive(ToWorker, timeout_s=None)
            except ChannelClosed:
                return
            if isinstance(request, StopWorker):
                return
            if isinstance(request, Map):
                self.map(request)
            elif isinstance(request, Again):
                self.again(request)
            else:
                self.run(request)

    def map(self, request: Map) -> None:
        """Map an arena and bind a call to each of its slots."""
        fds = [self.channel.take_fd() for _ in range(2 if request.read_only else 1)]
        mapping = Mapping(request, fds, self.kernel)
        self.arenas.append(mapping)
        self.channel.send(Mapped(address=mapping.memory.address))

    def again(self, request: Again) -> None:
        """Copy what an earlier call returned once more."""
        mapping = self.arenas[request.arena]
        self.finish(request.nonce, mapping.memory, mapping.slots[request.slot], self.results[-1 - request.back])

    def run(self, request: Any, clock: Any = perf_counter_ns) -> None:
        """Call the kernel once. The clock is bound before any candidate could replace it."""
        mapping = self.arenas[request.arena]
        invoke, memory, slot = mapping.calls[request.slot], mapping.memory, mapping.slots[request.slot]
        at_once, materialise = self.kernel.copied_under_the_clock, self._materialise
        tensors: tuple[ReturnedTensor, ...] = ()
        for place in request.forget:
            del self.results[place]
        try:
            # A reference may convert its inputs, untimed; a candidate's call has nothing of the kind.
            if before := getattr(invoke, "before", None):
                before()
            start = clock()
            result = invoke()
            if result is not None and at_once:
                tensors = materialise(result, memory, slot)
            stop = clock()
        except SurfaceFailure as failure:
            self.channel.send(KernelFailed(nonce=request.nonce, code=failure.code, message=failure.message))
            return
        except MemoryError:
            self.channel.send(KernelFailed(nonce=request.nonce, code=Code.OUT_OF_MEMORY, message="out of memory"))
            return
        except BaseException as error:  # process boundary: whatever a candidate raises becomes an answer
            self.channel.send(KernelFailed(nonce=request.nonce, code=Code.EXCEPTION, message=describe(error)))
            return
        digest = mapping.output_digest(slot, request.nonce)
        done = at_once or result is None
        self.channel.send(
            Returned(
                nonce=request.nonce, elapsed_ns=stop - start, tensors=tensors if done else None,
                refused=self.refused(), digest=digest, changed_settings=self._settings.changed(),
            )
        )  # fmt: skip
        self.results.append(result)
        if not done:
            self.finish(request.nonce, memory, slot, result)
        if self._after_first is not None:
            self._after_first()
            self._after_first = None

    def finish(self, nonce: int, memory: MappedMemory, slot: Slot, result: Any) -> None:
        """Copy returned tensors into the arena, strictly, and report where they lay."""
        tensors: tuple[ReturnedTensor, ...] = ()
        if result is not None:
            try:
                tensors = self._materialise(result, memory, slot)
            except SurfaceFailure as failure:
                self.channel.send(KernelFailed(nonce=nonce, code=failure.code, message=failure.message))
                return
            except BaseException as error:  # process boundary: a candidate may have replaced what copies
                self.channel.send(KernelFailed(nonce=nonce, code=Code.EXCEPTION, message=describe(error)))
                return
        self.channel.send(OutputsReady(nonce=nonce, tensors=tensors))

    @staticmethod
    def refused() -> tuple[str, ...]:
        """Some of the operators that the framework has refused in this process."""
        module = sys.modules.get(REFUSAL)
        return tuple(sorted(module.REFUSED)[:REFUSED_SHOWN]) if module is not None and module.REFUSED else ()


def materialise_if_needed() -> Any:
    """The function that copies returned tensors, where there is a framework to return them.

    Import this process's part of it before any candidate.
    """
    if "torch" not in sys.modules:
        return None
    from pytest_klineage.worker.host.materialise import materialise

    return materialise
