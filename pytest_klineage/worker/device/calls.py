"""The call loop of a worker on a GPU: blocks of calls queued without waiting, timed by events, replayed as graphs.

Three moments of every call are taken on the device: its start, the end of what it queued on its stream, and the moment
when nothing was left to do in the context. Work on another stream lies between the second and the third; the
next call's flush waits for the third, so nothing hides behind it.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pytest_klineage.channel import Channel
from pytest_klineage.errors import DeviceOutOfMemory
from pytest_klineage.records import Code, Slot
from pytest_klineage.records.messages import (
    Again,
    BlockReturned,
    EventsMade,
    Finished,
    KernelFailed,
    MakeEvents,
    Map,
    Mapped,
    OutputsReady,
    ReturnedTensor,
    RunBlock,
)
from pytest_klineage.surfaces.base import Invoke, LoadedKernel, SurfaceFailure
from pytest_klineage.surfaces.python import tensor_view
from pytest_klineage.worker.device import memory as device
from pytest_klineage.worker.device.trace import Executed, summary
from pytest_klineage.worker.failures import describe
from pytest_klineage.worker.host.calls import CallLoop

HEAD_START_CYCLES, HEAD_START_MOST = 250_000, 1_000_000
"""The device spins for so many of its cycles per call (0.15 ms) before a block begins: by then the calls are queued,
and no call's time is that of the host's launching it. Where queueing took longer last time, it spins longer, up to the
second figure."""
LAUNCH_NS = 100_000
"""Of a call's own queueing, what counts for the next head start: a kernel must not lengthen its own."""
CYCLES_PER_NS = 2
"""Of the device's clock, at most; with half as much again for a host that is slower next time."""
HEAD_START_CALLS = 40
"""Longer blocks get the head start of so many calls."""
GRAPH_REPLAYS = 5


_tensor: Any = torch._C.TensorBase
XOR: Callable[..., Any] = _tensor.bitwise_xor_
COPY: Callable[..., Any] = _tensor.copy_
EMPTY_LIKE: Callable[..., Any] = torch.empty_like
"""Taken before any candidate is imported."""


class Moments(NamedTuple):
    """The events of one call."""

    start: Any
    stop: Any
    everything: Any
    settled: Any


