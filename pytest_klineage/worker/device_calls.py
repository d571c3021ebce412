"""The call loop of a worker on a GPU: blocks of calls queued without waiting, timed by events, replayed as graphs.

Three moments of every call are taken on the device: its start, the end of what it queued on its stream, and the moment
when nothing at all was left to do in the context. Work on another stream lies between the second and the third; the
next call's flush waits for the third, so nothing hides behind it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from pytest_klineage.channel import Channel
from pytest_klineage.records import Code, KernelTime
from pytest_klineage.records.messages import (
    Again,
    BlockReturned,
    Done,
    Failed,
    Map,
    Mapped,
    ReturnedTensor,
    RunBlock,
)
from pytest_klineage.surfaces.base import Invoke, Loaded, SurfaceFailure
from pytest_klineage.worker import device
from pytest_klineage.worker.calls import CallLoop

HEAD_START_CYCLES = 250_000
"""The device spins for so many of its cycles per call (0.15 ms) before a block begins: by then the calls are queued,
and no call's time is that of the host's launching it."""
HEAD_START_KERNEL = "spin_kernel"
"""How a profile names it."""
HEAD_START_CALLS = 40
"""Longer blocks get the head start of so many calls."""
GRAPH_REPLAYS = 5
MAX_KERNELS = 100
MAX_NAME = 240
"""Characters of a kernel's name that a record keeps."""


class Moments(NamedTuple):
    """The events of one call."""

    start: Any
    stop: Any
    everything: Any
    settled: Any


class DeviceClock:
    """Events on one stream. Made before any candidate is imported; it binds the driver's functions for good."""

    def __init__(self, flush_bytes: int) -> None:
        import torch
        from cuda.bindings import driver

        self.torch_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch has no types here
        torch.cuda.set_stream(self.torch_stream)
        self.stream = self.torch_stream.cuda_stream
        self.context = device.call(driver.cuCtxGetCurrent)
        self._flush = torch.empty(max(1, flush_bytes), dtype=torch.uint8, device="cuda")
        self._flush_address, self._flush_bytes = self._flush.data_ptr(), flush_bytes
        self._events: list[Moments] = []
        self.begin = device.call(driver.cuEventCreate, 0)
        """A block's beginning, before the head start."""
        self._new_event, self._record, self._wait = driver.cuEventCreate, driver.cuEventRecord, driver.cuStreamWaitEvent
        self._record_all = driver.cuCtxRecordEvent
        self._memset, self._elapsed = driver.cuMemsetD8Async, driver.cuEventElapsedTime
        self._synchronize_stream, self._synchronize = driver.cuStreamSynchronize, driver.cuCtxSynchronize
        self._limit, self._persisting = driver.cuCtxSetLimit, driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        self._reset_persisting = driver.cuCtxResetPersistingL2Cache
        self._success = driver.CUresult.CUDA_SUCCESS
        self._spin: Any = torch.cuda._sleep

    def moments(self, count: int) -> list[Moments]:
        """Events for so many calls; kept for the next block."""
        while len(self._events) < count:
            self._events.append(Moments(*(device.call(self._new_event, 0) for _ in Moments._fields)))
        return self._events[:count]

    def head_start(self, calls: int) -> None:
        """Keep the device busy while the host queues a block."""
        self._spin(HEAD_START_CYCLES * min(calls, HEAD_START_CALLS))

    def forget_persisting_lines(self) -> None:
        """Take back what part of the L2 a kernel may have reserved for its own data."""
        self._limit(self._persisting, 0)
        self._reset_persisting()

    def run(self, moments: Moments, invoke: Invoke) -> Any:
        """Flush the cache, then call between events."""
        stream, record = self.stream, self._record
        if self._flush_bytes:
            self._memset(self._flush_address, 0, self._flush_bytes, stream)
        record(moments.start, stream)
        result = invoke()
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

    def __init__(self, message: Map, fd: int, kernel: Loaded, stream: int) -> None:
        self.memory = device.attach(fd, message.arena.num_bytes, stream=stream)
        self.slots = message.arena.slots
        self.calls: list[Invoke] = [kernel.bind(self.memory, slot, message.arena.scalars) for slot in self.slots]