class DeviceClock:
    """Events on one stream. Made before any candidate is imported; it binds the driver's functions for good."""

    def __init__(self, flush_bytes: int) -> None:
        from cuda.bindings import driver

        # torch.profiler would import half of torch when it starts, after the files were put out of reach.
        from torch.autograd.profiler import profile

        self.profile: Any = profile
        self.torch_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch has no types here
        torch.cuda.set_stream(self.torch_stream)
        self.stream = self.torch_stream.cuda_stream
        self.context = device.call(driver.cuCtxGetCurrent)
        self._flush = torch.empty(max(1, flush_bytes), dtype=torch.uint8, device="cuda")
        self._flush_address, self._flush_room = self._flush.data_ptr(), flush_bytes
        self._events: list[Moments] = []
        self._head_start_cycles = HEAD_START_CYCLES
        self._now, self._in_calls_ns = time.perf_counter_ns, 0
        self.begin = device.call(driver.cuEventCreate, 0)
        self.ready = device.call(driver.cuEventCreate, 0)
        """A block's beginning, before the head start, and the head start's end."""
        self._new_event, self._record, self._wait = driver.cuEventCreate, driver.cuEventRecord, driver.cuStreamWaitEvent
        self._record_all = driver.cuCtxRecordEvent
        self._memset, self._elapsed = driver.cuMemsetD8Async, driver.cuEventElapsedTime
        self._synchronize_stream, self._synchronize = driver.cuStreamSynchronize, driver.cuCtxSynchronize
        self._limit, self._persisting = driver.cuCtxSetLimit, driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        self._reset_persisting = driver.cuCtxResetPersistingL2Cache
        self._success = driver.CUresult.CUDA_SUCCESS
        self._spin: Any = torch.cuda._sleep
        stream = self.torch_stream
        # A call may leave another stream current; the spin and the unmasking must not follow it there.
        self.use_stream: Any = functools.partial(
            torch._C._cuda_setStream, stream_id=stream.stream_id, device_index=stream.device_index,
            device_type=stream.device_type,
        )  # fmt: skip

    def moments(self, count: int) -> list[Moments]:
        """Events for so many calls; kept for the next block."""
        while len(self._events) < count:
            self._events.append(Moments(*(device.call(self._new_event, 0) for _ in Moments._fields)))
        return self._events[:count]

    def head_start(self, calls: int) -> None:
        """Keep the device busy while the host queues a block."""
        self.use_stream()
        self._spin(self._head_start_cycles * min(calls, HEAD_START_CALLS))

    def plan_head_start(self, queueing_ns: int, calls: int) -> None:
        """Make the next head start long enough for a host that took so long to queue so many calls."""
        in_calls_ns, self._in_calls_ns = self._in_calls_ns, 0
        queueing_ns -= max(0, in_calls_ns - calls * LAUNCH_NS)
        needed = 3 * CYCLES_PER_NS * queueing_ns // (2 * calls)
        self._head_start_cycles = min(max(HEAD_START_CYCLES, needed), HEAD_START_MOST)

    def forget_persisting_lines(self) -> None:
        """Take back what part of the L2 a kernel may have reserved for its own data."""
        self._limit(self._persisting, 0)
        self._reset_persisting()

    def run(self, moments: Moments, invoke: Invoke, prepare: Invoke | None = None, flush_bytes: int = 0) -> Any:
        """Prepare the call, flush the cache, then call between events."""
        stream, record = self.stream, self._record
        self.use_stream()
        if prepare is not None:
            prepare()
        if flush_bytes:
            self._memset(self._flush_address, 0, min(flush_bytes, self._flush_room), stream)
        record(moments.start, stream)
        began = self._now()
        result = invoke()
        self._in_calls_ns += self._now() - began
        record(moments.stop, stream)
        self._record_all(self.context, moments.everything)
        self._wait(stream, moments.everything, 0)
        record(moments.settled, stream)
        return result

    def mark(self, event: Any) -> None:
        """Record one event."""
        self._record(event, self.stream)

    def wait(self) -> None:
        """Wait for the stream. Raises SurfaceFailure for an error of the device."""
        self._check(self._synchronize_stream(self.stream)[0])

    def wait_for_all(self) -> None:
        """Wait for everything in the context. Raises SurfaceFailure for an error of the device."""
        self._check(self._synchronize()[0])

    def between_ns(self, first: Any, second: Any) -> int:
        """Time between two events that have come to pass."""
        error, milliseconds = self._elapsed(first, second)
        self._check(error)
        return int(milliseconds * 1e6)

    def _check(self, error: Any) -> None:
        if error != self._success:
            raise SurfaceFailure(Code.CUDA_ERROR, f"the device reports {error.name}")


class DeviceMapping:
    """One mapped arena with a bound call per slot."""

    def __init__(self, message: Map, fd: int, kernel: LoadedKernel, stream: int) -> None:
        self.memory = device.attach(fd, message.arena.num_bytes, stream=stream)
        self.slots = message.arena.slots
        self.calls: list[Invoke] = [kernel.bind(self.memory, slot, message.arena.scalars) for slot in self.slots]
        self._masked = [[halves(tensor_view(self.memory, item)) for item in slot.inputs] for slot in self.slots]
        self._inout = [[tensor_view(self.memory, item) for item in slot.inout] for slot in self.slots]
        self._kept: dict[int, list[Any]] = {}

    def keep(self, slot: int) -> None:
        """Remember the inout tensors of a slot as they are before its first call of a block."""
        if slot not in self._kept:
            self._kept[slot] = [EMPTY_LIKE(tensor) for tensor in self._inout[slot]]
        for copy, tensor in zip(self._kept[slot], self._inout[slot], strict=True):
            COPY(copy, tensor)

    def restore(self, slot: int) -> None:
        """Give the inout tensors of a slot the contents that were kept: a further call starts from them."""
        for copy, tensor in zip(self._kept.get(slot, ()), self._inout[slot], strict=True):
            COPY(tensor, copy)

    def preparation(self, slot: int, mask: int, *, first: bool, again: bool) -> Callable[[], None] | None:
        """What is done, untimed, before a call: unmasking before a slot's first one, inout tensors before others."""
        if not first:
            return functools.partial(self.restore, slot) if self._inout[slot] else None
        return functools.partial(self.prepare, slot, mask, keep=again)

    def prepare(self, slot: int, mask: int, *, keep: bool = False) -> None:
        """Unmask the inputs of a slot, and convert them where a reference has a convention of its own."""
        if mask:
            for tensor in self._masked[slot]:
                XOR(tensor, mask)
        if keep and self._inout[slot]:
            self.keep(slot)
        # A candidate's call has nothing of the kind.
        if before := getattr(self.calls[slot], "before", None):
            before()


class DeviceLoop(CallLoop):
    """Serves Map, MakeEvents and RunBlock requests of the oracle."""

    def __init__(self, channel: Channel, kernel: LoadedKernel, clock: DeviceClock) -> None:
        super().__init__(channel, kernel)
        self.clock = clock
        self.last_block: tuple[RunBlock, list[Any]] | None = None
        self.returned: deque[tuple[Slot, tuple[ReturnedTensor, ...]]] = deque()
        """What the candidate returned in the calls of a block, copied to their slots."""

    def map(self, request: Map) -> None:
        """Map device memory."""
        mapping = DeviceMapping(request, self.channel.take_fd(), self.kernel, self.clock.stream)
        self.arenas.append(mapping)
        self.channel.send(Mapped(address=mapping.memory.address))

    def again(self, request: Again) -> None:
        """Copy what the last block returned once more."""
        if self.last_block is not None:
            block, results = self.last_block
            self.returned.clear()
            self.answer(request.nonce, block, results)

    def run(self, request: Any, clock: Any = None) -> None:
        """Prepare or run a block; whatever goes wrong in it becomes an answer."""
        try:
            if isinstance(request, MakeEvents):
                self.clock.moments(request.calls)
                self.channel.send(EventsMade(nonce=request.nonce))
            else:
                self.run_block(request)
        except SurfaceFailure as failure:
            self.channel.send(KernelFailed(nonce=request.nonce, code=failure.code, message=failure.message))
        except MemoryError:
            self.channel.send(KernelFailed(nonce=request.nonce, code=Code.OUT_OF_MEMORY, message="out of memory"))
        except BaseException as error:  # process boundary: whatever a candidate raises becomes an answer
            self.channel.send(KernelFailed(nonce=request.nonce, code=code_of(error), message=describe(error)))

    def run_block(self, request: RunBlock) -> None:
        """All calls of a block, the answer with their times, then the outputs."""
        self.clock.forget_persisting_lines()
        self.returned = deque(maxlen=len(self.arenas[request.arena].slots))
        found = Executed(kernels=(), busy_ns=0, flush_ns=0)
        if request.profile:
            masked = sum(len(self.arenas[request.arena].slots[slot].inputs) for slot in request.slots)
            trace, (returned, results) = self.traced(request)
            found = summary(trace, fills=len(request.slots), masks=masked, copies=self.rearranged())
        else:
            returned, results = self.replayed(request) if request.graph else self.queued(request)
        self.channel.send(returned)
        self.clock.wait_for_all()
        self.last_block = request, results
        self.answer(request.nonce, request, results, found)
        # Tensors in reference cycles of the candidate's; what was loaded is too old for this.
        gc.collect(1)

    def invoke(self, mapping: DeviceMapping, slot: int) -> Invoke:
        """A call on a slot. What a candidate returns is copied there as its last part, on the call's own stream."""
        call = mapping.calls[slot]
        if not self.kernel.copied_under_the_clock:
            return call
        memory, arena_slot, materialise = mapping.memory, mapping.slots[slot], self._materialise

        def call_and_copy() -> Any:
            result = call()
            if result is not None:
                self.clock.use_stream()
                self.returned.append((arena_slot, materialise(result, memory, arena_slot)))
            return result

        return call_and_copy

    def rearranged(self) -> int:
        """How many of the copies were from another order of memory, which takes a kernel of the framework's."""
        return sum(
            tensor.strides != item.spec.strides
            for arena_slot, tensors in self.returned
            for item, tensor in zip(arena_slot.separate, tensors, strict=True)
        )

    def traced(self, request: RunBlock) -> tuple[list[tuple[int, int, str]], tuple[BlockReturned, list[Any]]]:
        """A queued block and what the device executed meanwhile: start and length in ns, and name."""
        with self.clock.profile(use_device="cuda", use_cpu=False, use_kineto=True) as trace:
            outcome = self.queued(request)
        events: Any = trace.kineto_results.events()
        found = [(e.start_ns(), e.duration_ns(), e.name()) for e in events if "CUDA" in str(e.device_type())]
        return found, outcome

    def queued(self, request: RunBlock) -> tuple[BlockReturned, list[Any]]:
        """Queue every call between its events, then wait for the stream."""
        clock, mapping = self.clock, self.arenas[request.arena]
        calls = [self.invoke(mapping, slot) for slot in range(len(mapping.calls))]
        moments = clock.moments(len(request.slots))
        results: deque[Any] = deque(maxlen=len(calls))
        clock.mark(clock.begin)
        if len(moments) <= len(calls):
            # A long queue is what do_bench times: calls that the host cannot keep up with take as long as there.
            clock.head_start(len(moments))
        clock.mark(clock.ready)
        seen: set[int] = set()
        started = time.perf_counter_ns()
        for events, slot in zip(moments, request.slots, strict=True):
            again = len(moments) > len(calls)
            prepare = mapping.preparation(slot, request.mask, first=slot not in seen, again=again)
            seen.add(slot)
            results.append(clock.run(events, calls[slot], prepare, request.flush_bytes))
        clock.plan_head_start(time.perf_counter_ns() - started, len(moments))
        clock.wait()
        self.channel.send(Finished(nonce=request.nonce))
        returned = BlockReturned(
            nonce=request.nonce,
            elapsed_ns=tuple(clock.between_ns(events.start, events.stop) for events in moments),
            settled_ns=tuple(clock.between_ns(events.stop, events.settled) for events in moments),
            span_ns=clock.between_ns(clock.begin, moments[-1].settled),
            head_ns=clock.between_ns(clock.begin, clock.ready),
        )
        return returned, list(results)

    def replayed(self, request: RunBlock) -> tuple[BlockReturned, list[Any]]:
        """Record the calls in one graph and time its replays; each sample is the mean of a replay's calls."""
        clock, mapping = self.clock, self.arenas[request.arena]
        calls = [self.invoke(mapping, slot) for slot in request.slots]
        for slot in set(request.slots):
            mapping.prepare(slot, request.mask, keep=True)
        for invoke in calls:
            invoke()
        clock.wait_for_all()
        self.returned.clear()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=clock.torch_stream, capture_error_mode="thread_local"):
                results = [invoke() for invoke in calls]
        except RuntimeError as error:
            raise SurfaceFailure(Code.NOT_CAPTURABLE, f"it cannot be recorded in a CUDA graph: {error}") from error
        graph.replay()
        moments = clock.moments(GRAPH_REPLAYS)
        for events in moments:
            for slot in set(request.slots):
                mapping.restore(slot)
            clock.mark(events.start)
            graph.replay()
            clock.mark(events.stop)
        clock.wait()
        self.channel.send(Finished(nonce=request.nonce))
        times = [clock.between_ns(events.start, events.stop) // len(calls) for events in moments]
        span_ns = clock.between_ns(moments[0].start, moments[-1].stop)
        return BlockReturned(nonce=request.nonce, elapsed_ns=tuple(times), settled_ns=(), span_ns=span_ns), results

    def answer(self, nonce: int, request: RunBlock, results: list[Any], found: Executed | None = None) -> None:
        """Copy returned tensors into their slots, strictly, unless that was done; say that the outputs are there."""
        tensors = [tensor for _arena_slot, copied in self.returned for tensor in copied]
        mapping = self.arenas[request.arena]
        for slot, result in zip(request.slots[-len(results) :], results, strict=True):
            if result is not None and not self.returned:
                tensors += self._materialise(result, mapping.memory, mapping.slots[slot])
        self.clock.wait_for_all()
        found = found or Executed(kernels=(), busy_ns=0, flush_ns=0)
        self.channel.send(OutputsReady(nonce=nonce, tensors=tuple(tensors), **found._asdict()))


def code_of(error: BaseException) -> Code:
    """The reason code for what a candidate raised on a GPU."""
    if isinstance(error, torch.OutOfMemoryError | DeviceOutOfMemory):
        return Code.OUT_OF_MEMORY
    return Code.CUDA_ERROR if any(word in str(error) for word in ("CUDA error", "CUDA_ERROR")) else Code.EXCEPTION


def halves(tensor: Any) -> Any:
    """A tensor's memory as 16-bit integers, the mask's size; an odd byte at the end is left out."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    if flat.element_size() == 1:
        flat = flat.view(torch.uint8)[: flat.numel() // 2 * 2]
    return flat.view(torch.int16)