class DeviceLoop(CallLoop):
    """Serves Map and RunBlock requests of the oracle."""

    def __init__(self, channel: Channel, kernel: Loaded, clock: DeviceClock) -> None:
        super().__init__(channel, kernel)
        self.clock = clock
        self.last_block: tuple[RunBlock, list[Any]] | None = None

    def map(self, request: Map) -> None:
        """Map device memory."""
        mapping = DeviceMapping(request, self.channel.take_fd(), self.kernel, self.clock.stream)
        self.arenas.append(mapping)
        self.channel.send(Mapped(address=mapping.memory.address))

    def again(self, request: Again) -> None:
        """Copy what the last block returned once more."""
        if self.last_block is not None:
            block, results = self.last_block
            self.answer(request.nonce, block, results)

    def run(self, request: Any, clock: Any = None) -> None:
        """Run a block; whatever goes wrong in it becomes an answer."""
        try:
            self.run_block(request)
        except SurfaceFailure as failure:
            self.channel.send(Failed(nonce=request.nonce, code=failure.code, message=failure.message))
        except MemoryError:
            self.channel.send(Failed(nonce=request.nonce, code=Code.OUT_OF_MEMORY, message="out of memory"))
        except BaseException as error:  # process boundary: whatever a candidate raises becomes an answer
            from pytest_klineage.worker.runtime import describe

            self.channel.send(Failed(nonce=request.nonce, code=code_of(error), message=describe(error)))

    def run_block(self, request: RunBlock) -> None:
        """All calls of a block, the answer with their times, then the outputs."""
        self.clock.forget_persisting_lines()
        for slot in set(request.slots):
            # What a reference converts untimed; a candidate's call has nothing of the kind.
            if before := getattr(self.arenas[request.arena].calls[slot], "before", None):
                before()
        if request.profile:
            (returned, results), kernels, busy_ns = profiled(lambda: self.queued(request), len(request.slots))
        else:
            returned, results = self.replayed(request) if request.graph else self.queued(request)
            kernels, busy_ns = (), 0
        self.channel.send(returned)
        self.clock.wait_for_all()
        self.last_block = request, results
        self.answer(request.nonce, request, results, kernels, busy_ns)

    def queued(self, request: RunBlock) -> tuple[BlockReturned, list[Any]]:
        """Queue every call between its events, then wait for the stream."""
        clock, calls = self.clock, self.arenas[request.arena].calls
        moments = clock.moments(len(request.slots))
        results: deque[Any] = deque(maxlen=len(calls))
        clock.mark(clock.begin)
        if len(moments) <= len(calls):
            # A long queue is what do_bench times: calls that the host cannot keep up with take as long as there.
            clock.head_start(len(moments))
        for events, slot in zip(moments, request.slots, strict=True):
            results.append(clock.run(events, calls[slot]))
        clock.wait()
        returned = BlockReturned(
            nonce=request.nonce,
            elapsed_ns=tuple(clock.between_ns(events.start, events.stop) for events in moments),
            settled_ns=tuple(clock.between_ns(events.stop, events.settled) for events in moments),
            span_ns=clock.between_ns(clock.begin, moments[-1].settled),
        )
        return returned, list(results)

    def replayed(self, request: RunBlock) -> tuple[BlockReturned, list[Any]]:
        """Record the calls in one graph and time its replays; each sample is the mean of a replay's calls."""
        import torch

        clock, calls = self.clock, [self.arenas[request.arena].calls[slot] for slot in request.slots]
        for invoke in calls:
            invoke()
        clock.wait_for_all()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=clock.torch_stream, capture_error_mode="thread_local"):
                results = [invoke() for invoke in calls]
        except RuntimeError as error:
            raise SurfaceFailure(Code.NOT_CAPTURABLE, f"it cannot be recorded in a CUDA graph: {error}") from error
        graph.replay()
        moments = clock.moments(GRAPH_REPLAYS)
        for events in moments:
            clock.mark(events.start)
            graph.replay()
            clock.mark(events.stop)
        clock.wait()
        times = [clock.between_ns(events.start, events.stop) // len(calls) for events in moments]
        span_ns = clock.between_ns(moments[0].start, moments[-1].stop)
        return BlockReturned(nonce=request.nonce, elapsed_ns=tuple(times), settled_ns=(), span_ns=span_ns), results

    def answer(
        self, nonce: int, request: RunBlock, results: list[Any], kernels: tuple[KernelTime, ...] = (), busy_ns: int = 0
    ) -> None:
        """Copy returned tensors into their slots, strictly, and say that the outputs are there."""
        tensors: list[ReturnedTensor] = []
        mapping = self.arenas[request.arena]
        for slot, result in zip(request.slots[-len(results) :], results, strict=True):
            if result is not None:
                from pytest_klineage.worker.materialise import materialise

                tensors += materialise(result, mapping.memory, mapping.slots[slot])
        self.clock.wait_for_all()
        self.channel.send(Done(nonce=nonce, tensors=tuple(tensors), kernels=kernels, busy_ns=busy_ns))


def code_of(error: BaseException) -> Code:
    """The reason code for what a candidate raised on a GPU."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return Code.OUT_OF_MEMORY
    return Code.CUDA_ERROR if "CUDA error" in str(error) else Code.EXCEPTION


def profiled(run: Any, flushes: int) -> tuple[Any, tuple[KernelTime, ...], int]:
    """What `run` returns, what the device executed meanwhile, and for how long it was busy with that.

    So many of the longest fills are the flushes between calls and are left out.
    """
    # torch.profiler would import half of torch when it starts, after the files were put out of reach.
    from torch.autograd.profiler import profile

    with profile(use_device="cuda", use_cpu=False, use_kineto=True) as trace:
        returned = run()
    results: Any = trace.kineto_results
    executed = [
        (event.start_ns(), event.duration_ns(), event.name())
        for event in results.events()
        if "CUDA" in str(event.device_type())
    ]
    fills = sorted((item for item in executed if item[2].startswith("Memset")), key=lambda item: -item[1])
    left = {item for item in set(executed) - set(fills[:flushes]) if HEAD_START_KERNEL not in item[2]}
    return returned, by_name(left), covered_ns([(start, start + length) for start, length, _name in left])


def by_name(executed: set[tuple[int, int, str]]) -> tuple[KernelTime, ...]:
    """Calls and time by name, longest first, bounded."""
    total: dict[str, list[int]] = {}
    for _start, length, name in executed:
        entry = total.setdefault(name[:MAX_NAME], [0, 0])
        entry[0] += 1
        entry[1] += length
    kernels = [KernelTime(name=name, calls=calls, total_ns=spent) for name, (calls, spent) in total.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_ns)[:MAX_KERNELS])


def covered_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of time spans."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
